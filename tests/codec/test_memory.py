"""Small files that claim to be large are refused before memory is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .writer import pack, zstd

MEMORY_BYTES = 64 << 20
# A frame that asks for a window of 128 MiB and holds one raw block of one byte.
WINDOW_BOMB = bytes.fromhex("28b52ffd") + bytes([0x00, 17 << 3, 0x09, 0x00, 0x00]) + b"{"


def _small(index: dict[str, Any], digests: list[int], sections: bytes = b"") -> bytes:
    return pack(json.dumps(index, separators=(",", ":")).encode(), digests, sections)


def _row(kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": "a", "dtype": "U8", "shape": [1 << 48], "kind": kind, **fields}


def _bombs() -> dict[str, bytes]:
    zeros = zstd.compress(bytes(2_000_000))
    attached = {"name": "a", "kind": "file", "size": 1 << 30, "stored": len(zeros)}
    wide = {"name": "a", "kind": "file", "size": 1, "stored": len(WINDOW_BOMB)}
    planes = b"\xfe" + WINDOW_BOMB
    full = _row("full", shape=[1], sizes=[len(planes)])
    return {
        "index of 4 GiB": pack(b"", [], b"", stored=zeros, plain_bytes=(1 << 32) - 1),
        "index near its limit": pack(b"", [], b"", stored=zeros, plain_bytes=(1 << 20) + 300 * 90),
        "index of a wide window": pack(b"", [], b"", stored=WINDOW_BOMB, plain_bytes=1),
        "same and huge": _small({"tensors": [_row("same")]}, [0]),
        "removed and huge": _small({"tensors": [_row("removed")]}, [0]),
        "large and gone": _small(
            {"tensors": [_row("delta", shape=[1], group=0)], "groups": [{"dtype": "U8"}]}, [0, 0]
        ),
        "attachment": _small({"tensors": [], "attachments": [attached]}, [0], zeros),
        "attachment of a wide window": _small(
            {"tensors": [], "attachments": [wide]}, [0], WINDOW_BOMB
        ),
        "chunk of a wide window": _small({"tensors": [full]}, [0], planes),
    }


CHILD = """
import sys
import numpy as np
import thinwire
from thinwire.codec.delta import Delta
from thinwire.errors import ThinwireError

def attach(payload):
    with Delta.open(payload) as delta:
        for attachment in delta.attachments:
            delta.attachment_data(attachment)

def list_changes(payload):
    with Delta.open(payload) as delta:
        return list(delta.changes({}))

def peak_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmPeak"))

payload = bytes.fromhex(sys.argv[1])
thinwire.encode(np.zeros(9), np.ones(9))  # whatever is made once
before = peak_bytes()
for read in (
    thinwire.inspect,
    attach,
    list_changes,
    lambda payload: thinwire.decode_tensors({}, payload),
    lambda payload: thinwire.decode(np.zeros(3, np.uint8), payload),
    lambda payload: thinwire.decode_into(np.zeros(3, np.uint8), payload),
):
    try:
        read(payload)
    except ThinwireError:
        pass
print(peak_bytes() - before)
"""


@pytest.mark.parametrize("name", _bombs())
def test_small_files_take_little_memory(name: str) -> None:
    # Of address space, so that memory which is asked for and never touched counts too.
    payload = _bombs()[name]
    assert len(payload) < 330
    command = [sys.executable, "-c", CHILD, payload.hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MEMORY_BYTES
