"""A part of a delta: what it takes, and that nothing else is ever read."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from thinwire.codec import reader
from thinwire.codec.container import HEADER, TRAILER, parse_head
from thinwire.codec.delta import Delta
from thinwire.codec.selection import (
    MAX_DIGEST_BYTES,
    MAX_HEAD_BYTES,
    MAX_STORED_INDEX_BYTES,
    head_bytes,
    needed_ranges,
    parse_partial_head,
)
from thinwire.codec.write import Attachment, Pair, write_delta
from thinwire.errors import (
    ChecksumMismatch,
    Corrupt,
    FormatError,
    LimitExceeded,
    ThinwireError,
    Truncated,
    Unsupported,
)

from . import sample_delta
from .making import flipped_bits
from .writer import unpack, with_sections

Arrays = dict[str, np.ndarray]
NAMES = list(dict.fromkeys([*sample_delta.BASE, *sample_delta.NEW, "unknown"]))
# Names no method of a chunk and begins no zstd frame: whoever decodes it fails.
GARBAGE = 0xF0


def partial(payload: bytes, only: set[str], fill: int = GARBAGE) -> tuple[frozenset[str], bytes]:
    """The closure of ``only``, and a file of full size in which just its ranges are right."""
    names, ranges = needed_ranges(parse_partial_head(payload), only)
    data = np.full(len(payload), fill, np.uint8)
    for start, stop in ranges:
        data[start:stop] = np.frombuffer(payload[start:stop], np.uint8)
    return names, data.tobytes()


def decode(delta: Delta, bases: Arrays, workers: int = 1) -> Arrays:
    outs: Arrays = {}

    def out_for(entry: sample_delta.Delta) -> np.ndarray:
        return outs.setdefault(entry.name, np.empty(entry.byte_count, np.uint8))

    delta.apply(bases, out_for, workers=workers)
    return outs


def decode_by_changes(delta: Delta, bases: Arrays) -> Arrays:
    outs = {
        name: bases[name].copy()
        for name, entry in delta.tensors.items()
        if entry.kind in ("delta", "same")
    }
    for change in delta.changes(bases):
        words = outs[change.name].reshape(-1, change.word_bytes)
        words[change.first_word + change.positions] = change.words.reshape(-1, change.word_bytes)
    return outs


def check_partial(payload: bytes, base: Arrays, new: Arrays, only: set[str]) -> frozenset[str]:
    """Decode ``only`` from what it needs, with the bases of what it needs."""
    names, data = partial(payload, only)
    bases = {name: bits for name, bits in base.items() if name in names}
    with Delta.open(data, only=only, check_trailer=False) as delta:
        assert delta.tensors.keys() == names
        for found in (decode(delta, bases), decode(delta, bases, 3)):
            assert found.keys() == names & new.keys()
            assert all(bits.tobytes() == new[name].tobytes() for name, bits in found.items())
        for name, bits in decode_by_changes(delta, bases).items():
            assert bits.tobytes() == new[name].tobytes()
        for attachment in delta.attachments:
            if delta.is_carried(attachment):
                delta.attachment_data(attachment)
    return names


@given(st.sets(st.sampled_from(NAMES)))
@example(set())
@example(set(NAMES))
@settings(deadline=None)
def test_a_part_is_decoded_from_its_ranges_alone(only: set[str]) -> None:
    names = check_partial(sample_delta.PAYLOAD, sample_delta.BASE, sample_delta.NEW, only)
    assert names >= only - {"unknown"}


@st.composite
def deltas(draw: st.DrawFn) -> tuple[bytes, Arrays, Arrays]:
    """Tensors of any kind and size: alone, in groups, of two chunks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base, new, pairs = {}, {}, []
    sizes = st.sampled_from([0, 1, 300, 70_000, (1 << 20) + 3])
    kinds = st.sampled_from(["delta", "delta", "same", "full", "removed"])
    for number, (size, kind) in enumerate(draw(st.lists(st.tuples(sizes, kinds), max_size=8))):
        name, width = f"t{number}", draw(st.sampled_from([1, 2]))
        old = rng.integers(0, 256, size * width, dtype=np.uint8)
        now = old.copy()
        if kind == "delta":
            now[rng.random(now.size) < 0.001] += 1
        sides = (None if kind == "full" else old, None if kind == "removed" else now)
        pairs.append(Pair(name, {1: "U8", 2: "BF16"}[width], (size,), *sides))
        base |= {} if sides[0] is None else {name: sides[0]}
        new |= {} if sides[1] is None else {name: sides[1]}
    attachments = [Attachment("config.json", "file", b"{}", 2, 0)] * draw(st.integers(0, 1))
    attachments = [a._replace(digest=_digest(b"{}")) for a in attachments]
    out = io.BytesIO()
    write_delta(out, pairs, attachments)
    return out.getvalue(), base, new


def _digest(data: bytes) -> int:
    from thinwire.codec.digest import xxh3_64

    return xxh3_64(data)


@given(deltas(), st.sets(st.integers(0, 8).map(lambda number: f"t{number}")))
@settings(max_examples=20, deadline=None)
def test_a_part_of_any_delta(made: tuple[bytes, Arrays, Arrays], only: set[str]) -> None:
    check_partial(*made, only)


@given(st.sets(st.sampled_from(NAMES)))
@settings(deadline=None)
def test_ranges_rise_do_not_touch_and_hold_no_more_than_needed(only: set[str]) -> None:
    head = parse_partial_head(sample_delta.PAYLOAD)
    names, ranges = needed_ranges(head, only)
    edges = [edge for span in ranges for edge in span]
    assert edges == sorted(set(edges))
    assert edges[0] == 0
    assert edges[-1] <= head.file_bytes - TRAILER.size
    chosen = [tensor for tensor in head.index.tensors if tensor.name in names]
    groups = {tensor.group for tensor in chosen} - {None}
    wanted = head.sections_start + sum(sum(tensor.sizes) for tensor in chosen)
    wanted += sum(head.index.groups[group].size for group in groups if group is not None)
    wanted += sum(attachment.stored or 0 for attachment in head.index.attachments)
    assert sum(stop - start for start, stop in ranges) == wanted


def test_all_tensors_take_everything_but_the_trailer() -> None:
    head = parse_partial_head(sample_delta.PAYLOAD)
    assert needed_ranges(head, NAMES)[1] == [(0, len(sample_delta.PAYLOAD) - TRAILER.size)]


def test_a_sparse_file(tmp_path: Path) -> None:
    payload, path = sample_delta.PAYLOAD, tmp_path / "part.tw"
    names, ranges = needed_ranges(parse_partial_head(payload), {"large"})
    with path.open("wb") as file:
        file.truncate(len(payload))
        for start, stop in ranges:
            file.seek(start)
            file.write(payload[start:stop])
    with Delta.open(path, only={"large"}, check_trailer=False) as delta:
        found = decode(delta, {"large": sample_delta.BASE["large"]})
    assert found["large"].tobytes() == sample_delta.NEW["large"].tobytes()
    assert names == {"large"}
    with pytest.raises(ChecksumMismatch, match="trailer"):
        Delta.open(path, only={"large"})


def test_a_group_comes_whole() -> None:
    with Delta.open(sample_delta.PAYLOAD, only=["bias"]) as delta:
        assert list(delta.tensors) == ["weights", "bias", "frozen"]


def test_the_order_is_the_index_order() -> None:
    with (
        Delta.open(sample_delta.PAYLOAD) as whole,
        Delta.open(sample_delta.PAYLOAD, only=["noise", "large"]) as part,
    ):
        assert [name for name in whole.tensors if name in part.tensors] == list(part.tensors)
        assert all(whole.tensors[name] == entry for name, entry in part.tensors.items())
        assert part.identity == whole.identity


def test_a_selection_does_not_weaken_the_trailer() -> None:
    damaged = bytearray(sample_delta.PAYLOAD)
    damaged[-9] ^= 1
    with pytest.raises(ChecksumMismatch, match="trailer"):
        Delta.open(bytes(damaged), only={"large"})


def test_identity_without_the_trailer_is_that_of_the_head() -> None:
    with (
        Delta.open(sample_delta.PAYLOAD) as whole,
        Delta.open(sample_delta.PAYLOAD, check_trailer=False) as unchecked,
    ):
        assert whole.identity.startswith(unchecked.identity)
        assert len(unchecked.identity) == 16


def test_damage_that_no_trailer_finds_never_gives_wrong_weights() -> None:
    payload = sample_delta.PAYLOAD
    only = {"large", "noise"}
    _, data = partial(payload, only)
    for damaged in flipped_bits(unpack(payload).sections):
        wrong = with_sections(payload, damaged)
        mixed = bytes(
            there if there == here else other
            for there, here, other in zip(data, payload, wrong, strict=True)
        )
        try:
            with Delta.open(mixed, only=only, check_trailer=False) as delta:
                found = decode(delta, sample_delta.BASE)
        except ThinwireError:
            continue
        assert all(found[n].tobytes() == sample_delta.NEW[n].tobytes() for n in found)


def test_opening_looks_at_no_other_section(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(reader, "method_name", lambda first: seen.append(first) or "seen")
    _, data = partial(sample_delta.PAYLOAD, {"large", "bias"})
    Delta.open(data, only={"large", "bias"}, check_trailer=False)
    assert seen
    assert GARBAGE not in seen


@pytest.mark.parametrize("fill", [GARBAGE, 0])
def test_holes_that_are_needed_are_an_error(fill: int) -> None:
    _, data = partial(sample_delta.PAYLOAD, {"noise"}, fill)
    with Delta.open(data, only={"large"}, check_trailer=False) as delta:
        with pytest.raises(FormatError):
            decode(delta, sample_delta.BASE)
        with pytest.raises(FormatError):
            decode_by_changes(delta, sample_delta.BASE)


def header(**changes: int) -> bytes:
    fields = dict(
        zip(
            ("magic", "version", "flags", "stored", "plain", "digests", "file", "digest"),
            HEADER.unpack_from(sample_delta.PAYLOAD),
            strict=True,
        )
    )
    return HEADER.pack(*(fields | changes).values())


def test_head_bytes_is_where_the_sections_begin() -> None:
    payload = sample_delta.PAYLOAD
    whole = parse_head(memoryview(payload), len(payload))
    assert head_bytes(payload[: HEADER.size]) == head_bytes(payload) == whole.sections_start
    for data in (payload, payload[: whole.sections_start], bytearray(payload)):
        assert parse_partial_head(data) == whole
        assert parse_partial_head(data, len(payload)) == whole


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stored": 2**32 - 1, "file": 2**63}, LimitExceeded),
        ({"stored": MAX_STORED_INDEX_BYTES + 1, "file": 2**63}, LimitExceeded),
        ({"digests": 2**32 - 8, "file": 2**63}, LimitExceeded),
        ({"digests": MAX_DIGEST_BYTES + 8, "file": 2**63}, LimitExceeded),
        ({"plain": 2**32 - 1}, LimitExceeded),
        ({"plain": 1 << 26, "stored": 10}, LimitExceeded),
        ({"digests": 9}, Corrupt),
        ({"file": 40}, Corrupt),
        ({"file": 0}, Corrupt),
        ({"version": 2}, Unsupported),
        ({"flags": 1}, Unsupported),
    ],
)
def test_hostile_heads(changes: dict[str, int], error: type[FormatError]) -> None:
    with pytest.raises(error):
        head_bytes(header(**changes))


def test_every_flipped_bit_of_the_header() -> None:
    payload = sample_delta.PAYLOAD
    for damaged in flipped_bits(payload[: HEADER.size]):
        with suppress(FormatError):
            assert HEADER.size <= head_bytes(damaged) <= MAX_HEAD_BYTES
        with pytest.raises(FormatError):
            parse_partial_head(damaged + payload[HEADER.size :], len(payload))
        with pytest.raises(FormatError):
            parse_partial_head(damaged + payload[HEADER.size :])


def test_every_flipped_bit_of_the_head() -> None:
    head = sample_delta.PAYLOAD[: head_bytes(sample_delta.PAYLOAD)]
    for damaged in flipped_bits(head):
        with pytest.raises(FormatError):
            parse_partial_head(damaged)


def test_every_prefix_of_the_head_is_truncated() -> None:
    payload = sample_delta.PAYLOAD
    for size in range(head_bytes(payload)):
        with pytest.raises(Truncated):
            parse_partial_head(payload[:size])
        if size < HEADER.size:
            with pytest.raises(Truncated):
                head_bytes(payload[:size])


def test_a_file_of_another_size() -> None:
    payload = sample_delta.PAYLOAD
    with pytest.raises(Truncated):
        parse_partial_head(payload, len(payload) - 1)
    with pytest.raises(Corrupt):
        parse_partial_head(payload, len(payload) + 1)


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_any_header(data: bytes) -> None:
    for first in (data, sample_delta.PAYLOAD[:12] + data[12:]):
        with suppress(FormatError):
            assert head_bytes(first) <= MAX_HEAD_BYTES
