"""slime's weight_v: vectors of the real system, golden files, round trips, chains."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint, SafetensorsFile
from thinwire.checkpoint.file_names import INDEX_NAME
from thinwire.codec import zstd
from thinwire.errors import (
    InvalidArgument,
    TensorMismatch,
    Unsupported,
)
from thinwire.interop import slime
from thinwire.interop.change import CheckpointChange
from thinwire.interop.foreign import ForeignDelta
from thinwire.interop.payload_files import declared_bytes
from thinwire.interop.slime_write import encode_overwrite

from . import by_hand
from .making import (
    BITS,
    MIXED,
    MIXED_NEW,
    SHARED,
    Tensors,
    applied,
    bits_of,
    brought,
    change_between,
    checkpoint_bits,
    tensor,
    tensor_pairs,
    write_checkpoint,
    written,
)

REAL = SHARED / "vectors" / "weight_v"
GOLDEN = Path(__file__).parent / "vectors"
KINDS = [(e, c) for e in ("xor", "overwrite") for c in ("xxh3-128", "blake3", "adler32")]

needs_real = pytest.mark.skipif(
    not REAL.is_dir(), reason=f"no files of the real slime: {REAL} is only beside a checkout"
)


def check_chain(chain: Path, full: list[Checkpoint]) -> None:
    """Every delta of a chain gives the next full version, bit for bit."""
    versions = slime.list_versions(chain)
    assert [row[:2] for row in versions] == [(1, 0), (2, 1)]
    for row in versions:
        assert slime.is_delta(row.path)
        with slime.open_delta(row.path) as delta:
            assert (delta.facts.version, delta.facts.base_version) == row[:2]
            sizes = [path.stat().st_size for path in row.path.iterdir()]
            assert delta.facts.file_bytes == sum(sizes)
            assert applied(full[row.version - 1], delta) == checkpoint_bits(full[row.version])


@pytest.mark.claim("slime", "read", "12 deltas by slime's own encoder")
@pytest.mark.claim("slime", "write", "the same 12, payload by payload")
@needs_real
@pytest.mark.parametrize(("encoding", "checksum"), KINDS)
def test_real_vectors(encoding: str, checksum: str, tmp_path: Path) -> None:
    full = [Checkpoint.open(REAL / f"full_{number}") for number in range(3)]
    chain = REAL / f"{encoding}-{checksum}"
    check_chain(chain, full)
    for version in (1, 2):
        base = full[version - 1]
        change = CheckpointChange(base, full[version])
        out = tmp_path / f"{version}"
        out.mkdir()
        files = slime.write_delta(
            change,
            out,
            version=version,
            base_version=version - 1,
            encoding=encoding,
            checksum=checksum,
        )
        folder = brought(files, tmp_path / "chain")
        real = chain / folder.name
        # The same payloads, checksums and index, save for the order of the tensors.
        assert json.loads((folder / INDEX_NAME).read_text()) == json.loads(
            (real / INDEX_NAME).read_text()
        )
        [weights] = real.glob("*.safetensors")
        mine, theirs = SafetensorsFile.open(folder / weights.name), SafetensorsFile.open(weights)
        assert mine.metadata == theirs.metadata
        assert mine.tensors.keys() == theirs.tensors.keys()
        for name, payload in theirs.tensors.items():
            assert unpacked(mine.tensors[name].data) == unpacked(payload.data)
            if by_hand.zstd.zstd_version_info[:2] == (1, 5):
                assert mine.tensors[name].data.tobytes() == payload.data.tobytes()
        base_tensors, _ = by_hand.read_safetensors(next(iter(base.weights.values())).path)
        got = by_hand.read_slime(folder, base_tensors, version - 1)
        assert bits_of(got) == checkpoint_bits(full[version])


def unpacked(payload: np.ndarray) -> bytes:
    size = declared_bytes(payload)
    assert size is not None
    return zstd.decompress(payload.data, size, "it")


@pytest.mark.claim("slime", "read", "golden files of a writer without thinwire")
@pytest.mark.parametrize("chain", sorted(GOLDEN.glob("slime-*")), ids=lambda path: path.name)
def test_golden_files(chain: Path) -> None:
    check_chain(chain, [Checkpoint.open(GOLDEN / f"full_{number}") for number in range(3)])


def test_golden_files_are_all_there() -> None:
    assert len(list(GOLDEN.glob("slime-*"))) == 4


def test_what_is_written_by_hand_needs_nothing_of_thinwire() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import by_hand
assert not [name for name in sys.modules if name.startswith("thinwire")]
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.claim("slime", "write", "a reader without thinwire")
@pytest.mark.parametrize(("encoding", "checksum"), KINDS)
@pytest.mark.parametrize("shards", [1, 3])
def test_written_and_read(encoding: str, checksum: str, shards: int, tmp_path: Path) -> None:
    change = change_between(tmp_path, MIXED, MIXED_NEW, shards=shards)
    folder = written(slime, tmp_path, change, encoding=encoding, checksum=checksum)
    assert bits_of(by_hand.read_slime(folder, MIXED, 0)) == bits_of(MIXED_NEW)
    payloads = {}
    for path in folder.glob("*.safetensors"):
        tensors, texts = by_hand.read_safetensors(path)
        payloads |= {name: (row[2], texts[name]) for name, row in tensors.items()}
    theirs = by_hand.slime_payloads(MIXED, MIXED_NEW, encoding, checksum)
    assert payloads == {name: (payload, text) for name, payload, text in theirs}
    with slime.open_delta(folder) as delta:
        checked: ForeignDelta = delta
        assert applied(change.base, checked) == bits_of(MIXED_NEW)
        assert delta.facts.encoding == encoding
        assert delta.facts.metadata == {"compression_format": "zstd", "checksum_format": checksum}
        assert dict(delta.files) == {}
        changed = {name for name in MIXED if MIXED[name] != MIXED_NEW[name]}
        assert delta.tensors.keys() == changed
        assert not delta.new_tensor("w", change.base.tensors["w"]).data.flags.writeable


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pair=tensor_pairs(list(BITS)),
    kind=st.sampled_from(KINDS),
    max_file_bytes=st.sampled_from([1, 40, 1 << 30]),
)
def test_any_bits_survive(
    pair: tuple[Tensors, Tensors],
    kind: tuple[str, str],
    max_file_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    old, new = pair
    change = change_between(tmp_path, old, new)
    folder = written(
        slime, tmp_path, change, encoding=kind[0], checksum=kind[1], max_file_bytes=max_file_bytes
    )
    assert bits_of(by_hand.read_slime(folder, old, 0)) == bits_of(new)
    assert applied(change.base, slime.open_delta(folder)) == bits_of(new)
    # And what the other side writes is read.
    theirs = by_hand.write_slime(
        tmp_path / "weight_v000001",
        by_hand.slime_payloads(old, new, *kind),
        encoding=kind[0],
        checksum=kind[1],
        files=2,
    )
    assert applied(change.base, slime.open_delta(theirs)) == bits_of(new)


def test_nothing_changed(tmp_path: Path) -> None:
    change = change_between(tmp_path, MIXED, MIXED)
    folder = written(slime, tmp_path, change)
    assert [path.name for path in folder.iterdir()] == [INDEX_NAME]
    assert by_hand.read_slime(folder, MIXED, 0) == MIXED
    with slime.open_delta(folder) as delta:
        assert not delta.tensors
        assert applied(change.base, delta) == bits_of(MIXED)


def test_files_are_split_by_size(tmp_path: Path) -> None:
    old = {name: tensor("BF16", [500], seed) for seed, name in enumerate("abcde")}
    new = {name: tensor("BF16", [500], seed + 9) for seed, name in enumerate("abcde")}
    change = change_between(tmp_path, old, new)
    # Bits that do not compress: a little over 1000 bytes each.
    folder = written(slime, tmp_path, change, max_file_bytes=2100)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"model-{number:05d}-of-00003.safetensors" for number in range(3)]
    index = json.loads((folder / INDEX_NAME).read_text())
    assert list(index["weight_map"]) == list("abcde")
    assert bits_of(by_hand.read_slime(folder, old, 0)) == bits_of(new)
    assert applied(change.base, slime.open_delta(folder)) == bits_of(new)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for run in ("1", "2"):
        change = change_between(tmp_path / run, MIXED, MIXED_NEW, shards=2)
        folder = written(slime, tmp_path / run, change, max_file_bytes=200)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert len(contents[0]) > 2


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """Twelve tensors of 4 MiB: neither side holds more than a few of them."""
    rng = np.random.default_rng(1)
    old, new = {}, {}
    for number in range(12):
        data = rng.bytes(4 << 20)
        old[f"t{number}"] = ("U8", [4 << 20], data)
        new[f"t{number}"] = ("U8", [4 << 20], data[::-1])
    change = change_between(tmp_path, old, new)
    tracemalloc.start()
    try:
        folder = written(slime, tmp_path, change)
        with slime.open_delta(folder) as delta:
            tracemalloc.reset_peak()
            for name in delta.tensors:
                found = delta.new_tensor(name, change.base.tensors[name])
                assert found.data[0] == new[name][2][0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * (4 << 20)


class TestWhatCannotBeCarried:
    def test_other_tensors(self, tmp_path: Path) -> None:
        for number, new in enumerate(
            (
                {"w": MIXED["w"]},
                MIXED | {"more": tensor("U8", [1])},
                MIXED | {"w": ("BF16", [30, 40], MIXED["w"][2])},
                MIXED | {"half": ("BF16", *MIXED["half"][1:])},
            )
        ):
            change = change_between(tmp_path / f"{number}", MIXED, new)
            with pytest.raises(TensorMismatch, match=r"came or went|changed dtype or shape"):
                written(slime, tmp_path / f"{number}", change)

    @pytest.mark.parametrize(
        ("files", "what"),
        [
            ({"config.json": "2"}, "'config.json' changed"),
            ({}, "'config.json' came or went"),
            ({"config.json": "1", "b.txt": ""}, "'b.txt' came or went"),
        ],
    )
    def test_other_files(self, files: dict[str, str], what: str, tmp_path: Path) -> None:
        base = write_checkpoint(tmp_path / "old", MIXED, files={"config.json": "1"})
        new = write_checkpoint(tmp_path / "new", MIXED_NEW, files=files)
        with pytest.raises(Unsupported, match=what):
            written(slime, tmp_path, CheckpointChange(base, new))
        # A trainer's note in a weights file's metadata is no reason for full weights.
        same = write_checkpoint(
            tmp_path / "same", MIXED_NEW, files={"config.json": "1"}, metadata={"step": "2"}
        )
        (tmp_path / "out-1").rmdir()
        written(slime, tmp_path, CheckpointChange(base, same))

    def test_versions_that_are_left_out(self, tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        for version, base_version in ((3, 1), (1, 1), (0, 1)):
            with pytest.raises(Unsupported, match="very next"):
                slime.write_delta(change, tmp_path, version=version, base_version=base_version)
        with pytest.raises(InvalidArgument, match="-1"):
            slime.write_delta(change, tmp_path, version=0, base_version=-1)

    def test_more_than_32_bits_of_positions(self) -> None:
        huge = np.broadcast_to(np.uint8(0), (1 << 32,))
        with pytest.raises(Unsupported, match="Choose the encoding xor"):
            encode_overwrite("w", huge, huge)

    @pytest.mark.parametrize(
        "options",
        [{"encoding": "xr"}, {"checksum": "md5"}, {"checksum": "sha256"}, {"max_file_bytes": 0}],
    )
    def test_options(self, options: dict[str, object], tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        with pytest.raises(InvalidArgument):
            written(slime, tmp_path, change, **options)
