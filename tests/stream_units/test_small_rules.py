"""Keys, the digest of all weights, polling, signatures."""

from __future__ import annotations

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import InvalidArgument, SignatureInvalid
from thinwire.store.store import check_key
from thinwire.stream import keys
from thinwire.stream.polling import MAX_WAIT_S, Cadence
from thinwire.stream.signing import SigningKey, check_public, check_signature
from thinwire.stream.weights import layout_digest, weights_digest

VERSIONS = st.integers(0, keys.MAX_VERSION)
LINEAGE = "0123456789abcdef" * 2


# Keys


@given(VERSIONS, VERSIONS)
def test_keys_sort_like_their_versions(one: int, two: int) -> None:
    assert (keys.manifest(LINEAGE, one) < keys.manifest(LINEAGE, two)) == (one < two)
    assert keys.version_of(keys.version_name(one)) == one
    name = keys.merge(LINEAGE, one, two).removeprefix(keys.merges(LINEAGE))
    assert keys.versions_of(name.removesuffix(".json")) == (one, two)


@given(st.text())
def test_only_what_we_would_write_is_read_as_a_version(name: str) -> None:
    found = keys.version_of(name)
    assert found is None or keys.version_name(found) == name
    pair = keys.versions_of(name)
    assert pair is None or f"{keys.version_name(pair[0])}-{keys.version_name(pair[1])}" == name
    assert not keys.is_lineage(name) or set(name) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1",
        "0" * 11,
        "0" * 13,
        "00000000000a",
        "-00000000001",
        "\u0660" * 12,
        "²" * 12,
        "0" * 12 + "\n",
    ],
)
def test_hostile_version_names(name: str) -> None:
    assert keys.version_of(name) is None
    assert keys.versions_of(f"{name}-{'0' * 12}") is None


@pytest.mark.parametrize(
    "name", ["", "../" + "0" * 29, "0" * 31, "0" * 33, "A" * 32, "0" * 32 + "\n", "\u0660" * 32]
)
def test_hostile_lineages(name: str) -> None:
    assert not keys.is_lineage(name)


@given(VERSIONS, VERSIONS, st.integers(0, 4095))
def test_every_key_is_one_that_stores_take(base: int, version: int, number: int) -> None:
    for key in (
        keys.manifest(LINEAGE, version),
        keys.catalog(LINEAGE),
        keys.shard(LINEAGE, base, version, LINEAGE, number, "f" * 64),
        keys.merge(LINEAGE, base, version),
        keys.anchor(LINEAGE, version),
        keys.anchor_file(LINEAGE, version, LINEAGE, "model.safetensors"),
        keys.lease(LINEAGE, version),
        keys.maintainer(),
        keys.STREAM,
        keys.HEAD,
    ):
        check_key(key)


def test_golden_keys() -> None:
    """They are part of the format."""
    assert keys.manifest(LINEAGE, 7) == f"{LINEAGE}/manifests/000000000007.json"
    assert keys.shard(LINEAGE, 6, 7, "ab" * 16, 3, "cd" * 32) == (
        f"{LINEAGE}/deltas/000000000006-000000000007/{'ab' * 8}-0003-{'cd' * 16}.tw"
    )
    assert keys.merge(LINEAGE, 1, 5) == f"{LINEAGE}/merges/000000000001-000000000005.json"
    assert keys.anchor(LINEAGE, 9) == f"{LINEAGE}/anchors/000000000009.json"
    assert keys.anchor_file(LINEAGE, 9, "ab" * 16, "config.json") == (
        f"{LINEAGE}/anchors/000000000009-{'ab' * 8}/config.json"
    )


# The digest of all weights

ROWS = [
    ("b", "BF16", [2, 3], "00000000000000ff"),
    ("a", "F32", (), "0123456789abcdef"),
    ("é", "I64", [0], "ffffffffffffffff"),
]
LINES = (
    '["a","F32",[],"0123456789abcdef"]\n'
    '["b","BF16",[2,3],"00000000000000ff"]\n'
    '["é","I64",[0],"ffffffffffffffff"]\n'
)


def test_weights_digest() -> None:
    wanted = blake3(LINES.encode()).hexdigest()
    assert wanted == "7bfa06e1d85f7a7b7e1dbf9bbce705e0c6463ffb3337c8a751cb5ea7de7298b5"
    assert weights_digest(ROWS) == weights_digest(reversed(ROWS)) == wanted
    assert weights_digest([]) == blake3(b"").hexdigest()


@pytest.mark.parametrize(
    "row",
    [
        ("c", "BF16", [2, 3], "00000000000000ff"),
        ("b", "F16", [2, 3], "00000000000000ff"),
        ("b", "BF16", [3, 2], "00000000000000ff"),
        ("b", "BF16", [2, 3], "00000000000000fe"),
    ],
)
def test_weights_digest_covers_everything(row: tuple[str, str, list[int], str]) -> None:
    assert weights_digest([row, *ROWS[1:]]) != weights_digest(ROWS)


LAYOUT = [
    ("model.safetensors", "header", 64, "00000000000000ff"),
    ("config.json", "file", 2, "0123456789abcdef"),
]


def test_layout_digest() -> None:
    lines = (
        '["config.json","file",2,"0123456789abcdef"]\n'
        '["model.safetensors","header",64,"00000000000000ff"]\n'
    )
    assert (
        layout_digest(LAYOUT) == layout_digest(LAYOUT[::-1]) == blake3(lines.encode()).hexdigest()
    )


# Polling


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(0, 9)), max_size=9),
    st.floats(0, 1e9),
    st.floats(0.01, 100),
    st.floats(0, 1),
)
def test_waits_are_bounded(
    found: list[tuple[float, float, int]], now_s: float, poll_s: float, jitter: float
) -> None:
    """Whatever the clocks of others say."""
    cadence = Cadence()
    for created_s, found_s, count in found:
        cadence.note(created_s, found_s, count)
    wait_s = cadence.wait_s(now_s, poll_s, jitter)
    assert poll_s <= wait_s <= max(poll_s, 1.2001 * MAX_WAIT_S)


@given(st.floats(2, 100), st.floats(-1e6, 1e6), st.floats(0, 1), st.integers(4, 30))
def test_looks_are_few(interval_s: float, offset_s: float, jitter: float, count: int) -> None:
    """Versions that come on time are found soon, after few looks, whatever the clocks' offset."""
    cadence = Cadence()
    now_s = 0.0
    for number in range(count):
        created_s = number * interval_s
        looks = 0
        while now_s < created_s:
            now_s += cadence.wait_s(now_s, 0.05, jitter)
            looks += 1
        cadence.note(created_s + offset_s, now_s, 1)
        assert number < 5 or looks <= 20
        assert now_s - created_s <= max(0.15 * interval_s, 0.1)


def test_several_versions_at_once_count_as_several() -> None:
    cadence = Cadence()
    for number in range(9):
        cadence.note(40.0 * number, 40.0 * number, 4)
    assert cadence.wait_s(320.0, 0.01, 0.5) == pytest.approx(0.8 * 10)


# Signing


def test_signatures() -> None:
    key = SigningKey.generate()
    signature = key.sign(b"data")
    check_signature(b"data", key.public, signature, [], "it")
    check_signature(b"data", key.public, signature, [key.public, "0" * 64], "it")
    check_signature(b"data", "", "", [], "it")


@pytest.mark.parametrize("fault", ["data", "signature", "signer", "no signer", "half", "text"])
@pytest.mark.parametrize("is_pinned", [True, False])
def test_wrong_signatures(fault: str, is_pinned: bool) -> None:
    """A wrong signature is refused even where nobody is pinned."""
    key, other = SigningKey.generate(), SigningKey.generate()
    data, signer, signature = b"data", key.public, key.sign(b"data")
    if fault == "data":
        data = b"date"
    elif fault == "signature":
        signature = other.sign(b"data")
    elif fault == "signer":
        signer = other.public
    elif fault == "no signer":
        signer = ""
    elif fault == "half":
        signature = signature[:64]
    else:
        signature = "zz" * 64
    trusted = [key.public] if is_pinned else []
    with pytest.raises(SignatureInvalid):
        check_signature(data, signer, signature, trusted, "it")


def test_pinning() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    with pytest.raises(SignatureInvalid, match="not signed"):
        check_signature(b"data", "", "", [key.public], "it")
    with pytest.raises(SignatureInvalid, match="not a pinned key"):
        check_signature(b"data", other.public, other.sign(b"data"), [key.public], "it")


def test_keys_survive_a_file_and_show_no_secret() -> None:
    key = SigningKey.generate()
    pem = key.to_pem()
    again = SigningKey.from_pem(pem)
    assert again.public == key.public
    assert again.sign(b"x") == key.sign(b"x")
    secret = pem.decode().splitlines()[1]
    assert secret not in repr(key)
    assert key.public in repr(key)


def test_files_that_are_no_signing_key() -> None:
    encrypted = ed25519.Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    curve = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    for pem in (b"", b"nonsense", encrypted, curve):
        with pytest.raises(InvalidArgument):
            SigningKey.from_pem(pem)


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "g" * 64])
def test_texts_that_are_no_public_key(text: str) -> None:
    with pytest.raises(InvalidArgument):
        check_public(text)
