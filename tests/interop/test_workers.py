"""Versions are coded on several threads, and are the same bytes for any number of them."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.interop.chains import write_versions

from thinwire.checkpoint import Checkpoint
from thinwire.errors import InvalidArgument
from thinwire.interop import writing
from thinwire.interop.change import CheckpointChange
from thinwire.interop.convert import convert_chain
from thinwire.interop.formats import format_named
from thinwire.interop.writing import code_tensors

LAYOUT = {
    f"model-0000{file}-of-00002.safetensors": {
        f"model.layers.{file}{number}.weight": ("BF16", [8 * number + 1, 40]) for number in range(8)
    }
    for file in (1, 2)
}
FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("slime", {}),
    ("slime", {"encoding": "overwrite", "max_file_bytes": 500}),
    ("skyrl", {"max_file_bytes": 500}),
    ("trl", {"layout": "v1"}),
    ("trl", {"layout": "v2"}),
    ("trl", {"layout": "v2", "encoding": "raw"}),
    ("grail", {}),
    ("fireworks", {"compression_format": "arc_v1"}),
    ("fireworks", {"compression_format": "arc_v2"}),
    ("fireworks", {"compression_format": "arc_v3"}),
    ("fireworks", {"compression_format": "thinwire"}),
]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("versions"), 3, LAYOUT)


@pytest.fixture(scope="module")
def change(versions: list[Path]) -> CheckpointChange:
    return CheckpointChange(*(Checkpoint.open(path) for path in versions[:2]))


@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_the_same_bytes_for_any_number(
    tmp_path: Path, change: CheckpointChange, format: str, options: dict[str, Any]
) -> None:
    written = []
    for workers in (1, 2, 7):
        out = tmp_path / str(workers)
        out.mkdir()
        files = format_named(format).write_delta(
            change, out, version=1, base_version=0, workers=workers, **options
        )
        written.append([(file.key, file.path.read_bytes()) for file in files])
    assert written[0] == written[1] == written[2]
    assert sum(len(data) for _, data in written[0]) > 1000


@pytest.mark.parametrize("format", ["slime", "trl", "grail", "fireworks"])
def test_chains_are_read_and_written_on_threads(
    tmp_path: Path, versions: list[Path], format: str
) -> None:
    """From another format: its tensors are decoded on threads too."""
    row = format_named(format)
    for number, (old, new) in enumerate(pairwise(versions), 1):
        out = tmp_path / f"out-{number}"
        out.mkdir()
        pair = CheckpointChange(Checkpoint.open(old), Checkpoint.open(new))
        for file in row.write_delta(pair, out, version=number, base_version=number - 1):
            target = tmp_path / "chain" / file.key
            target.parent.mkdir(parents=True, exist_ok=True)
            file.path.rename(target)
    made = []
    for workers in (1, 4):
        target = tmp_path / f"made-{workers}"
        done = [
            *convert_chain(tmp_path / "chain", target, "trl", base=versions[0], workers=workers)
        ]
        assert [one.is_full for one in done] == [True, False, False]
        made.append({path.name: path.read_bytes() for path in target.rglob("step_*")})
    assert made[0] == made[1]
    assert len(made[0]) == 3


class Work:
    """What is in work at a time, counted."""

    def __init__(self, change: CheckpointChange) -> None:
        self.sizes = {name: tensor.data.size for name, tensor in change.base.tensors.items()}
        self.most_bytes = self.most = 0
        self._bytes = self._count = 0
        self._lock = threading.Lock()

    def code(self, name: str) -> str:
        with self._lock:
            self._bytes += self.sizes[name]
            self._count += 1
            self.most_bytes = max(self.most_bytes, self._bytes)
            self.most = max(self.most, self._count)
        threading.Event().wait(0.001)
        with self._lock:
            self._bytes -= self.sizes[name]
            self._count -= 1
        return name


@pytest.mark.parametrize("memory_times", [1, 25])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_work_is_bounded(
    change: CheckpointChange, workers: int, memory_times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it takes, which is many times what the tensors have."""
    names = list(change.base.tensors)
    work = Work(change)
    limit = 2 * max(work.sizes.values()) - 1
    monkeypatch.setattr(writing, "MEMORY_BYTES", memory_times * limit)
    found = code_tensors(change, names, work.code, workers, memory_times=memory_times)
    assert list(found) == names
    assert work.most <= workers
    assert work.most_bytes <= limit
    # A tensor beyond the limit is in work alone, and all are.
    monkeypatch.setattr(writing, "MEMORY_BYTES", 1)
    work = Work(change)
    found = code_tensors(change, names, work.code, workers, memory_times=memory_times)
    assert list(found) == names
    assert work.most == 1


def test_threads_work_at_the_same_time(change: CheckpointChange) -> None:
    meeting = threading.Barrier(3)

    def code(name: str) -> int:
        return meeting.wait(timeout=30)

    names = list(change.base.tensors)[:3]
    assert sorted(code_tensors(change, names, code, 3, memory_times=1)) == [0, 1, 2]


def test_the_first_tensors_error_is_told(change: CheckpointChange) -> None:
    names = list(change.base.tensors)
    is_over = threading.Event()

    def code(name: str) -> str:
        if name == names[2]:
            is_over.set()
            raise ValueError(name)
        if name == names[1]:
            is_over.wait(30)
            raise ValueError(name)
        return name

    found = code_tensors(change, names, code, 3, memory_times=1)
    assert next(found) == names[0]
    with pytest.raises(ValueError, match=names[1]):
        next(found)


def test_no_worker_is_no_number(change: CheckpointChange, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="workers is 0"):
        format_named("slime").write_delta(change, tmp_path, version=1, base_version=0, workers=0)
