"""SkyRL's delta sync: golden files, round trips, chains."""

from __future__ import annotations

import json
import sys
import tracemalloc
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.errors import (
    Corrupt,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
    Unsupported,
    VersionGap,
)
from thinwire.interop import formats, skyrl, skyrl_manifest
from thinwire.interop.change import CheckpointChange
from thinwire.interop.foreign import ForeignDelta

from . import by_hand
from .making import (
    BITS,
    MIXED,
    MIXED_NEW,
    Tensors,
    applied,
    bits_of,
    change_between,
    checkpoint_bits,
    tensor,
    tensor_pairs,
    write_checkpoint,
    written,
)

GOLDEN = Path(__file__).parent / "vectors"
MANIFEST = "manifest.json"


@pytest.mark.claim("skyrl", "read", "golden files of a writer without thinwire")
@pytest.mark.parametrize("kind", ["now", "first-release"])
def test_golden_files(kind: str, tmp_path: Path) -> None:
    full = [Checkpoint.open(GOLDEN / f"full_{number}") for number in range(3)]
    chain = GOLDEN / f"skyrl-{kind}"
    versions = skyrl.list_versions(chain)
    assert [row[:2] for row in versions] == [(1, 0), (2, 1)]
    assert formats.FORMATS["skyrl"].list_versions(chain) == versions
    for row in versions:
        assert skyrl.is_delta(row.path)
        base, new = full[row.version - 1], full[row.version]
        with skyrl.open_delta(row.path) as delta:
            assert (delta.facts.version, delta.facts.base_version) == row[:2]
            sizes = [path.stat().st_size for path in row.path.iterdir()]
            assert delta.facts.file_bytes == sum(sizes)
            assert applied(base, delta) == checkpoint_bits(new)
        # What is written from the same has the same payloads and, but for order, the same manifest.
        folder = written(skyrl, tmp_path, CheckpointChange(base, new), version=row.version)
        if kind == "now":
            mine, theirs = (payloads_of(path) for path in (folder, row.path))
            assert mine == theirs


@pytest.mark.claim("skyrl", "read", "a chain by SkyRL 0.4.0's own publisher")
def test_deltas_by_skyrls_own_publisher(tmp_path: Path) -> None:
    """Release 0.4.0's, run once between the same checkpoints; it takes no tensors without axes."""
    full = [Checkpoint.open(GOLDEN / f"full_{number}") for number in range(3)]
    versions = skyrl.list_versions(GOLDEN / "skyrl-0.4.0")
    assert [row[:2] for row in versions] == [(1, 0), (2, 1)]
    for row in versions:
        base, new = full[row.version - 1], full[row.version]
        with skyrl.open_delta(row.path) as delta:
            for name, old in base.tensors.items():
                made = delta.new_tensor(name, old) if name in delta.tensors else old
                if old.shape:
                    assert made.data.tobytes() == new.tensors[name].data.tobytes()
        folder = written(skyrl, tmp_path, CheckpointChange(base, new), version=row.version)
        mine, theirs = (payloads_of(path) for path in (folder, row.path))
        assert theirs == {name: one for name, one in mine.items() if base.tensors[name].shape}


def payloads_of(folder: Path) -> dict[str, tuple[dict[str, object], bytes]]:
    """Each record, without its file's name, and what its payload unpacks to."""
    manifest = json.loads((folder / MANIFEST).read_text())
    rows = {}
    for record in manifest["tensors"]:
        file_name = record.pop("payload_file")
        del record["compressed_num_bytes"]
        tensors, _ = by_hand.read_safetensors(folder / file_name)
        payload = tensors[record["payload_key"]][2]
        rows[record["name"]] = record, by_hand.zstd.decompress(payload)
    return rows


@pytest.mark.claim("skyrl", "write", "a reader without thinwire")
@pytest.mark.parametrize("checksum", ["xxh3-128", "sha256"])
@pytest.mark.parametrize("shards", [1, 3])
def test_written_and_read(checksum: str, shards: int, tmp_path: Path) -> None:
    change = change_between(tmp_path, MIXED, MIXED_NEW, shards=shards)
    folder = written(skyrl, tmp_path, change, checksum=checksum)
    assert bits_of(by_hand.read_skyrl(folder, MIXED, 0)) == bits_of(MIXED_NEW)
    # Every byte is as SkyRL would write it, but for the order of the tensors.
    theirs = by_hand.write_skyrl(tmp_path / "theirs", MIXED, MIXED_NEW, checksum=checksum)
    mine_text, their_text = (json.loads((path / MANIFEST).read_text()) for path in (folder, theirs))
    assert list(mine_text) == list(their_text)
    by_name = itemgetter("name")
    for text in (mine_text, their_text):
        text["tensors"].sort(key=by_name)
    assert mine_text == their_text
    with skyrl.open_delta(folder) as delta:
        checked: ForeignDelta = delta
        assert applied(change.base, checked) == bits_of(MIXED_NEW)
        assert delta.facts.encoding == "xor"
        assert dict(delta.files) == {}
        assert delta.tensors.keys() == {name for name in MIXED if MIXED[name] != MIXED_NEW[name]}
        assert delta.tensors["w"][1:3] == ("BF16", (40, 30))
        assert not delta.new_tensor("w", change.base.tensors["w"]).data.flags.writeable


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pair=tensor_pairs(list(BITS)),
    checksum=st.sampled_from(["xxh3-128", "sha256"]),
    max_file_bytes=st.sampled_from([1, 40, 1 << 30]),
)
def test_any_bits_survive(
    pair: tuple[Tensors, Tensors],
    checksum: str,
    max_file_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    old, new = pair
    change = change_between(tmp_path, old, new)
    folder = written(skyrl, tmp_path, change, checksum=checksum, max_file_bytes=max_file_bytes)
    assert bits_of(by_hand.read_skyrl(folder, old, 0)) == bits_of(new)
    assert applied(change.base, skyrl.open_delta(folder)) == bits_of(new)
    for legacy in (False, True):
        theirs = by_hand.write_skyrl(
            tmp_path / f"theirs-{legacy}", old, new, checksum=checksum, files=2, legacy=legacy
        )
        assert applied(change.base, skyrl.open_delta(theirs)) == bits_of(new)


def test_nothing_changed(tmp_path: Path) -> None:
    change = change_between(tmp_path, MIXED, MIXED)
    folder = written(skyrl, tmp_path, change)
    assert [path.name for path in folder.iterdir()] == [MANIFEST]
    assert by_hand.read_skyrl(folder, MIXED, 0) == MIXED
    with skyrl.open_delta(folder) as delta:
        assert not delta.tensors
        assert applied(change.base, delta) == bits_of(MIXED)


def test_files_are_split_by_size(tmp_path: Path) -> None:
    old = {name: tensor("BF16", [500], seed) for seed, name in enumerate("abcde")}
    new = {name: tensor("BF16", [500], seed + 9) for seed, name in enumerate("abcde")}
    change = change_between(tmp_path, old, new)
    folder = written(skyrl, tmp_path, change, max_file_bytes=2100)
    names = [f"delta-rank00000-file{number:06d}.safetensors" for number in range(3)]
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["payload_files"] == names
    assert [row["payload_file"] for row in manifest["tensors"]] == [
        names[number] for number in (0, 0, 1, 1, 2)
    ]
    assert bits_of(by_hand.read_skyrl(folder, old, 0)) == bits_of(new)
    assert applied(change.base, skyrl.open_delta(folder)) == bits_of(new)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for run in ("1", "2"):
        change = change_between(tmp_path / run, MIXED, MIXED_NEW, shards=2)
        folder = written(skyrl, tmp_path / run, change, max_file_bytes=200)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]
    assert len(contents[0]) > 2


def test_dtypes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for name, torch_name in skyrl_manifest.DTYPE_NAMES.items():
        dtype = getattr(torch, torch_name)
        assert str(dtype) == f"torch.{torch_name}"
        assert dtype.itemsize * 8 == skyrl_manifest.byte_count(name, [8])


def test_dtype_names_as_torch_prints_them(tmp_path: Path) -> None:
    folder = by_hand.write_skyrl(tmp_path / "delta-00000001", MIXED, MIXED_NEW)
    manifest = json.loads((folder / MANIFEST).read_text())
    for record in manifest["tensors"]:
        record["dtype"] = "torch." + record["dtype"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    base = write_checkpoint(tmp_path / "base", MIXED)
    assert applied(base, skyrl.open_delta(folder)) == bits_of(MIXED_NEW)


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
                written(skyrl, tmp_path / f"{number}", change)

    @pytest.mark.parametrize("dtype", ["F8_E8M0", "C64", "F4", "F8_E4M3FNUZ"])
    def test_other_dtypes(self, dtype: str, tmp_path: Path) -> None:
        old = {"w": MIXED["w"], "x": (dtype, [8], b"12345678"[: 4 if dtype == "F4" else 8])}
        if dtype == "C64":
            old["x"] = (dtype, [1], b"12345678")
        # Unchanged it is no matter: only changed tensors are written.
        written(skyrl, tmp_path, change_between(tmp_path / "0", old, old | {"w": MIXED_NEW["w"]}))
        changed = old | {"x": (*old["x"][:2], old["x"][2][::-1])}
        with pytest.raises(Unsupported, match=rf"'x' is {dtype}, which SkyRL does not know"):
            written(skyrl, tmp_path, change_between(tmp_path / "1", old, changed), version=2)

    def test_other_files(self, tmp_path: Path) -> None:
        base = write_checkpoint(tmp_path / "old", MIXED, files={"config.json": "1"})
        new = write_checkpoint(tmp_path / "new", MIXED_NEW, files={"config.json": "2"})
        with pytest.raises(Unsupported, match=r"'config.json' changed.*SkyRL's delta sync"):
            written(skyrl, tmp_path, CheckpointChange(base, new))

    def test_versions_that_are_left_out(self, tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        with pytest.raises(Unsupported, match="very next"):
            skyrl.write_delta(change, tmp_path, version=3, base_version=1)

    def test_full_versions(self, tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        with pytest.raises(InvalidArgument, match="no full versions"):
            skyrl.write_full(change.base, tmp_path, version=1)

    @pytest.mark.parametrize("options", [{"checksum": "blake3"}, {"max_file_bytes": 0}])
    def test_options(self, options: dict[str, object], tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        with pytest.raises(InvalidArgument):
            written(skyrl, tmp_path, change, **options)

    def test_a_missing_package(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        monkeypatch.setitem(sys.modules, "xxhash", None)
        with pytest.raises(InvalidArgument, match=r"pip install 'thinwire\[interop\]'"):
            written(skyrl, tmp_path, change)
        assert list((tmp_path / "out-1").iterdir()) == []
        written(skyrl, tmp_path, change, version=2, checksum="sha256")


class TestChains:
    @pytest.fixture
    def chain(self, tmp_path: Path) -> Path:
        change = change_between(tmp_path, MIXED, MIXED_NEW)
        for version in (1, 2, 3):
            written(skyrl, tmp_path, change, version=version)
        return tmp_path / "chain"

    def test_listed(self, chain: Path) -> None:
        versions = skyrl.list_versions(chain)
        assert [row[:2] for row in versions] == [(1, 0), (2, 1), (3, 2)]
        assert not any(row.is_full for row in versions)
        assert versions[2][2:] == (chain / "delta-00000003", "delta-00000003")

    def test_a_gap(self, chain: Path) -> None:
        (chain / "delta-00000002").rename(chain / "gone")
        with pytest.raises(VersionGap, match=r"delta-00000003: a delta from version 2, .* is 1"):
            skyrl.list_versions(chain)
        (chain / "delta-00000001").rename(chain / "gone-too")
        assert [row.version for row in skyrl.list_versions(chain)] == [3]

    def test_one_that_is_being_written(self, chain: Path) -> None:
        (chain / "delta-00000003" / MANIFEST).unlink()
        assert [row.version for row in skyrl.list_versions(chain)] == [1, 2]

    def test_what_is_no_version(self, chain: Path, tmp_path: Path) -> None:
        for name in ("delta-4", "delta-000000004", "delta-00000004.tmp", "v4", "v00000009"):
            (chain / name).mkdir()
        (chain / "v00000009" / MANIFEST).write_text('{"version": 9}')
        (chain / "delta-00000004").write_text("a file")
        assert [row.version for row in skyrl.list_versions(chain)] == [1, 2, 3]
        assert skyrl.list_versions(tmp_path / "nowhere") == []
        assert skyrl.list_versions(chain / "delta-00000004") == []

    def test_another_number_than_its_folder(self, chain: Path) -> None:
        (chain / "delta-00000003").rename(chain / "delta-00000004")
        with pytest.raises(Corrupt, match="its version is 3, and its folder is delta-00000004"):
            skyrl.list_versions(chain)
        with pytest.raises(Corrupt, match="its version is 3, and its folder is delta-00000004"):
            skyrl.open_delta(chain / "delta-00000004")

    def test_two_folders_for_one_version(self, chain: Path) -> None:
        by_hand.write_skyrl(chain / "v00000002", MIXED, MIXED_NEW, version=2, base_version=1)
        with pytest.raises(Corrupt, match="two folders for version 2"):
            skyrl.list_versions(chain)


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """A payload that unpacks to 512 MiB, for a tensor of 1000 bytes."""
    compressor = by_hand.zstd.ZstdCompressor(3)
    parts = [compressor.compress(bytes(1 << 24)) for _ in range(32)]
    bomb = b"".join([*parts, compressor.flush()])
    old: Tensors = {"w": ("U8", [1000], bytes(1000))}
    base = write_checkpoint(tmp_path / "base", old)
    for number, payload in enumerate([bomb, by_hand.zstd.compress(bytes(1 << 26))]):
        folder = by_hand.write_skyrl(
            tmp_path / f"{number}", old, {"w": ("U8", [1000], b"x" * 1000)}
        )
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["tensors"][0]["compressed_num_bytes"] = len(payload)
        manifest["total_compressed_num_bytes"] = len(payload)
        (folder / MANIFEST).write_text(json.dumps(manifest))
        [file] = folder.glob("*.safetensors")
        file.write_bytes(by_hand.safetensors({"w": ("U8", [len(payload)], payload)}))
        delta = skyrl.open_delta(folder)
        tracemalloc.start()
        try:
            with pytest.raises(ThinwireError, match="SkyRL's delta sync format"):
                delta.new_tensor("w", base.tensors["w"])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20


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
        folder = written(skyrl, tmp_path, change)
        with skyrl.open_delta(folder) as delta:
            tracemalloc.reset_peak()
            for name in delta.tensors:
                found = delta.new_tensor(name, change.base.tensors[name])
                assert found.data[0] == new[name][2][0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * (4 << 20)
