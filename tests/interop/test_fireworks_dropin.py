"""The drop-in functions beside the package's: same arguments, same tensors, same errors."""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import ThinwireError
from thinwire.interop import fireworks as fw

from .arc_pairs import Package

torch = pytest.importorskip("torch", reason="needs torch, which is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")

NAMES = ("arc_v1", "arc_v2", "arc_v3", "xor_one_to_one_zlib", "xor_one_to_one_zstd")
ALL_NAMES = (*NAMES, "thinwire")
Tensors = dict[str, Any]


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    Package(monkeypatch)
    with warnings.catch_warnings(action="ignore"):
        yield importlib.import_module("fireworks_delta_compression")


def make_tensors() -> tuple[Tensors, Tensors]:
    random = torch.Generator().manual_seed(5)
    old = {
        "w": torch.randn(64, 33, generator=random).bfloat16(),
        "turned": torch.randn(20, 30, generator=random).half().T,
        "b": torch.randn(7, generator=random),
        "d": torch.randn(3, 5, generator=random).double(),
        "empty": torch.zeros(0, 4),
        "scale": torch.tensor(3.5).half(),
        "ids": torch.arange(50),
        "mask": torch.tensor([True, False, True]),
        "q": torch.randn(5, 10, generator=random).to(torch.float8_e4m3fn),
        "q5": torch.randn(50, generator=random).to(torch.float8_e5m2),
        "q4": torch.arange(60, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 20),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["w"][3, 5:9] += 1
    new["turned"][2] = float("nan")
    new["b"][2] = -0.0
    new["ids"][1] = 9
    new["mask"][1] = True
    new["q4"].view(torch.uint8)[1] ^= 3
    return old, new


def bits(tensor: Any) -> bytes:
    data: bytes = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data


def check_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(got[name]) == bits(tensor), name


def save(path: Path, tensors: Tensors) -> str:
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors_torch.save_file(plain, path, metadata={"format": "pt"})
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    old, new = make_tensors()
    return save(tmp_path / "old.safetensors", old), save(tmp_path / "new.safetensors", new)


@pytest.mark.parametrize("name", [*ALL_NAMES, "ARC_V3"])
def test_tensors(name: str) -> None:
    old, new = make_tensors()
    for key, before in old.items():
        diff, checksum = fw.delta_compress(src=before, dst=new[key], compression_format=name)
        assert (diff.dtype, diff.dim(), diff.device.type) == (torch.uint8, 1, "cpu")
        got = fw.delta_decompress(
            src=before, compressed_diff=diff, checksum=checksum, compression_format=name
        )
        check_same({key: got}, {key: new[key]})
        if got.numel():
            got.flatten().view(torch.uint8).zero_()  # memory of its own
            check_same({key: before}, {key: make_tensors()[0][key]})


@pytest.mark.parametrize("name", NAMES)
def test_tensors_both_ways(name: str, real: Any) -> None:
    old, new = make_tensors()
    for compress, decompress in (
        (fw.delta_compress, real.delta_decompress),
        (real.delta_compress, fw.delta_decompress),
    ):
        got = {}
        for key, before in old.items():
            diff, checksum = compress(src=before, dst=new[key], compression_format=name)
            got[key] = decompress(
                src=before, compressed_diff=diff, checksum=checksum, compression_format=name
            )
        check_same(got, new)


@pytest.mark.parametrize("name", NAMES)
def test_files_both_ways(name: str, real: Any, files: tuple[str, str], tmp_path: Path) -> None:
    old, new = make_tensors()
    diff_file = str(tmp_path / "diff.safetensors")
    for one, other in ((fw, real), (real, fw)):
        diffs, checksums = one.delta_compress_files_to_file(
            src=files[0], dst=files[1], diff_file=diff_file, compression_format=name
        )
        assert diffs.keys() == checksums.keys() == old.keys()
        got = other.delta_decompress_dict_from_file(
            src=dict(old), diff_file=diff_file, compression_format=name
        )
        check_same(got, new)
        made = str(Path(save(tmp_path / "made.safetensors", old)))
        other.delta_decompress_inplace(base_path=made, diff_path=diff_file, compression_format=name)
        check_same(safetensors_torch.load_file(made), new)
        one.delta_compress_dicts_to_file(
            src=old, dst=new, diff_file=diff_file, compression_format=name
        )
        made = str(Path(save(tmp_path / "made.safetensors", old)))
        check_same(other.decompress_delta_into_source(diff_file, made, name), new)
        check_same(safetensors_torch.load_file(made), new)


def test_signatures_are_the_packages(real: Any) -> None:
    """Positions and names of arguments; ours may take more, each with a default."""
    for name in real.__all__:
        if not name.startswith(("delta_", "decompress_")):
            continue
        ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (fw, real))
        assert list(ours)[: len(theirs)] == list(theirs), name
        for key, parameter in theirs.items():
            assert ours[key].kind == parameter.kind
            assert (ours[key].default is ours[key].empty) == (
                parameter.default is parameter.empty
            ), (name, key)
        assert all(p.default is not p.empty for p in list(ours.values())[len(theirs) :])


def test_names_of_errors_are_the_packages(real: Any) -> None:
    errors = {name for name in real.__all__ if name.endswith("Error")}
    assert len(errors) == 5
    for name in errors:
        ours, theirs = getattr(fw, name), getattr(real, name)
        assert issubclass(ours, ThinwireError)
        assert set(theirs.__mro__) - {theirs} <= set(ours.__mro__)


def test_every_name_of_the_package_is_there(real: Any) -> None:
    assert set(real.__all__) <= set(fw.__all__)
    assert fw.Checksum is real.Checksum
    theirs = real.CompressionBackend.__abstractmethods__
    assert fw.CompressionBackend.__abstractmethods__ == theirs
    for name in theirs:
        ours, other = (getattr(side.CompressionBackend, name) for side in (fw, real))
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(other).parameters)


def error_of(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("there was no error")


WRONG: dict[str, Callable[[Any, Path], Any]] = {
    "unknown format": lambda w, d: w.decompress_delta_into_source(d / "diff", d / "old", "nope"),
    "no delta": lambda w, d: w.decompress_delta_into_source(d / "none", d / "old", "arc_v2"),
    "no source": lambda w, d: w.decompress_delta_into_source(d / "diff", d / "none", "arc_v2"),
    "garbage": lambda w, d: w.decompress_delta_into_source(d / "garbage", d / "old", "arc_v2"),
    "other format": lambda w, d: w.decompress_delta_into_source(d / "diff", d / "old", "arc_v1"),
    "other source": lambda w, d: w.decompress_delta_into_source(d / "diff", d / "new", "arc_v3"),
    "no base in place": lambda w, d: w.delta_decompress_inplace(
        base_path=str(d / "none"), diff_path=str(d / "diff"), compression_format="arc_v2"
    ),
    "unknown format in place": lambda w, d: w.delta_decompress_inplace(
        base_path=str(d / "old"), diff_path=str(d / "diff"), compression_format="nope"
    ),
    "no tensor": lambda w, d: w.delta_compress_dicts({"q": torch.zeros(3)}, {}, "arc_v2", False),
    "other names": lambda w, d: w.delta_compress_dicts({"q": torch.zeros(3)}, {}, "arc_v2"),
    "no text as checksum": lambda w, d: w.delta_decompress(
        src=torch.zeros(3),
        compressed_diff=w.delta_compress(
            src=torch.zeros(3), dst=torch.ones(3), compression_format="arc_v2"
        )[0],
        checksum=5,
        compression_format="arc_v2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_are_what_the_packages_are(
    what: str, real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # the package logs them
    errors = []
    for side in (real, fw):
        folder = tmp_path / side.__name__
        folder.mkdir()
        old, new = {"w": torch.zeros(300).half()}, {"w": torch.ones(300).half()}
        save(folder / "old", old)
        save(folder / "new", {"w": torch.full((300,), -2.0).half()})
        (folder / "garbage").write_bytes(b"garbage" * 99)
        real.delta_compress_dicts_to_file(
            src=old, dst=new, diff_file=str(folder / "diff"), compression_format="arc_v2"
        )
        call = WRONG[what]
        errors.append(error_of(lambda: call(side, folder)))  # noqa: B023
        shutil.rmtree(folder)
    theirs, ours = errors
    wanted = next(c for c in type(theirs).__mro__ if c.__module__ == "builtins")
    assert isinstance(ours, wanted)
    assert isinstance(ours, ThinwireError)
    again = pickle.loads(pickle.dumps(ours))
    assert (str(again), isinstance(again, wanted)) == (str(ours), True)


def test_processes_change_nothing(files: tuple[str, str], tmp_path: Path) -> None:
    """One new process, as each takes seconds to import torch; of two see test_fireworks_dirs."""
    pool: Executor
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for name in ("arc_v2", "arc_v3", "thinwire"):
            check_pool(name, pool, files, str(tmp_path / f"{name}.safetensors"))


def check_pool(name: str, pool: Executor, files: tuple[str, str], diff_file: str) -> None:
    old, new = make_tensors()
    alone = fw.delta_compress_dicts(old, new, name)
    pooled = fw.delta_compress_dicts(old, new, name, True, None, pool)
    check_same(pooled[0], alone[0])
    assert pooled[1] == alone[1]
    fw.delta_compress_files_to_file(
        src=files[0],
        dst=files[1],
        diff_file=diff_file,
        compression_format=name,
        executor=pool,
    )
    got = fw.delta_decompress_dict_from_file(
        src=old, diff_file=diff_file, compression_format=name, executor=pool
    )
    check_same(got, new)
    with pytest.raises(fw.DeltaChecksumError, match="'w'"):
        fw.delta_decompress_dict_from_file(
            src=old | {"w": old["w"] + 9},
            diff_file=diff_file,
            compression_format=name,
            executor=pool,
        )


@pytest.mark.parametrize("name", ALL_NAMES)
def test_executors_change_nothing(name: str, files: tuple[str, str], tmp_path: Path) -> None:
    old, new = make_tensors()
    alone = fw.delta_compress_dicts(old, new, name)
    with ThreadPoolExecutor(3) as pool:
        pooled = fw.delta_compress_dicts(old, new, name, True, torch.device("cpu"), pool)
        check_same(pooled[0], alone[0])
        assert pooled[1] == alone[1]
        paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
        for path, executor in zip(paths, (None, pool), strict=True):
            fw.delta_compress_files_to_file(
                src=files[0],
                dst=files[1],
                diff_file=str(path),
                compression_format=name,
                executor=executor,
            )
        assert paths[0].read_bytes() == paths[1].read_bytes()
        got = fw.delta_decompress_dict_from_file(
            src=old, diff_file=str(paths[0]), compression_format=name, executor=pool
        )
    check_same(got, new)


def test_names_must_match_unless_told(files: tuple[str, str], tmp_path: Path) -> None:
    old, new = make_tensors()
    more = new | {"more": torch.zeros(3)}
    with pytest.raises(fw.DeltaKeyMismatchError, match="'more'"):
        fw.delta_compress_dicts(old, more, "arc_v2")
    assert fw.delta_compress_dicts(old, more, "arc_v2", False)[0].keys() == old.keys()
    with pytest.raises(fw.DeltaKeyMismatchError, match="'more'"):
        fw.delta_compress_dicts(more, new, "arc_v2", False)
    diff_file = str(tmp_path / "diff.safetensors")
    fw.delta_compress_files_to_file(
        src=files[0], dst=files[1], diff_file=diff_file, compression_format="arc_v2"
    )
    read: Callable[..., Tensors] = fw.delta_decompress_dict_from_file
    arguments = {"diff_file": diff_file, "compression_format": "arc_v2"}
    with pytest.raises(fw.DeltaKeyMismatchError, match="'more'"):
        read(src=old | {"more": torch.zeros(3)}, **arguments)
    check_same(read(src=old | {"more": torch.zeros(3)}, must_match=False, **arguments), new)
    del old["b"]
    with pytest.raises(fw.DeltaKeyMismatchError, match="'b'"):
        read(src=old, must_match=False, **arguments)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_errors(name: str) -> None:
    old, new = torch.zeros(300), torch.ones(300)
    with pytest.raises(fw.DeltaSizeMismatchError):
        fw.delta_compress(src=old, dst=new[1:], compression_format=name)
    with pytest.raises(fw.DeltaSizeMismatchError):
        fw.delta_compress(src=old, dst=new.half(), compression_format=name)
    diff, checksum = fw.delta_compress(src=old, dst=new, compression_format=name)

    def read(src: Any = old, diff: Any = diff, checksum: str = checksum) -> Any:
        return fw.delta_decompress(
            src=src, compressed_diff=diff, checksum=checksum, compression_format=name
        )

    assert bits(read()) == bits(new)
    with pytest.raises(fw.DeltaChecksumError):
        read(checksum="1")
    with pytest.raises(fw.DeltaChecksumError):
        read(src=torch.full((300,), 2.0))
    with pytest.raises(ValueError):  # which one depends on where the format has sizes
        read(src=torch.zeros(299))
    with pytest.raises((fw.DeltaDecompressionError, fw.DeltaChecksumError)):
        read(diff=diff[:-1])
    with pytest.raises(RuntimeError):  # as the package's functions on files raise
        read(diff=diff[:3])


def test_unknown_formats_and_arguments() -> None:
    tensor = torch.zeros(3)
    with pytest.raises(fw.BackendNotFoundError, match="arc_v9"):
        fw.delta_compress(src=tensor, dst=tensor, compression_format="arc_v9")
    with pytest.raises(ValueError, match="no torch tensor"):
        fw.delta_compress(src=[1.0], dst=tensor, compression_format="arc_v3")


def test_a_failed_write_leaves_the_file(files: tuple[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept.safetensors"
    kept.write_bytes(b"kept")
    with pytest.raises(fw.DeltaKeyMismatchError):
        fw.delta_compress_files_to_file(
            src=files[0],
            dst=save(tmp_path / "other.safetensors", {"x": torch.zeros(3)}),
            diff_file=str(kept),
            compression_format="arc_v3",
        )
    assert kept.read_bytes() == b"kept"
    assert {path.name for path in tmp_path.iterdir()} == {
        "kept.safetensors", "other.safetensors", "old.safetensors", "new.safetensors",
    }  # fmt: skip


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, thinwire.interop.fireworks; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
