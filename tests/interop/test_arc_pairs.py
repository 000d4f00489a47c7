"""ARC beside Fireworks' own package: each reads what the other writes, and ours is no larger."""

from __future__ import annotations

import threading
import tracemalloc
import warnings
from collections.abc import Callable
from multiprocessing import get_context

import numpy as np
import pytest

from thinwire.interop.fireworks import arc3, arc3_positions, arc3_read
from thinwire.interop.fireworks.coding import (
    ARC_FORMATS,
    FORMATS,
    Encoded,
    decode,
    encode,
    sniff_format,
)
from thinwire.interop.fireworks.layout import checksum_of, written_layout

from .arc_pairs import CORPUS, DTYPES, Package, Pair, make_pair, random_pair, real_pairs

PARTS, PAIRS_PER_PART = 8, 260
# All run for the table (`make interop-table`, which gives --claims); else each fifth one.
STRIDE = 5
AGAINST = "2,080 random and 306 real tensors, with fireworks-delta-compression 0.1.0"


def claims_both_ways(test: Callable[..., None]) -> Callable[..., None]:
    """Says that each format is read and written."""
    for name in ARC_FORMATS:
        for verb in ("read", "write"):
            test = pytest.mark.claim(name, verb, AGAINST)(test)
    return test


@pytest.fixture(scope="session")
def stride(pytestconfig: pytest.Config) -> int:
    return 1 if pytestconfig.getoption("--claims", default=None) else STRIDE


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    return Package(monkeypatch)


def check_both_ways(package: Package, name: str, pair: Pair) -> None:
    ours = encode(name, pair.base, pair.new, pair.dtype, pair.shape)
    theirs = package.encode(name, pair)
    assert ours.checksum == theirs[1]
    assert len(ours.payload) <= len(theirs[0])
    np.testing.assert_array_equal(package.decode(name, pair, *ours), pair.new)
    for payload in (ours.payload, theirs[0]):
        new = decode(name, pair.base, pair.dtype, pair.shape, payload, ours.checksum)
        np.testing.assert_array_equal(new, pair.new)
        assert sniff_format(payload) == name


@claims_both_ways
@pytest.mark.parametrize("part", range(PARTS))
def test_random_pairs_both_ways(package: Package, part: int, stride: int) -> None:
    seen = set()
    for seed in range(part * PAIRS_PER_PART, (part + 1) * PAIRS_PER_PART, stride):
        pair = random_pair(seed)
        seen.add(pair.dtype)
        # arc_v3 each time, its two elders in turn.
        for name in (ARC_FORMATS[seed % 2], "arc_v3"):
            check_both_ways(package, name, pair)
    assert seen == DTYPES.keys()


@claims_both_ways
@pytest.mark.skipif(not CORPUS.is_dir(), reason=f"the project's corpus is not in {CORPUS}")
def test_real_pairs_both_ways(package: Package, stride: int) -> None:
    count = 0
    for _, pair in real_pairs():
        count += 1
        if count % stride:
            continue
        check_both_ways(package, "arc_v2" if count % 2 else "arc_v1", pair)
        check_both_ways(package, "arc_v3", pair)
    assert count == 306


@pytest.mark.parametrize("shape", [(70_000,), (140, 500), (7, 100, 100)])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E5M2"])
def test_large_numbers_and_long_frames(
    package: Package, dtype: str, shape: tuple[int, ...]
) -> None:
    for change in ("few", "all", "random", "last"):
        check_both_ways(package, "arc_v3", make_pair(dtype, shape, change, 7))


def test_a_tensor_beyond_one_job_of_zstd(package: Package) -> None:
    pair = make_pair("BF16", (5000, 1000), "few", 3)
    for name in ("arc_v2", "arc_v3"):
        check_both_ways(package, name, pair)
        first, again = (encode(name, *pair[2:], *pair[:2]) for _ in range(2))
        assert first == again


def test_a_pickle_beyond_one_job_of_zstd(package: Package) -> None:
    """There its zstd cuts blocks elsewhere, at the level of the envelope too."""
    rng = np.random.default_rng(1)
    for count, share in ((1 << 20, 0.4), (1 << 20, 0.9)):
        weights = (rng.standard_normal(count, np.float32) * 0.02).view(np.uint32) >> 16
        base = weights.astype(np.uint16)
        steps = rng.integers(1, 4, count, np.uint16) * (rng.random(count) < share)
        sides = base.view(np.uint8), (base ^ steps).view(np.uint8)
        check_both_ways(package, "arc_v3", Pair("BF16", (512, count // 512), *sides))


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("shape", [(40, 60), (2400,), (2400, 1), (3, 800), (1, 2400), (6, 20, 20)])
def test_pieces_of_the_work_change_nothing(
    monkeypatch: pytest.MonkeyPatch, chunk: int, shape: tuple[int, ...]
) -> None:
    for dtype in ("BF16", "F8_E5M2", "F32"):
        layout = written_layout(dtype)
        assert layout is not None
        # By one, all of a tensor takes long; and is the same work for any dtype.
        dense = ("random", "all") if chunk > 1 or dtype == "BF16" else ()
        for change in ("few", "step", *dense, "last", "one"):
            pair = make_pair(dtype, shape, change, 4)
            sides = pair.base, pair.new
            checksum = checksum_of(pair.new)
            with monkeypatch.context() as patched:
                whole = list(arc3._envelopes(*sides, layout, shape, checksum))
                patched.setattr(arc3, "_CHUNK", chunk)
                assert list(arc3._envelopes(*sides, layout, shape, checksum)) == whole
                patched.setattr(arc3_read, "CHUNK", chunk)
                patched.setattr(arc3_positions, "CHUNK", chunk)
                for payload in whole:
                    new = decode("arc_v3", pair.base, dtype, shape, payload, checksum)
                    np.testing.assert_array_equal(new, pair.new)


def test_memory_is_bounded_where_everything_changed() -> None:
    """tracemalloc sees numpy's arrays and Python's bytes; 33 and 20 times the tensor once."""
    count = 2 << 20
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    sides = base.view(np.uint8), (base ^ rng.integers(1, 4, count, np.uint16)).view(np.uint8)
    peaks = []
    for shape in ((count // 1024, 1024), (count,)):
        tracemalloc.start()
        ours = encode("arc_v3", *sides, "BF16", shape)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        tracemalloc.start()
        new = decode("arc_v3", sides[0], "BF16", shape, *ours)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        np.testing.assert_array_equal(new, sides[1])
    tensor_bytes = sides[0].size
    # A piece of the work has so many numbers of 64 bits, whatever the tensor's size.
    piece_bytes = 8 * arc3_read.CHUNK
    assert max(peaks[::2]) < 9 * tensor_bytes + 3 * piece_bytes
    assert max(peaks[1::2]) < 5 * tensor_bytes + 4 * piece_bytes


def test_a_forked_process_has_no_part_in_kept_compressors() -> None:
    """Each owns a thread, which is not there in a child: it would wait for it for ever."""
    pair = make_pair("U8", (2 << 20,), "few", 3)
    wanted = encode("arc_v2", *pair[2:], *pair[:2])
    stop = threading.Event()

    def keep_on() -> None:
        while not stop.is_set():
            encode("arc_v2", *pair[2:], *pair[:2])

    # One that is in use in another thread at that moment is no matter either.
    thread = threading.Thread(target=keep_on)
    thread.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            children = [
                get_context("fork").Process(target=_exit_if_same, args=(pair, wanted))
                for _ in range(4)
            ]
            for child in children:
                child.start()
    finally:
        stop.set()
        thread.join()
    for child in children:
        child.join(60)
        is_hanging = child.is_alive()
        child.kill()
        assert not is_hanging
        assert child.exitcode == 0
    assert encode("arc_v2", *pair[2:], *pair[:2]) == wanted


def _exit_if_same(pair: Pair, wanted: Encoded) -> None:
    for _ in range(3):
        assert encode("arc_v2", *pair[2:], *pair[:2]) == wanted


def test_the_package_without_patience_is_read_too(package: Package) -> None:
    package.arc3._CANDIDATE_WAIT_MULTIPLIER = 1.0
    for seed in range(0, 60, 5):
        pair = random_pair(seed)
        payload, checksum = package.encode("arc_v3", pair)
        new = decode("arc_v3", pair.base, pair.dtype, pair.shape, payload, checksum)
        np.testing.assert_array_equal(new, pair.new)


@pytest.mark.parametrize("name", FORMATS)
def test_same_input_same_bytes(name: str) -> None:
    for seed in range(40):
        pair = random_pair(seed)
        first, again = (encode(name, *pair[2:], *pair[:2]) for _ in range(2))
        assert first == again
        np.testing.assert_array_equal(
            decode(name, pair.base, pair.dtype, pair.shape, *first), pair.new
        )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3)])
def test_no_elements(package: Package, name: str, shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        pair = make_pair(dtype, shape, "none")
        if name in ARC_FORMATS:
            check_both_ways(package, name, pair)
        ours = encode(name, pair.base, pair.new, dtype, shape)
        assert decode(name, pair.base, dtype, shape, *ours).size == 0


def test_unaligned_and_read_only_memory() -> None:
    pair = make_pair("F32", (40, 60), "few", 1)
    sides = []
    for data in (pair.base, pair.new):
        held = np.empty(data.size + 1, np.uint8)[1:]
        held[:] = data
        held.flags.writeable = False
        sides.append(held)
    for name in FORMATS:
        ours = encode(name, *sides, pair.dtype, pair.shape)
        assert ours == encode(name, pair.base, pair.new, pair.dtype, pair.shape)
        new = decode(name, sides[0], pair.dtype, pair.shape, *ours)
        np.testing.assert_array_equal(new, pair.new)


def test_dtypes_of_amd() -> None:
    """E4M3 as its FNUZ variant: written as the package on other machines reads it, read as both."""
    pair = make_pair("F8_E4M3", (400, 600), "few", 1)
    sides = pair.base, pair.new
    ours = encode("arc_v3", *sides, "F8_E4M3FNUZ", pair.shape)
    assert not ours.payload.startswith(b"ARC3")
    as_e4m3 = encode("arc_v3", *sides, "F8_E4M3", pair.shape)
    assert as_e4m3.payload.startswith(b"ARC3")
    for dtype in ("F8_E4M3", "F8_E4M3FNUZ"):
        for encoded in (ours, as_e4m3):
            new = decode("arc_v3", pair.base, dtype, pair.shape, *encoded)
            np.testing.assert_array_equal(new, pair.new)


def test_dtypes_that_only_blobs_carry() -> None:
    for dtype, shape in (
        ("F4", (40, 120)),
        ("C64", (300,)),
        ("F8_E8M0", (2400,)),
        ("U16", (1200,)),
    ):
        pair = make_pair("U8", (2400,), "few", 1)
        ours = encode("arc_v3", pair.base, pair.new, dtype, shape)
        np.testing.assert_array_equal(decode("arc_v3", pair.base, dtype, shape, *ours), pair.new)
