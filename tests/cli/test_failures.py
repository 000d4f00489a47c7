"""What goes wrong: exit codes by family, messages, hints, JSON, and nothing left behind."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from thinwire import encode_tensors
from thinwire.codec.digest import xxh3_64
from thinwire.codec.write import Attachment, write_delta
from thinwire.codec.write import Pair as TensorPair
from thinwire.errors import (
    ApplyError,
    FormatError,
    InvalidArgument,
    StoreError,
    ThinwireError,
)

from .conftest import Pair, Run, random_tensor, read_files, read_json, write_checkpoint


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("family", "exit_code"),
    [(InvalidArgument, 2), (FormatError, 3), (ApplyError, 4), (StoreError, 5), (ThinwireError, 1)],
)
def test_an_exit_code_per_family(
    family: type[ThinwireError],
    exit_code: int,
    pair: Pair,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise family("it broke", hint="mend it", path=Path("x"))

    monkeypatch.setattr("thinwire.codec.api.inspect", fail)
    result = run("verify", pair.delta, "--json")
    assert result.exit_code == exit_code
    assert result.stderr == "error: it broke\nhint: mend it\n"
    error = read_json(result)["error"]
    assert list(error) == ["code", "message", "hint", "context"]
    assert error["context"] == {"path": "x"}


def test_an_unexpected_exception_is_not_hidden(
    pair: Pair, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("thinwire.codec.api.inspect", fail)
    result = run("verify", pair.delta)
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("command", ["apply", "in-place", "verify", "inspect"])
def test_wrong_base_names_the_tensor_and_both_digests(
    command: str, pair: Pair, tmp_path: Path, run: Run
) -> None:
    path = pair.base / "model.safetensors"
    data = bytearray(path.read_bytes())
    # The last byte of "large", which comes first in the file, is as good as any of its bytes.
    data[8 + int.from_bytes(data[:8], "little") + 149_999] ^= 1
    path.write_bytes(data)
    before, siblings = read_files(pair.base), names_in(tmp_path)
    arguments = {
        "apply": ["apply", pair.base, pair.delta, "-o", tmp_path / "out"],
        "in-place": ["apply", pair.base, pair.delta, "--in-place"],
        "verify": ["verify", pair.delta, "--base", pair.base],
        "inspect": ["inspect", pair.delta, "--base", pair.base],
    }[command]
    result = run(*arguments, "--json")
    assert result.exit_code == 4
    error = read_json(result)["error"]
    assert error["code"] == "base-mismatch"
    assert error["context"]["tensor"] == "large"
    assert error["context"]["expected_digest"] in result.stderr
    assert error["context"]["actual_digest"] in result.stderr
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert read_files(pair.base) == before
    assert names_in(tmp_path) == siblings


def test_a_tensor_that_the_base_lacks(pair: Pair, tmp_path: Path, run: Run) -> None:
    other = write_checkpoint(tmp_path / "other", {"w": random_tensor("BF16", (3,), 1)})
    result = run("verify", pair.delta, "--base", other, "--json")
    assert result.exit_code == 4
    assert read_json(result)["error"]["code"] in ("tensor-mismatch", "base-mismatch")


def test_truncated_anywhere(pair: Pair, tmp_path: Path, run: Run) -> None:
    data = pair.delta.read_bytes()
    for size in [0, 1, 7, 8, 39, 40, 41, *range(50, len(data), len(data) // 7), len(data) - 1]:
        pair.delta.write_bytes(data[:size])
        for command in (
            ["verify", pair.delta],
            ["inspect", pair.delta],
            ["apply", pair.base, pair.delta, "-o", tmp_path / "out"],
        ):
            result = run(*command, "--json")
            assert result.exit_code == 3
            assert read_json(result)["error"]["code"] == "truncated"
    assert not (tmp_path / "out").exists()


def test_flipped_bits(pair: Pair, run: Run) -> None:
    data = pair.delta.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 40)):
        pair.delta.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert run("verify", pair.delta).exit_code == 3


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, run: Run) -> None:
    name = "\x1b]0;owned\x07\n\u202eweight [red]"
    base, new = np.zeros(9, np.uint8), np.arange(9, dtype=np.uint8)
    delta = tmp_path / "hostile.tw"
    delta.write_bytes(encode_tensors({name: base}, {name: new}))
    result = run("inspect", delta)
    assert result.exit_code == 0
    assert r"\x1b]0;owned\x07\n\u202eweight [red]" in result.stdout
    assert read_json(run("inspect", delta, "--json"))["tensors"][0]["name"] == name
    checkpoint = write_checkpoint(tmp_path / "base", {"w": random_tensor("U8", (9,), 1)})
    result = run("verify", delta, "--base", checkpoint)
    assert result.exit_code in (3, 4)
    assert "\x1b" not in result.stderr
    assert "\u202e" not in result.stderr


def test_a_path_in_a_file_name_is_refused(pair: Pair, tmp_path: Path, run: Run) -> None:
    data = np.zeros(4, np.uint8)
    evil = Attachment("../evil", "file", b"x", 1, xxh3_64(b"x"))
    out = io.BytesIO()
    write_delta(out, [TensorPair("a", "U8", (4,), None, data)], [evil])
    pair.delta.write_bytes(out.getvalue())
    assert run("apply", pair.base, pair.delta, "-o", tmp_path / "out").exit_code == 3
    assert run("apply", pair.base, pair.delta, "--in-place").exit_code == 3
    assert not (tmp_path / "evil").exists()


def test_not_a_delta(pair: Pair, run: Run) -> None:
    for path in (pair.base / "model.safetensors", pair.base / "config.json"):
        result = run("inspect", path, "--json")
        assert result.exit_code == 3
        assert str(path) in result.stderr


def test_missing_files(pair: Pair, tmp_path: Path, run: Run) -> None:
    nothing = tmp_path / "nothing"
    for arguments in (
        ["diff", nothing, pair.new, "-o", tmp_path / "out"],
        ["diff", pair.base, nothing, "-o", tmp_path / "out"],
        ["diff", pair.base, pair.new, "-o", nothing / "out"],
        ["apply", nothing, pair.delta, "-o", tmp_path / "out"],
        ["apply", pair.base, nothing, "--in-place"],
        ["inspect", nothing],
        ["verify", nothing],
        ["verify", pair.delta, "--base", nothing],
    ):
        result = run(*arguments, "--json")
        assert result.exit_code == 5
        assert read_json(result)["error"]["code"] == "not-found"
        assert result.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_out_exists(pair: Pair, run: Run) -> None:
    before = read_files(pair.new)
    result = run("apply", pair.base, pair.delta, "-o", pair.new, "--json")
    assert result.exit_code == 5
    assert read_json(result)["error"]["code"] == "already-exists"
    assert read_files(pair.new) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["unpack"],
        ["inspect"],
        ["inspect", "a.tw", "--frobnicate"],
        ["diff", "a", "b"],
        ["diff", "a", "b", "-o", "c", "--workers", "0"],
        ["diff", "a", "b", "-o", "c", "--zstd-level", "20"],
        ["verify", "a.tw", "--workers", "0"],
        ["inspect", "a.tw", "--top", "-1"],
    ],
)
def test_wrong_usage(arguments: list[str], run: Run) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_interrupted_diff_leaves_nothing(
    pair: Pair, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings = names_in(tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "fsync", interrupt)
    result = run("diff", pair.base, pair.new, "-o", tmp_path / "out.tw")
    assert result.exit_code == 130
    assert names_in(tmp_path) == siblings


def test_interrupted_apply_leaves_nothing(
    pair: Pair, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings, before = names_in(tmp_path), read_files(pair.base)

    def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(os, "fsync", interrupt)
    for target in (["-o", tmp_path / "out"], ["--in-place"]):
        assert run("apply", pair.base, pair.delta, *target).exit_code == 130
        assert names_in(tmp_path) == siblings
        assert read_files(pair.base) == before
