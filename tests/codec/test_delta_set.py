"""Shards of one version, opened together, are the delta that was not sharded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec.delta import Delta, TensorEntry
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import Attachment, Pair, write_delta
from thinwire.errors import BaseMismatch, Corrupt, InvalidArgument, TensorMismatch

from .writer import unpack, with_sections

Arrays = dict[str, np.ndarray]


def _pairs() -> list[Pair]:
    rng = np.random.default_rng(3)
    pairs = []
    for number, size in enumerate([10, 500, 70_000, 0, 1 << 20, (1 << 20) + 9, 40, 41]):
        old = rng.integers(0, 256, 2 * size, dtype=np.uint8)
        new = old.copy()
        if number % 3:
            new[rng.random(new.size) < 0.002] += 1
        pairs.append(Pair(f"t{number}", "BF16", (size,), old, new))
    pairs.append(Pair("added", "U8", (5,), None, pairs[0].new[:5]))
    pairs.append(Pair("gone", "U8", (5,), pairs[0].new[:5], None))
    return pairs


PAIRS = _pairs()
BASE = {pair.name: pair.base for pair in PAIRS if pair.base is not None}
NEW = {pair.name: pair.new for pair in PAIRS if pair.new is not None}
FILES = [
    Attachment("m-1.safetensors", "header", b"head", 4, xxh3_64(b"head")),
    Attachment("config.json", "file", b"{}", 2, xxh3_64(b"{}")),
    Attachment("vocab.txt", "file", None, 7, 7),
]


def changes_of(delta: DeltaSet, bases: Arrays, workers: int) -> list[tuple[str, int, bytes, bytes]]:
    found = delta.changes(bases, workers=workers)
    return [(c.name, c.first_word, c.positions.tobytes(), c.words.tobytes()) for c in found]


def write(pairs: Sequence[Pair], files: Sequence[Attachment] = ()) -> bytes:
    out = io.BytesIO()
    write_delta(out, pairs, files)
    return out.getvalue()


def open_set(*payloads: bytes) -> DeltaSet:
    return DeltaSet([Delta.open(payload) for payload in payloads])


SHARDS = [write(PAIRS[:3], FILES[:1]), write(PAIRS[3:6]), write(PAIRS[6:], FILES[1:])]


def decode(delta: Delta | DeltaSet, workers: int = 1, only: set[str] | None = None) -> Arrays:
    outs: Arrays = {}

    def out_for(entry: TensorEntry) -> np.ndarray:
        return outs.setdefault(entry.name, np.empty(entry.byte_count, np.uint8))

    delta.apply(BASE, out_for, workers=workers, only=only)
    return outs


def assert_new(found: Arrays) -> None:
    assert all(bits.tobytes() == NEW[name].tobytes() for name, bits in found.items())


@pytest.mark.parametrize("workers", [1, 3])
def test_applied_as_one(workers: int) -> None:
    with open_set(*SHARDS) as deltas:
        found = decode(deltas, workers)
        assert found.keys() == NEW.keys()
        assert_new(found)


@given(st.lists(st.integers(0, 3), min_size=len(PAIRS), max_size=len(PAIRS)), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_any_split(shard_of: list[int], workers: int) -> None:
    shards = [
        write([pair for pair, own in zip(PAIRS, shard_of, strict=True) if own == shard])
        for shard in range(4)
    ]
    with open_set(*shards) as deltas:
        found = decode(deltas, workers)
        assert found.keys() == NEW.keys()
        assert_new(found)


def test_changes_are_those_of_the_whole() -> None:
    def listed(delta: Delta | DeltaSet) -> list[tuple[str, int, bytes, bytes]]:
        return sorted(
            (c.name, c.first_word, c.positions.tobytes(), c.words.tobytes())
            for c in delta.changes(BASE)
        )

    with open_set(*SHARDS) as deltas, Delta.open(write(PAIRS)) as whole:
        assert listed(deltas) == listed(whole)


def test_tensors_and_attachments_are_the_union() -> None:
    with open_set(*SHARDS) as deltas:
        assert list(deltas.tensors) == [pair.name for pair in PAIRS]
        assert [attachment.name for attachment in deltas.attachments] == [f.name for f in FILES]
        header, config, vocab = deltas.attachments
        assert deltas.attachment_data(header) == b"head"
        assert deltas.attachment_data(config) == b"{}"
        assert [deltas.is_carried(file) for file in deltas.attachments] == [True, True, False]
        assert deltas.stored_bytes(vocab) is None
        assert deltas.stored_bytes(config)
        assert deltas.file_bytes == sum(map(len, SHARDS))
        with pytest.raises(InvalidArgument, match="not carried"):
            deltas.attachment_data(vocab)


def test_a_tensor_in_two_shards() -> None:
    with ExitStack() as stack:
        opened = [
            stack.enter_context(Delta.open(payload))
            for payload in (SHARDS[0], SHARDS[1], write(PAIRS[2:3]))
        ]
        with pytest.raises(Corrupt, match="tensor 't2' is in both"):
            DeltaSet(opened)


def test_a_file_in_two_shards() -> None:
    with pytest.raises(Corrupt, match=r"config\.json"):
        open_set(SHARDS[2], write(PAIRS[:3], FILES[1:2]))


@pytest.mark.parametrize("wrong", ["t1", "t4", "t7"])
def test_a_wrong_base_is_named(wrong: str) -> None:
    bases = BASE | {wrong: BASE[wrong] ^ np.uint8(1)}
    with open_set(*SHARDS) as deltas:
        for act in (
            lambda: deltas.apply(bases, lambda _: None, workers=2),
            lambda: list(deltas.changes(bases)),
        ):
            with pytest.raises(BaseMismatch) as caught:
                act()
            assert caught.value.context["tensor"] == wrong


def test_all_bases_are_looked_at_before_memory_is_taken() -> None:
    bases = {name: bits for name, bits in BASE.items() if name != "t7"}
    asked: list[str] = []
    with open_set(*SHARDS) as deltas:
        with pytest.raises(TensorMismatch, match="t7"):
            deltas.apply(bases, lambda entry: asked.append(entry.name))
        with pytest.raises(TensorMismatch, match="t7"):
            next(deltas.changes(bases))
        with pytest.raises(TensorMismatch, match="t7"):
            deltas.check_bases(bases)
    assert not asked


def test_identity() -> None:
    with open_set(*SHARDS) as one, open_set(*reversed(SHARDS)) as other:
        assert one.identity == other.identity
        assert len(one.identity) == 32
    with open_set(*SHARDS[:2]) as fewer:
        assert fewer.identity != one.identity


def test_only_some_tensors() -> None:
    wanted = {"t1", "t5", "added", "gone"}
    with open_set(*SHARDS) as deltas:
        found = decode(deltas, only=wanted)
        assert found.keys() == wanted & NEW.keys()
        assert_new(found)
        changed = {change.name for change in deltas.changes(BASE, only={"t4", "t5"})}
        assert changed == {"t4", "t5"}


def test_what_is_left_out_is_not_decoded() -> None:
    sections = unpack(SHARDS[1]).sections
    damaged = with_sections(SHARDS[1], bytes(len(sections)))
    with Delta.open(damaged) as delta:
        assert_new(decode(delta, only={"t3"}))
        assert not list(delta.changes(BASE, only={"t3"}))


def test_bytes_reported_are_those_of_what_was_asked_for() -> None:
    reported: list[int] = []
    with open_set(*SHARDS) as deltas:
        # t1 shares a group with t0.
        deltas.apply(BASE, lambda _: None, only={"t1", "t5"}, on_bytes=reported.append)
    assert sum(reported) == NEW["t1"].size + NEW["t5"].size


def test_closing_closes_all() -> None:
    opened = [Delta.open(payload) for payload in SHARDS]
    with DeltaSet(opened):
        pass
    assert all(not delta.is_carried(a) for delta in opened for a in delta.attachments)


def test_of_partly_opened_deltas() -> None:
    deltas = [Delta.open(payload, only={"t5", "t7"}) for payload in SHARDS]
    with DeltaSet(deltas) as part:
        assert set(part.tensors) == {"t5", "t6", "t7"}
        assert_new(decode(part))


def test_of_none() -> None:
    with DeltaSet([]) as empty:
        assert not empty.tensors
        assert not decode(empty)


@pytest.mark.parametrize("workers", [2, 7])
def test_changes_are_the_same_whatever_the_threads(workers: int) -> None:
    with open_set(*SHARDS) as delta:
        expected = changes_of(delta, BASE, 1)
        assert len({name for name, *_ in expected}) >= 4
        assert changes_of(delta, BASE, workers) == expected


@pytest.mark.parametrize("workers", [1, 7])
@pytest.mark.parametrize("name", ["t1", "t4", "t7"])
def test_changes_refuse_a_wrong_base_whatever_the_threads(name: str, workers: int) -> None:
    wrong = {**BASE, name: BASE[name] ^ np.uint8(1)}
    with open_set(*SHARDS) as delta, pytest.raises(BaseMismatch, match=f"'{name}'"):
        changes_of(delta, wrong, workers)


def test_changes_that_are_left_early() -> None:
    with open_set(*SHARDS) as delta:
        changes = delta.changes(BASE, workers=3)
        next(changes)
        changes.close()
