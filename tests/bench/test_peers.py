"""Every row gives back what it was given, bit for bit, and has the layout that it claims."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest

from thinwire.bench import (
    PEER_NAMES,
    Checkpoint,
    CheckpointPeer,
    MissingExtraError,
    PerTensor,
    available_peers,
    make_peer,
)
from thinwire.bench.framing import pack, unpack
from thinwire.bench.measure import check_round_trip
from thinwire.bench.peers.arc import Arc, OwnArc
from thinwire.bench.peers.zstd_one import load_zstd
from thinwire.bench.tensors import as_tensor, changed_count, raw_bytes

Pair = tuple[Checkpoint, Checkpoint]
ARC_NAMES = ("arc_v1", "arc_v2", "arc_v3")


def make_or_skip(name: str) -> CheckpointPeer:
    try:
        return make_peer(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


def real_arc_or_skip(name: str) -> Arc:
    try:
        return Arc(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(params=PEER_NAMES)
def peer(request: pytest.FixtureRequest) -> CheckpointPeer:
    return make_or_skip(request.param)


def test_round_trip(peer: CheckpointPeer, pair: Pair) -> None:
    base, new = pair
    before = {name: tensor.words.copy() for name, tensor in base.items()}
    payload = peer.encode(base, new)
    assert isinstance(payload, bytes)
    check_round_trip(peer.name, new, peer.decode(base, payload))
    assert 0 <= peer.framing_bytes(payload) <= len(payload)
    for name, words in before.items():
        np.testing.assert_array_equal(base[name].words, words)


def test_read_only_input(peer: CheckpointPeer, sparse_pair: Pair) -> None:
    base, new = sparse_pair
    for tensor in (*base.values(), *new.values()):
        tensor.words.flags.writeable = False
    check_round_trip(peer.name, new, peer.decode(base, peer.encode(base, new)))


def test_name_is_the_one_asked_for(peer: CheckpointPeer) -> None:
    assert peer.name in PEER_NAMES
    assert isinstance(peer, CheckpointPeer)


def test_unknown_peer() -> None:
    with pytest.raises(ValueError, match="arc_v3"):
        make_peer("arc_v9")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fireworks_delta_compression", None)
    with pytest.raises(MissingExtraError, match=r"arc_v2 needs .*fireworks-delta-compression"):
        Arc("arc_v2")


def test_rows_without_their_package_are_our_own(
    monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    monkeypatch.setitem(sys.modules, "fireworks_delta_compression", None)
    peers, skipped = available_peers(ARC_NAMES)
    assert not skipped
    for name, peer in zip(ARC_NAMES, peers, strict=True):
        assert isinstance(peer, PerTensor)
        assert isinstance(peer.peer, OwnArc)
        assert peer.name == name
        check_round_trip(name, pair[1], peer.decode(pair[0], peer.encode(*pair)))


@pytest.mark.parametrize("name", ARC_NAMES)
def test_our_own_rows_are_the_packages(name: str, pair: Pair) -> None:
    """Each reads the other's payloads, and ours are no larger: they may stand for the package's."""
    real, own = PerTensor(real_arc_or_skip(name)), PerTensor(OwnArc(name))
    row = make_peer(name)
    assert isinstance(row, PerTensor)
    assert isinstance(row.peer, Arc)
    base, new = pair
    theirs, ours = real.encode(base, new), own.encode(base, new)
    check_round_trip("ours by the package", new, real.decode(base, ours))
    check_round_trip("the package's by ours", new, own.decode(base, theirs))
    payloads, checksums = unpack(ours)
    their_payloads, their_checksums = unpack(theirs)
    assert checksums == their_checksums
    for key, payload in payloads.items():
        assert payload.words.size <= their_payloads[key].words.size


def test_arc_v3_waits_for_its_smallest_candidate(sparse_pair: Pair) -> None:
    peer = PerTensor(real_arc_or_skip("arc_v3"))
    sizes = {len(peer.encode(*sparse_pair)) for _ in range(5)}
    assert len(sizes) == 1


def test_arc_leaves_the_package_as_it_was(sparse_pair: Pair) -> None:
    peer = real_arc_or_skip("arc_v3")
    arc3 = importlib.import_module("fireworks_delta_compression.backends.arc3")
    before = arc3._CANDIDATE_WAIT_MULTIPLIER
    PerTensor(peer).encode(*sparse_pair)
    assert before == arc3._CANDIDATE_WAIT_MULTIPLIER


def test_arc_keeps_unchanged_tensors_and_xor_does_not() -> None:
    tensor = as_tensor("BF16", (4,), np.arange(4, dtype=np.uint16))
    for name, kept in [("arc_v2", True), ("xor_zstd1", False)]:
        tensors, _ = unpack(make_or_skip(name).encode({"w": tensor}, {"w": tensor}))
        assert ("w" in tensors) is kept


def test_trl_raw_takes_48_bits_a_change(sparse_pair: Pair) -> None:
    peer = make_peer("trl_raw")
    payload = peer.encode(*sparse_pair)
    assert len(payload) - peer.framing_bytes(payload) == 6 * changed_count(*sparse_pair)


def test_trl_layout(sparse_pair: Pair) -> None:
    tensors, metadata = unpack(make_peer("trl_gap_delta").encode(*sparse_pair))
    assert metadata["format"] == "sparse_weight_patch"
    assert metadata["encoding"] == "gap_delta"
    assert metadata["total_changed_elements"] == str(changed_count(*sparse_pair))
    changed = np.flatnonzero(sparse_pair[0]["m"].words != sparse_pair[1]["m"].words)
    gaps = np.diff(changed, prepend=-1) - 1
    assert tensors["m.idx"].dtype == "U16"
    np.testing.assert_array_equal(tensors["m.idx"].words, gaps)


def test_trl_gaps_widen_to_32_bits() -> None:
    base = as_tensor("BF16", (70_000,), np.zeros(70_000, np.uint16))
    new = base._replace(words=base.words.copy())
    new.words[[3, 69_999]] = 1
    tensors, _ = unpack(make_peer("trl_gap_delta").encode({"w": base}, {"w": new}))
    assert tensors["w.idx"].dtype == "U32"
    assert tensors["w.idx"].words.tolist() == [3, 69_995]


def test_pulse_layout() -> None:
    base = as_tensor("BF16", (300, 4), np.zeros(1200, np.uint16))
    new = base._replace(words=base.words.copy())
    new.words[[1, 3, 4 * 299 + 2]] = 9
    file = load_zstd().decompress(make_or_skip("pulse").encode({"w": base}, {"w": new}))
    data_start = 4 + int.from_bytes(file[:4], "little")
    header = json.loads(file[4:data_start])
    assert header["version"] == 31
    (entry,) = header["tensors"]
    assert (entry["name"], entry["num_nonzero"]) == ("w", 3)
    # A step of 299 rows does not fit a byte, so all rows of the tensor take two.
    assert (entry["row_dtype"], entry["col_dtype"]) == ("uint16", "uint16")
    rows = np.frombuffer(file, "<u2", 3, data_start)
    columns = np.frombuffer(file, "<u2", 3, data_start + entry["rows_size"])
    assert rows.tolist() == [0, 0, 299]
    assert columns.tolist() == [1, 2, 2]
    assert file[data_start + entry["values_offset"] :] == bytes([9, 0] * 3)


def test_framing_round_trip_and_rejects_a_short_file(sparse_pair: Pair) -> None:
    base, _ = sparse_pair
    file = pack(base, {"k": "v"})
    tensors, metadata = unpack(file)
    check_round_trip("framing", base, tensors)
    assert metadata == {"k": "v"}
    assert len(file) % 8 == raw_bytes(base) % 8
    with pytest.raises(ValueError, match="far"):
        unpack(file[:-2])


def test_tensor_rejects_wrong_size_and_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="needs 8 bytes, got 6"):
        as_tensor("BF16", (4,), np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match="BF17"):
        as_tensor("BF17", (4,), np.zeros(4, np.uint16))
    viewed = as_tensor("F32", (2,), np.zeros(8, np.uint8))
    assert viewed[:2] == ("F32", (2,))
    assert viewed.words.dtype == np.uint32
