from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import (
    Checkpoint,
    apply_checkpoint,
    apply_in_place,
    diff_checkpoint,
    verify_base,
)
from thinwire.codec.delta import Delta
from thinwire.errors import (
    AlreadyExists,
    BaseMismatch,
    ChecksumMismatch,
    FormatError,
    InvalidArgument,
    NotFound,
    TensorMismatch,
    Truncated,
)

from .making import (
    MIXED,
    MIXED_NEW,
    index,
    names_in,
    pack,
    read_folder,
    stepped,
    tensor,
    write_folder,
)


def check_both_ways(tmp_path: Path, base: Path, new: Path) -> Delta:
    """diff, apply and apply in place give NEW exactly; returns the opened delta."""
    delta = tmp_path / "delta.tw"
    diff_checkpoint(base, new, delta)
    verify_base(base, delta)
    apply_checkpoint(base, delta, tmp_path / "out", workers=2)
    assert read_folder(tmp_path / "out") == read_folder(new)
    apply_in_place(base, delta)
    left_over = {".thinwire-left-over"} & {path.name for path in base.iterdir()}
    assert read_folder(base).keys() - left_over == read_folder(new).keys()
    assert read_folder(base).items() >= read_folder(new).items()
    return Delta.open(delta)


@pytest.mark.parametrize("pad", [8, 1, 3])
def test_mixed_dtypes(pad: int, tmp_path: Path) -> None:
    base = write_folder(tmp_path / "a", {"model.safetensors": pack(MIXED, pad=pad)})
    new = write_folder(tmp_path / "b", {"model.safetensors": pack(MIXED_NEW, pad=pad)})
    delta = check_both_ways(tmp_path, base, new)
    assert {entry.kind for entry in delta.tensors.values()} == {"delta", "same"}
    assert not any(delta.is_carried(attachment) for attachment in delta.attachments)


def test_nothing_changed(tmp_path: Path) -> None:
    files = {"model.safetensors": pack(MIXED), "config.json": "{}", "empty.txt": ""}
    base = write_folder(tmp_path / "a", files)
    delta = check_both_ways(tmp_path, base, write_folder(tmp_path / "b", files))
    assert {entry.kind for entry in delta.tensors.values()} == {"same"}


def test_single_files_under_any_name(tmp_path: Path) -> None:
    base, new = tmp_path / "step_1.safetensors", tmp_path / "step_2.safetensors"
    base.write_bytes(pack(MIXED, {"step": "1"}))
    new.write_bytes(pack(MIXED_NEW, {"step": "2"}))
    diff_checkpoint(base, new, tmp_path / "d.tw")
    apply_checkpoint(base, tmp_path / "d.tw", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == new.read_bytes()
    apply_in_place(base, (tmp_path / "d.tw").read_bytes())
    assert base.read_bytes() == new.read_bytes()
    assert names_in(tmp_path) == ["d.tw", "out", base.name, new.name]


def test_a_file_becomes_a_folder_and_back(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(pack(MIXED))
    folder = write_folder(
        tmp_path / "f", {"model.safetensors": pack(MIXED_NEW), "config.json": "{}"}
    )
    diff_checkpoint(file, folder, tmp_path / "there.tw")
    diff_checkpoint(folder, file, tmp_path / "back.tw")
    apply_checkpoint(file, tmp_path / "there.tw", tmp_path / "f2")
    assert read_folder(tmp_path / "f2") == read_folder(folder)
    apply_checkpoint(folder, tmp_path / "back.tw", tmp_path / "one2")
    assert (tmp_path / "one2").read_bytes() == file.read_bytes()
    for checkpoint, delta in ((file, "there.tw"), (folder, "back.tw")):
        with pytest.raises(InvalidArgument, match="new path"):
            apply_in_place(checkpoint, tmp_path / delta)


def test_tensors_added_removed_reshaped_and_of_another_dtype(tmp_path: Path) -> None:
    old = {
        "stays": tensor("BF16", [100], 1),
        "gone": tensor("BF16", [5], 2),
        "reshaped": tensor("F32", [2, 3], 3),
        "cast": tensor("F32", [4], 4),
        "grown": tensor("U8", [4], 5),
    }
    later = {
        "cast": tensor("BF16", [4], 6),
        "added": tensor("I32", [2], 7),
        "grown": tensor("U8", [9], 8),
        "stays": stepped(old["stays"]),
        "reshaped": ("F32", [3, 2], old["reshaped"][2]),
    }
    base = write_folder(tmp_path / "a", {"model.safetensors": pack(old)})
    new = write_folder(tmp_path / "b", {"model.safetensors": pack(later)})
    delta = check_both_ways(tmp_path, base, new)
    kinds = {name: entry.kind for name, entry in delta.tensors.items()}
    full = dict.fromkeys(("cast", "added", "grown", "reshaped"), "full")
    assert kinds == {"stays": "delta", "gone": "removed", **full}


def test_shards_move_and_other_files_change(tmp_path: Path) -> None:
    names = list(MIXED)
    old = {
        "model-1.safetensors": {name: MIXED[name] for name in names[:3]},
        "model-2.safetensors": {name: MIXED[name] for name in names[3:]},
    }
    later = {
        "model-2.safetensors": {name: MIXED_NEW[name] for name in names[:6]},
        "model-3.safetensors": {name: MIXED_NEW[name] for name in names[6:]},
    }
    base = write_folder(
        tmp_path / "a",
        {
            **{name: pack(tensors, {"step": "1"}) for name, tensors in old.items()},
            "model.safetensors.index.json": index(old),
            "tokenizer.json": "old" * 1000,
            "merges.txt": "same",
            "added_tokens.json": "gone in new",
            ".thinwire-left-over": "hidden, none of ours",
        },
    )
    new = write_folder(
        tmp_path / "b",
        {
            **{name: pack(tensors, {"step": "2"}) for name, tensors in later.items()},
            "model.safetensors.index.json": index(later),
            "tokenizer.json": "new" * 1000,
            "merges.txt": "same",
            "chat_template.jinja": "",
            ".hidden": "travels too",
        },
    )
    delta = check_both_ways(tmp_path, base, new)
    carried = {a.name for a in delta.attachments if delta.is_carried(a)}
    assert carried == {*later, "model.safetensors.index.json", "tokenizer.json"} | {
        "chat_template.jinja",
        ".hidden",
    }
    assert not (base / "added_tokens.json").exists()


@pytest.mark.parametrize("changed", ["metadata", "tokenizer"])
def test_only_a_little_changed(changed: str, tmp_path: Path) -> None:
    files = {"model.safetensors": pack(MIXED, {"step": "1"}), "tokenizer.json": "1"}
    base = write_folder(tmp_path / "a", files)
    if changed == "metadata":
        files["model.safetensors"] = pack(MIXED, {"step": "20"})
    else:
        files["tokenizer.json"] = "2"
    check_both_ways(tmp_path, base, write_folder(tmp_path / "b", files))


DTYPES = st.sampled_from(["BF16", "F16", "F32", "F64", "U8", "I32", "I64", "F8_E5M2", "BOOL"])
TENSORS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        tensor, DTYPES, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(0, 2)
    ),
    max_size=5,
)


@given(TENSORS, TENSORS, st.booleans(), st.booleans())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_two_checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
    old: dict[str, tuple[str, tuple[int, ...], bytes]],
    later: dict[str, tuple[str, tuple[int, ...], bytes]],
    split: bool,
    stepwise: bool,
) -> None:
    root = tmp_path_factory.mktemp("any")
    if stepwise:
        later = {**later, **{name: stepped(value) for name, value in old.items()}}
    names = list(later)
    cut = len(names) // 2 if split else 0
    base = write_folder(root / "a", {"m.safetensors": pack(old)})
    files = {"m.safetensors": pack({name: later[name] for name in names[cut:]})}
    if cut:
        files["n.safetensors"] = pack({name: later[name] for name in names[:cut]})
    check_both_ways(root, base, write_folder(root / "b", files))


def test_same_bytes_for_any_number_of_threads(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    diff_checkpoint(base, new, delta.with_name("e.tw"), workers=4)
    assert delta.with_name("e.tw").read_bytes() == delta.read_bytes()


def test_progress_adds_up(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    raw_bytes = sum(t.data.size for t in Checkpoint.open(new).tensors.values())
    for act in (
        lambda on_bytes: diff_checkpoint(base, new, delta, overwrite=True, on_bytes=on_bytes),
        lambda on_bytes: apply_checkpoint(base, delta, base.with_name("o"), on_bytes=on_bytes),
        lambda on_bytes: verify_base(base, delta, on_bytes=on_bytes),
        lambda on_bytes: apply_in_place(base, delta, on_bytes=on_bytes),
    ):
        seen: list[int] = []
        act(seen.append)
        assert sum(seen) == raw_bytes


def test_existing_targets_are_left_alone(pair: tuple[Path, Path, Path]) -> None:
    base, new, delta = pair
    before = delta.read_bytes()
    with pytest.raises(AlreadyExists):
        diff_checkpoint(base, new, delta)
    (dangling := delta.with_name("dangling")).symlink_to("nowhere")
    with pytest.raises(InvalidArgument, match="outside"):
        diff_checkpoint(base, new, new / "d.tw")
    for target in (new, delta, dangling):
        with pytest.raises(AlreadyExists):
            apply_checkpoint(base, delta, target)
    assert delta.read_bytes() == before
    diff_checkpoint(new, base, delta, overwrite=True)
    assert delta.read_bytes() != before


def test_missing_folders(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, new, delta = pair
    with pytest.raises(NotFound):
        diff_checkpoint(base, new, tmp_path / "no" / "d.tw")
    with pytest.raises(NotFound):
        apply_checkpoint(base, delta, tmp_path / "no" / "out")
    with pytest.raises(NotFound):
        apply_checkpoint(tmp_path / "no", delta, tmp_path / "out")
    with pytest.raises(NotFound):
        apply_checkpoint(base, tmp_path / "no", tmp_path / "out")


def spoil_weights(base: Path, new: Path) -> None:
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (base / "model.safetensors").write_bytes(data)


def lose_a_file(base: Path, new: Path) -> None:
    (base / "x.txt").unlink()


def change_a_file(base: Path, new: Path) -> None:
    (base / "x.txt").write_text("y")


def rename_weights(base: Path, new: Path) -> None:
    (base / "model.safetensors").rename(base / "other.safetensors")


def change_metadata(base: Path, new: Path) -> None:
    (base / "model.safetensors").write_bytes(pack(MIXED, {"another": "header"}))


def lose_a_tensor(base: Path, new: Path) -> None:
    tensors = {name: value for name, value in MIXED.items() if name != "ids"}
    (base / "model.safetensors").write_bytes(pack(tensors))


def reshape_a_tensor(base: Path, new: Path) -> None:
    tensors = {**MIXED, "w": ("BF16", [30, 40], MIXED["w"][2])}
    (base / "model.safetensors").write_bytes(pack(tensors))


def add_a_tensor(base: Path, new: Path) -> None:
    (base / "more.safetensors").write_bytes(pack({"more": tensor("U8", [1])}))


@pytest.mark.parametrize(
    ("spoil", "error", "word"),
    [
        (spoil_weights, BaseMismatch, "half"),
        (lose_a_file, BaseMismatch, "x.txt"),
        (change_a_file, BaseMismatch, "x.txt"),
        (rename_weights, BaseMismatch, "model.safetensors"),
        (change_metadata, BaseMismatch, "header"),
        (lose_a_tensor, TensorMismatch, "ids"),
        (reshape_a_tensor, TensorMismatch, "40, 30"),
        (add_a_tensor, TensorMismatch, "more"),
    ],
)
def test_wrong_base(
    spoil: Callable[[Path, Path], None],
    error: type[Exception],
    word: str,
    pair: tuple[Path, Path, Path],
) -> None:
    base, new, delta = pair
    spoil(base, new)
    before, siblings = read_folder(base), names_in(base.parent)
    for act in (
        lambda: verify_base(base, delta),
        lambda: apply_checkpoint(base, delta, base.with_name("out")),
        lambda: apply_in_place(base, delta),
    ):
        with pytest.raises(error, match=word):
            act()
        assert read_folder(base) == before
        assert names_in(base.parent) == siblings


def test_damaged_delta(pair: tuple[Path, Path, Path]) -> None:
    base, _, delta = pair
    whole = delta.read_bytes()
    before, siblings = read_folder(base), names_in(base.parent)
    for size in (0, 1, 39, 100, len(whole) - 1):
        with pytest.raises(Truncated):
            apply_checkpoint(base, whole[:size], base.with_name("out"))
    for at in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[at] ^= 16
        for act in (lambda data: apply_checkpoint(base, data, base.with_name("out")),):
            with pytest.raises(FormatError):
                act(bytes(flipped))
        with pytest.raises(FormatError):
            apply_in_place(base, bytes(flipped))
    assert read_folder(base) == before
    assert names_in(base.parent) == siblings


def test_result_that_is_not_what_the_delta_says(
    pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, _, delta = pair
    monkeypatch.setattr("thinwire.codec.delta.decode_chunk", lambda *args: 0)
    with pytest.raises(ChecksumMismatch):
        apply_checkpoint(base, delta, base.with_name("out"))
    assert names_in(base.parent) == ["a", "b", "d.tw"]
