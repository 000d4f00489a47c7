"""The kernels and their slow twin give the same bytes, for every instruction set here."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.codec import _native, reference
from thinwire.codec.dtypes import DTYPES, DType
from thinwire.errors import Corrupt

from .making import (
    CLASSES,
    INSTRUCTION_SETS,
    Chunk,
    change_words,
    chunks,
    fitted,
    native,
    random_words,
    sampled,
    table,
    tables_for,
    words,
)

HEADER_BYTES = 2
ROOM_BYTES = 8  # the kernels stop where less than this is left


def assert_same(chunk: Chunk, tables: bytes) -> None:
    """Encoder's bytes, digests and counts, and what every decoder makes of them."""
    dtype, base, new = chunk
    expected = reference.encode_chunk(dtype, tables, base, new)
    positions = np.flatnonzero(words(base, dtype) != words(new, dtype))
    capacity = base.size + 64
    for instructions in INSTRUCTION_SETS:
        codec = native(dtype, tables, instructions)
        data, changed, base_digest, new_digest, down, up = codec.encode(base, new, capacity)
        if len(expected) + ROOM_BYTES > capacity:
            assert data is None
        else:
            assert data == expected
        assert sum(down) + sum(up) == positions.size
        assert changed == positions.size
        assert base_digest == xxhash.xxh3_64_intdigest(base.tobytes())
        assert new_digest == xxhash.xxh3_64_intdigest(new.tobytes())
        assert_decodes(codec, chunk, expected, positions)
    assert bytes(reference.decode_chunk(dtype, tables, base, expected)) == new.tobytes()


def assert_decodes(codec: _native.Codec, chunk: Chunk, data: bytes, positions: np.ndarray) -> None:
    """The new words, the list of changes, and in place, from one payload."""
    dtype, base, new = chunk
    payload = np.frombuffer(data, np.uint8)
    new_digest = xxhash.xxh3_64_intdigest(new.tobytes())
    out = np.full_like(base, 0xA5)
    assert codec.decode(base, out, payload) == (new_digest, positions.size)
    assert out.tobytes() == new.tobytes()

    ok, digest, found, new_words = codec.changes(base, payload)
    assert ok
    assert digest == new_digest
    assert found == positions.astype("<u4").tobytes()
    assert new_words == words(new, dtype)[positions].tobytes()


@given(chunks())
@settings(max_examples=60, deadline=None)
def test_chunks_with_fitted_tables(chunk: Chunk) -> None:
    assert_same(chunk, fitted(chunk))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_chunks_with_any_tables(data: st.DataObject) -> None:
    chunk = data.draw(chunks())
    assert_same(chunk, data.draw(tables_for(chunk.dtype)))


@pytest.mark.parametrize("count", [32_500, 32_640, 32_641, 49_100, 200_001, 1 << 20])
def test_chunks_of_many_pieces(count: int) -> None:
    # From 256 blocks on, a table is chosen by every second block, then by every third: here each
    # kind of block has exponents of its own, so that it matters which are looked at.
    rng = np.random.default_rng(count)
    dtype = DTYPES["BF16"]
    base = random_words(rng, dtype, count, 3)
    own = words(base, dtype)
    own += (np.arange(count) // 128 % 6 * 2).astype(np.uint16) << np.uint16(7)
    chunk = Chunk(dtype, base, change_words(rng, dtype, base, 700 / count, 3))
    other = Chunk(dtype, base, change_words(rng, dtype, base, 0.2, 3))
    assert_same(chunk, fitted(other) + fitted(chunk))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_capacity_decides_nothing_but_whether_it_fits(name: str) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(5)
    base = random_words(rng, dtype, 400, 9)
    chunk = Chunk(dtype, base, change_words(rng, dtype, base, 0.03, 4))
    tables = fitted(chunk)
    codec = native(dtype, tables)
    expected = reference.encode_chunk(dtype, tables, base, chunk.new)
    assert len(expected) > 16
    for capacity in range(base.size + 64):
        data = codec.encode(base, chunk.new, capacity)[0]
        assert data == (expected if len(expected) + ROOM_BYTES <= capacity else None)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_table_and_shift_decodes(data: st.DataObject) -> None:
    # An encoder may choose any; ours would not choose these.
    chunk = data.draw(chunks())
    tables = data.draw(tables_for(chunk.dtype))
    number = data.draw(st.integers(0, len(tables) // 66 - 1))
    shift = data.draw(st.integers(-64, 64))
    payload = reference.encode_with(chunk.dtype, tables, number, shift, chunk.base, chunk.new)
    positions = np.flatnonzero(words(chunk.base, chunk.dtype) != words(chunk.new, chunk.dtype))
    for instructions in INSTRUCTION_SETS:
        assert_decodes(native(chunk.dtype, tables, instructions), chunk, payload, positions)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_bytes_that_no_encoder_wrote(data: st.DataObject) -> None:
    # Nothing to agree on but whether they are corrupt, and else what they mean.
    chunk = data.draw(chunks())
    tables = data.draw(tables_for(chunk.dtype))
    sound = reference.encode_chunk(chunk.dtype, tables, chunk.base, chunk.new)
    at = data.draw(st.integers(0, len(sound)))
    kind = data.draw(st.sampled_from(["random", "ones", "cut", "longer", "flipped", "other base"]))
    base = chunk.base
    if kind == "random":
        header = bytes([data.draw(st.integers(0, 3)), data.draw(st.integers(60, 196))])
        payload = header + data.draw(st.binary(max_size=200))
    elif kind == "ones":
        payload = b"\x00\x80" + b"\xff" * data.draw(st.integers(0, 40))
    elif kind == "cut":
        payload = sound[: len(sound) - data.draw(st.integers(1, 12))]
    elif kind == "longer":
        payload = sound + data.draw(st.binary(min_size=1, max_size=40))
    elif kind == "flipped":
        payload = bytes([*sound[:at], *(byte ^ 0x10 for byte in sound[at : at + 1])])
        payload += sound[at + 1 :]
    else:
        payload = sound
        base = base[::-1].copy()
    assert_alike(chunk.dtype, tables, base, payload)


class HostileEncoder(reference.RangeEncoder):
    """Puts its number where no encoder does: behind the last of some even choices."""

    rng = np.random.default_rng(1)

    def direct(self, value: int, bits: int) -> None:
        """As it should be, but sometimes into what the cut of the range left over."""
        while bits > 0:
            now = min(bits, 16)
            bits -= now
            unit = self.range >> now
            left = self.range - (unit << now)
            if left > 0 and self.rng.random() < 0.2:
                self._narrow(unit << now, left)
            else:
                self._narrow(unit * (value >> bits & (1 << now) - 1), unit)


@pytest.mark.parametrize("name", ["BF16", "F32", "I64"])
@pytest.mark.parametrize("seed", range(20))
def test_numbers_beyond_every_choice(monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    monkeypatch.setattr(reference, "RangeEncoder", HostileEncoder)
    rng = np.random.default_rng(seed)
    dtype = DTYPES[name]
    base = random_words(rng, dtype, 300, 9)
    new = change_words(rng, dtype, base, 0.1, 60)
    tables = fitted(Chunk(dtype, base, new))
    assert_alike(dtype, tables, base, reference.encode_chunk(dtype, tables, base, new))


def assert_alike(dtype: DType, tables: bytes, base: np.ndarray, payload: bytes) -> None:
    """All decoders reject the payload, or all make the same of it, as an array and as a list."""
    try:
        expected = bytes(reference.decode_chunk(dtype, tables, base, payload))
    except Corrupt:
        expected = None
    array = np.frombuffer(payload, np.uint8)
    for instructions in INSTRUCTION_SETS:
        codec = native(dtype, tables, instructions)
        out = np.zeros_like(base)
        result = codec.decode(base, out, array)
        assert (result is None) == (expected is None)
        if expected is not None:
            assert out.tobytes() == expected
        ok, _, positions, new_words = codec.changes(base, array)
        assert ok == (expected is not None)
        if expected is not None:
            patched = words(base.copy(), dtype)
            patched[np.frombuffer(positions, "<u4")] = np.frombuffer(new_words, patched.dtype)
            assert patched.tobytes() == expected


def test_headers_out_of_range_are_corrupt() -> None:
    dtype = DTYPES["BF16"]
    base = np.zeros(600, np.uint8)
    tables = table(5, bytes([90] * CLASSES), bytes(CLASSES)) * 2
    valid = reference.encode_with(dtype, tables, 1, 0, base, base + np.uint8(1))
    for number in range(256):
        for shift_byte in (0, 63, 64, 128, 192, 193, 255):
            payload = bytes([number, shift_byte]) + valid[2:]
            legal = number < 2 and 64 <= shift_byte <= 192
            for instructions in INSTRUCTION_SETS:
                out = np.empty_like(base)
                codec = native(dtype, tables, instructions)
                result = codec.decode(base, out, np.frombuffer(payload, np.uint8))
                assert legal or result is None
            if not legal:
                with pytest.raises(Corrupt):
                    reference.decode_chunk(dtype, tables, base, payload)
    for size in range(1, HEADER_BYTES):
        assert_alike(dtype, tables, base, valid[:size])


@given(chunks(), st.integers(0, 4), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_samples(chunk: Chunk, first: int, stride: int) -> None:
    dtype, base, new = chunk
    expected = reference.sample(dtype, base, new, first, stride)
    for instructions in INSTRUCTION_SETS:
        counts = np.full((3, dtype.field_mask + 1), 3, np.uint64)  # added to what is there
        native(dtype, b"", instructions).sample(base, new, first, stride, counts)
        assert counts.tolist() == (expected + np.uint64(3)).tolist()


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_fits_of_samples(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["BF16", "F8_E4M3", "F64", "I32"]))
    sources = data.draw(st.lists(chunks([name]), min_size=1, max_size=5))
    counts = sampled(*sources)
    total_words = data.draw(st.integers(0, 1 << 36))
    assert b"".join(reference.fit(counts, total_words)) == _native.fit(counts, total_words)


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_fits_of_any_counts(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = data.draw(st.integers(0, 6)), 3, data.draw(st.sampled_from([1, 16, 32, 256, 2048]))
    counts = np.zeros(shape, np.uint64)
    # Far more words than are ever looked at, and few enough that their bits fit in 64 bits, signed.
    most = 1 << data.draw(st.integers(0, 18))
    filled = rng.random((shape[0], shape[2])) < data.draw(st.sampled_from([0.02, 0.5, 1.0]))
    counts[:, 0] = rng.integers(0, most, filled.shape, endpoint=True) * filled
    for kind in (1, 2):
        share = rng.random(filled.shape) ** data.draw(st.sampled_from([1, 4, 16]))
        counts[:, kind] = np.floor(counts[:, kind - 1] * share).astype(np.uint64)
    total_words = data.draw(st.sampled_from([0, 1, int(counts[:, 0].sum()), 1 << 40]))
    assert b"".join(reference.fit(counts, total_words)) == _native.fit(counts, total_words)


def test_sources_of_two_shapes_get_two_tables() -> None:
    rng = np.random.default_rng(11)
    dtype = DTYPES["BF16"]
    sources = []
    for side in range(4):
        base = random_words(rng, dtype, 30_000, 12)
        fields = words(base, dtype) >> np.uint16(7) & np.uint16(255)
        favoured = (fields % 2 == 0) == (side % 2 == 0)
        moved = change_words(rng, dtype, base, 0.3, 2)
        new = np.where(np.repeat(favoured, 2), moved, base)
        sources.append(Chunk(dtype, base, new))
    counts = sampled(*sources)
    tables = reference.fit(counts, 120_000)
    assert len(tables) == 2
    assert b"".join(tables) == _native.fit(counts, 120_000)
    for chunk in sources:
        short = Chunk(dtype, chunk.base[:8000], chunk.new[:8000])
        assert_same(short, b"".join(tables))
    numbers = {reference.encode_chunk(*c[:1], b"".join(tables), *c[1:])[0] for c in sources}
    assert numbers == {0, 1}
