"""Small checkpoints on disk, and the command line run in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from thinwire.bench import Tensor, as_tensor
from thinwire.bench.framing import pack
from thinwire.checkpoint import diff_checkpoint
from thinwire.cli.app import app

from .streams import VERSIONS, Lab, publish_some

Run = Callable[..., Result]


class Pair(NamedTuple):
    """Two checkpoints and the delta between them."""

    base: Path
    new: Path
    delta: Path


@pytest.fixture(autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """A shell starts what runs in the background with SIGINT ignored, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run() -> Run:
    """Run the command line; arguments may be paths."""

    def run_command(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run_command


def read_json(result: Result) -> dict[str, Any]:
    """The one JSON object on stdout."""
    content = json.loads(result.stdout)
    assert isinstance(content, dict)
    return content


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of random bits."""
    width = {"BF16": 2, "F32": 4, "U8": 1}[dtype]
    size_bytes = int(np.prod(shape, dtype=np.int64)) * width
    data = np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)
    return as_tensor(dtype, shape, data)


def stepped(tensor: Tensor, seed: int, share: float = 0.01) -> Tensor:
    """The tensor with this share of its words one unit up or down."""
    rng = np.random.default_rng(seed)
    words = tensor.words.copy()
    chosen = rng.random(words.size) < share
    step = rng.choice(np.array([1, -1]), int(chosen.sum())).astype(np.int64)
    words[chosen] += step.astype(words.dtype)
    return tensor._replace(words=words)


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], **files: str) -> Path:
    """A model folder; keywords are further files, the dot of their name as an underscore."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(pack(tensors, {"format": "pt"}))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """Every file by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """One large tensor, small ones, one of each kind, and small files."""
    old = {
        "large": random_tensor("BF16", (300, 250), 1),
        "small": random_tensor("BF16", (40,), 2),
        "still": random_tensor("BF16", (50, 2), 3),
        "scale": random_tensor("F32", (20, 20), 4),
        "gone": random_tensor("U8", (7,), 5),
    }
    new = {
        "large": stepped(old["large"], 1),
        "small": stepped(old["small"], 2, 0.2),
        "still": old["still"],
        "scale": stepped(old["scale"], 4, 0.05),
        "added": random_tensor("U8", (9,), 6),
    }
    base = write_checkpoint(tmp_path / "base", old, config_json="{}", vocab_txt="same")
    after = write_checkpoint(tmp_path / "new", new, config_json='{"a": 1}', vocab_txt="same")
    delta = tmp_path / "delta.tw"
    diff_checkpoint(base, after, delta)
    return Pair(base, after, delta)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two runs, of twelve and of two checkpoints, and a folder that is none."""
    root = tmp_path / "corpus"
    for run_name, count in (("long", 12), ("short", 2)):
        tensors = {
            "w": random_tensor("BF16", (60, 40), 1),
            "v": random_tensor("BF16", (9,), 2),
        }
        for step in range(count):
            write_checkpoint(root / run_name / f"{step:04d}", tensors)
            tensors = {name: stepped(tensor, step, 0.05) for name, tensor in tensors.items()}
        (root / run_name / "run.json").write_text("{}")
    (root / "other").mkdir()
    return root


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """Checkpoints, and nothing published."""
    tensors = {
        "large": random_tensor("BF16", (300, 250), 1),
        "blocks[0].w*": random_tensor("BF16", (300, 300), 2),
        "small": random_tensor("F32", (4,), 3),
    }
    checkpoints = []
    for number in range(1, 11):
        folder = tmp_path / f"step-{number}"
        checkpoints.append(write_checkpoint(folder, tensors, config_json="{}"))
        tensors = {
            name: stepped(tensor, number) if name != "small" else tensor
            for name, tensor in tensors.items()
        }
    return Lab(tmp_path, checkpoints, f"file://{tmp_path}/store")


@pytest.fixture
def stream(lab: Lab) -> Lab:
    """The same with ``VERSIONS`` versions."""
    publish_some(lab, 1, VERSIONS)
    return lab
