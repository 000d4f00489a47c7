"""Everything that fuzzing once found stays found, and a short repeatable stretch of new inputs."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fuzz.container import BASES
from fuzz.interop_watch import watched
from fuzz.loop import run_random
from fuzz.target import CORPUS, Finding, bounded_memory, run_bounded
from fuzz.targets import TARGETS

import thinwire
from fuzz import interop_bundle
from thinwire.checkpoint.strict_json import parse_object
from thinwire.errors import ThinwireError

ROOT = CORPUS.parents[1]
# A quarter of a second each; `make fuzz` runs for minutes.
ITERATIONS = {"container": 300, "safetensors": 300, "weight_index": 150, "redo_log": 200}
ITERATIONS |= {"manifest": 1000, "places": 200, "index_map": 150}
ITERATIONS |= {"arc_v1": 60, "arc_v2": 60, "arc_v3": 40, "slime": 60, "skyrl": 60, "trl": 80}
ITERATIONS |= {"grail": 30, "nemo": 60, "pickles": 400}
MAX_FILE_BYTES = 4000
MAX_CORPUS_BYTES = 200_000


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name, target in TARGETS.items() for path in target.corpus()],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_corpus(name: str, path: Path) -> None:
    run_bounded(TARGETS[name], path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_random_inputs(name: str, tmp_path: Path) -> None:
    count = ITERATIONS[name]
    assert run_random(TARGETS[name], 1, lambda iteration: iteration < count, tmp_path) == count


def test_corpus_is_small() -> None:
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert max(sizes) <= MAX_FILE_BYTES
    assert sum(sizes) <= MAX_CORPUS_BYTES


def test_every_seed_is_taken() -> None:
    """A target that refuses its own seeds would only ever test the first check."""
    for name in ("seed-array", "seed-large", "seed-mixed", "seed-kinds"):
        thinwire.decode_tensors(BASES, (CORPUS / "container" / name).read_bytes())


def test_every_foreign_seed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: ThinwireError) -> None:
        raise Finding(f"refused: {error}")

    monkeypatch.setattr(interop_bundle, "check_error", refuse)
    for name in ("arc_v1", "arc_v2", "arc_v3", "slime", "skyrl", "trl", "grail", "nemo"):
        for path in TARGETS[name].corpus():
            if path.name.startswith(("seed-", "torch-")):
                TARGETS[name].run(path.read_bytes())


def test_a_reader_that_runs_what_it_reads_is_found(tmp_path: Path) -> None:
    for name in ("seed-planted", "seed-planted-2"):
        planted = (CORPUS / "pickles" / name).read_bytes()
        with pytest.raises(Finding, match="executed"), watched(tmp_path, tmp_path):
            pickle.loads(planted)


def test_a_reader_that_looks_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "beside").write_bytes(b"")
    room = tmp_path / "room"
    with watched(room, room):
        (room / "inside").write_bytes(b"")
    for path in (tmp_path / "beside", room / ".." / "beside", Path("/etc/hostname")):
        with pytest.raises(Finding, match="open"), watched(room, room):
            path.read_bytes()
    # Also where the reader hides it.
    with pytest.raises(Finding, match="open"), watched(room, room), suppress(Exception):
        (tmp_path / "beside").read_bytes()


def test_memory_bound_holds() -> None:
    with pytest.raises((MemoryError, Finding)), bounded_memory(64 << 20):
        np.ones(256 << 20, np.uint8)


def test_a_key_twice_among_many() -> None:
    """Once took time in the square of the keys: hours for a header of some megabytes."""
    keys = ",".join(f'"{number}":0' for number in range(300_000))
    with pytest.raises(ValueError, match="twice"):
        parse_object(f'{{{keys},"299999":1}}'.encode())


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<u8"])
def test_arrays_at_odd_addresses(dtype: str) -> None:
    """Tensors of a mapped file begin wherever its header ends."""
    random = np.random.default_rng(1)
    for offset in range(1, np.dtype(dtype).itemsize):
        memory = random.integers(0, 256, 40_000 + offset, np.uint8)
        base = memory[offset:].view(dtype)
        new = base.copy()
        new[::50] ^= 1
        payload = thinwire.encode(base, new)
        assert payload == thinwire.encode(base.copy(), new)
        assert np.array_equal(thinwire.decode(base, payload), new)
        thinwire.decode_into(base, payload)
        assert np.array_equal(base, new)


def test_native_harness(tmp_path: Path) -> None:
    """Without the sanitizers, and with the kernels as they were built for the package."""
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        pytest.skip("the native harness needs a C++ compiler")
    core = next(ROOT.glob("build/cp*/libthinwire_core.a"), None)
    if core is None:
        pytest.skip("the kernels were not built here: no build/cp*/libthinwire_core.a")
    harness = tmp_path / "fuzz_decode"
    sources = [ROOT / "native" / "fuzz" / "fuzz_decode.cpp", core]
    # Of the harness nothing needs to be fast but its own building.
    subprocess.run([compiler, "-std=c++20", "-O1", *sources, "-o", harness], check=True)
    command = [harness, "--iterations", "200", "--seed", "1", "--keep", tmp_path]
    done = subprocess.run([*command, CORPUS / "native"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "200 iterations" in done.stdout
