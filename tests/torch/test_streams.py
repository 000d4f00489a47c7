"""How streams begin, go on, and end: references, files, restarts, rivals and keys."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch
from torch import nn

from thinwire import Follower, SigningKey, fsck, open_stream
from thinwire.errors import (
    CommitConflict,
    Fenced,
    InvalidArgument,
    LimitExceeded,
    LineageChanged,
    NotFound,
    SignatureInvalid,
    TensorMismatch,
    Unavailable,
)
from thinwire.torch import TorchPublisher

from .making import held_in
from .training import BF16, Small, Stand, done, nudge, row, rows_of, wait_until


def save(folder: Path, tensors: Mapping[str, torch.Tensor], files: int = 1) -> Path:
    """A Hugging Face folder, by safetensors itself."""
    from safetensors.torch import save_file

    folder.mkdir()
    names = list(tensors)
    places = {}
    for number in range(files):
        name = "model.safetensors"
        if files > 1:
            name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = {n: tensors[n].contiguous() for n in names[number::files]}
        places.update(dict.fromkeys(part, name))
        save_file(part, str(folder / name), {"format": "pt"})
    if files > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "small"}')
    return folder


class TestReference:
    def uploaded_bytes(self, stand: Stand) -> int:
        return sum(entry.size_bytes for entry in stand.store.list(""))

    @pytest.mark.parametrize("files", [1, 2])
    def test_a_folder_that_both_sides_have(self, stand: Stand, files: int) -> None:
        """Only digests travel; the frozen tensors stay as they are, and everything verifies."""
        model = Small().to(BF16)
        model.embed.requires_grad_(False)
        folder = save(stand.folder / "base", dict(model.named_parameters()), files)
        publisher = stand.publisher(model, reference=str(folder), exclude=["embed.*"])
        head = publisher.head
        assert head is not None
        assert (head.version, head.kind, head.step) == (1, "reference", None)
        assert self.uploaded_bytes(stand) < 10_000
        assert publisher.baseline_bytes < 50_000, "of what is published, and no more"
        frozen = rows_of(model)["embed.weight"]
        follower = stand.follower(base=folder)
        for step in range(1, 4):
            nudge(model.layers, step)
            with torch.no_grad():
                model.embed.weight.add_(1)  # nobody is told
            version = done(publisher.publish(step))
            assert (version.version, version.kind) == (step + 1, "delta")
            assert follower.catch_up() == version
            assert held_in(stand.folder / "f") == {**rows_of(model), "embed.weight": frozen}
            assert (stand.folder / "f" / "config.json").read_text() == '{"model_type": "small"}'
        follower.close()
        stand.check_whole(base=folder)

    def test_going_on_from_a_reference(self, stand: Stand) -> None:
        """From the first version, and from a later one; the copy is found by its name again."""
        model = Small().to(BF16)
        folder = save(stand.folder / "base", dict(model.named_parameters()))
        stand.publisher(model, reference=str(folder)).close()
        for step in range(1, 3):
            nudge(model, step)
            publisher = stand.publisher(model, reference=str(folder))
            assert done(publisher.publish(step)).version == step + 1
            publisher.close()
        assert stand.held(base=folder) == rows_of(model)

    def test_no_copy_of_it(self, stand: Stand) -> None:
        with pytest.raises(NotFound):
            stand.publisher(Small(), reference="hf://org/name@0123456789abcdef")

    def test_another_model(self, stand: Stand) -> None:
        """It is said which tensor is not there, and on which side."""
        model = Small().to(BF16)
        tensors = dict(model.named_parameters())
        folder = save(stand.folder / "base", {**tensors, "more": torch.ones(3)})
        with pytest.raises(TensorMismatch, match=r"'more'.*exclude"):
            stand.publisher(model, reference=str(folder))
        with pytest.raises(TensorMismatch, match=r"'embed\.weight'.*F32.*BF16"):
            stand.publisher(model, dtype=torch.float32, reference=str(folder), exclude=["more"])
        model.extra = nn.Parameter(torch.ones(3))
        with pytest.raises(TensorMismatch, match=r"'extra'.*not in the stream"):
            stand.publisher(model, reference=str(folder), exclude=["more"])

    def test_a_trainer_that_begins_with_other_weights(self, stand: Stand) -> None:
        """Its first delta says how they differ."""
        model = Small().to(BF16)
        folder = save(stand.folder / "base", dict(model.named_parameters()))
        nudge(model)
        publisher = stand.publisher(model, reference=str(folder))
        done(publisher.publish(0))
        assert stand.held(base=folder) == rows_of(model)


class Adapter(nn.Module):
    """As PEFT wraps a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base_layer = nn.Linear(64, 64).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(64, 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, 64, bias=False)})


class TestFiles:
    def test_an_adapter_is_a_small_stream_of_its_own(self, stand: Stand) -> None:
        """Under the names that PEFT saves, in the files that it saves."""
        model = nn.ModuleDict({"q_proj": Adapter(), "v_proj": Adapter()})

        def rename(name: str) -> str | None:
            if "lora_" not in name:
                return None
            return f"base_model.model.{name.replace('.default', '')}"

        publisher = stand.publisher(
            model,
            dtype=torch.float32,
            rename=rename,
            weights_name="adapter_model.safetensors",
            files={"adapter_config.json": b'{"peft_type": "LORA"}'},
        )
        for step in range(2):
            done(publisher.publish(step))
            nudge(model, step)
        version = done(publisher.publish(2))
        assert version.raw_bytes == 2 * 2 * 64 * 8 * 4
        with stand.follower() as follower:
            follower.catch_up()
        names = sorted(p.name for p in (stand.folder / "f").iterdir() if p.name[0] != ".")
        assert names == ["adapter_config.json", "adapter_model.safetensors"]
        expected = {}
        for layer, adapter in model.items():
            for letter in "AB":
                weight = getattr(adapter, f"lora_{letter}")["default"].weight
                expected[f"base_model.model.{layer}.lora_{letter}.weight"] = row(weight, None)
        assert held_in(stand.folder / "f") == expected

    def small(self, stand: Stand) -> dict[str, bytes]:
        with stand.follower() as follower:
            follower.catch_up()
        return {
            path.name: path.read_bytes()
            for path in (stand.folder / "f").iterdir()
            if path.is_file() and path.suffix != ".safetensors" and path.name[0] != "."
        }

    def test_of_a_folder(self, stand: Stand, tmp_path: Path) -> None:
        """What lies beside the weights, and neither weights nor folders nor hidden files."""
        folder = tmp_path / "files"
        (folder / "sub").mkdir(parents=True)
        for name in ("tokenizer.json", "chat.jinja", "empty"):
            (folder / name).write_text("" if name == "empty" else name)
        for name in (
            "model.safetensors",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "x.pt",
            ".hidden",
            "sub/inner",
        ):
            (folder / name).write_text("weights")
        model = Small()
        publisher = stand.publisher(model, files=folder)
        done(publisher.publish(0))
        nudge(model)
        done(publisher.publish(1))
        expected = {"tokenizer.json": b"tokenizer.json", "chat.jinja": b"chat.jinja", "empty": b""}
        assert self.small(stand) == expected

    def test_by_name(self, stand: Stand, tmp_path: Path) -> None:
        path = tmp_path / "somewhere.txt"
        path.write_bytes(b"content")
        done(stand.publisher(Small(), files={"a.json": b"{}", "b.txt": path}).publish(0))
        assert self.small(stand) == {"a.json": b"{}", "b.txt": b"content"}

    @pytest.mark.parametrize("dtype", [BF16, torch.float16, None], ids=str)
    def test_the_configuration_of_a_hugging_face_model(
        self, stand: Stand, dtype: torch.dtype | None
    ) -> None:
        """It says the dtype that is published, not the one that is trained in."""
        model: Any = Small()
        model.config = Config('{"model_type": "small", "dtype": "float32"}')
        model.generation_config = Config('{"top_p": 1.0}')
        publisher = stand.publisher(model, files={"tokenizer.json": b"t"}, dtype=dtype)
        done(publisher.publish(0))
        found = self.small(stand)
        assert sorted(found) == ["config.json", "generation_config.json", "tokenizer.json"]
        name = str(dtype or torch.float32).removeprefix("torch.")
        assert json.loads(found["config.json"]) == {"model_type": "small", "dtype": name}
        assert json.loads(found["generation_config.json"]) == {"top_p": 1.0}

    def test_a_configuration_of_one_s_own(self, stand: Stand) -> None:
        model: Any = Small()
        model.config = Config('{"model_type": "small"}')
        done(stand.publisher(model, files={"config.json": b"mine"}).publish(0))
        assert self.small(stand) == {"config.json": b"mine"}

    @pytest.mark.parametrize(
        "name", ["../x", "a/b", "", ".", "x.safetensors", "model.safetensors.index.json", "a\0b"]
    )
    def test_names_that_no_folder_has(self, stand: Stand, name: str) -> None:
        with pytest.raises(InvalidArgument):
            stand.publisher(Small(), files={name: b""})

    @pytest.mark.parametrize("content", ["text", 5, None])
    def test_what_is_no_content(self, stand: Stand, content: Any) -> None:
        with pytest.raises(InvalidArgument, match=r"a\.json"):
            stand.publisher(Small(), files={"a.json": content})

    @pytest.mark.parametrize("name", ["x.bin", "../x.safetensors", "", ".x.safetensors"])
    def test_weights_names_that_there_are_not(self, stand: Stand, name: str) -> None:
        with pytest.raises(InvalidArgument):
            stand.publisher(Small(), weights_name=name)

    def test_a_folder_that_is_missing(self, stand: Stand, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            stand.publisher(Small(), files=tmp_path / "nothing")

    def test_a_file_that_is_not_small(self, stand: Stand, tmp_path: Path) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        with (folder / "huge").open("wb") as file:
            file.truncate((1 << 28) + 1)
        with pytest.raises(LimitExceeded, match="huge"):
            stand.publisher(Small(), files=folder)


class Config:
    """What Hugging Face models have of theirs."""

    def __init__(self, text: str) -> None:
        self.text = text

    def to_json_string(self) -> str:
        return self.text


class TestGoingOn:
    def test_a_restart_with_other_weights(self, stand: Stand) -> None:
        """In the same lineage, by a delta from the head."""
        model = Small()
        first = stand.publisher(model, folder=stand.folder / "own")
        for step in range(3):
            done(first.publish(step))
            nudge(model, step)
        first.close()
        other = Small(seed=5)
        second = stand.publisher(other, folder=stand.folder / "own")
        assert second.head == first.head
        follower = stand.follower()
        follower.catch_up()
        version = done(second.publish(10))
        assert (version.version, version.kind) == (4, "delta")
        assert first.head is not None
        assert version.lineage == first.head.lineage
        assert follower.catch_up() == version
        follower.close()
        assert held_in(stand.folder / "f") == rows_of(other)
        stand.check_whole()

    @pytest.mark.parametrize("has_folder", [False, True])
    def test_from_elsewhere(self, stand: Stand, has_folder: bool) -> None:
        """Without anything of the process before; the copy in a folder is used again."""
        model = Small()
        for step in range(3):
            options = {"folder": stand.folder / "own"} if has_folder else {}
            with stand.publisher(model, **options) as publisher:
                done(publisher.publish(step))
            assert stand.held() == rows_of(model)
            nudge(model, step)
        assert (stand.folder / "own").exists() == has_folder

    def test_a_stream_that_a_plain_publisher_made(self, stand: Stand) -> None:
        from thinwire import Publisher

        model = Small().to(BF16)
        state = {name: t.detach() for name, t in model.named_parameters()}
        with Publisher(open_stream(stand.store), stand.folder / "plain", maintain=False) as plain:
            plain.publish(state, step=0)
        nudge(model)
        publisher = stand.publisher(model)
        done(publisher.publish(1))
        publisher.close()
        assert stand.held() == rows_of(model)
        nudge(model, 2)
        with Publisher(open_stream(stand.store), stand.folder / "plain", maintain=False) as plain:
            plain.publish(state, step=2)
        assert stand.held() == rows_of(model)
        stand.check_whole()

    def test_a_new_lineage(self, stand: Stand) -> None:
        """From older weights; followers are asked whether they want to go along."""
        model = Small()
        old = stand.publisher(model)
        done(old.publish(0))
        nudge(model)
        done(old.publish(1))
        follower = stand.follower(accept_new_lineages=True)
        strict = stand.follower("strict")
        follower.catch_up()
        strict.catch_up()
        before = held_in(stand.folder / "strict")
        older = Small()
        new = stand.publisher(older, new_lineage=True)
        version = done(new.publish(0))
        assert (version.version, version.kind) == (3, "anchor")
        assert old.head is not None
        assert version.lineage != old.head.lineage
        assert follower.catch_up() == version
        assert held_in(stand.folder / "f") == rows_of(older)
        with pytest.raises(LineageChanged):
            strict.catch_up()
        assert held_in(stand.folder / "strict") == before
        nudge(older)
        assert done(new.publish(1)).version == 4
        follower.catch_up()
        assert held_in(stand.folder / "f") == rows_of(older)
        with pytest.raises((Fenced, CommitConflict)):
            old.publish(2).wait(60)
        follower.close()
        strict.close()
        stand.check_whole()

    def test_a_new_lineage_that_failed_at_first(self, stand: Stand) -> None:
        model = Small()
        done(stand.publisher(model).publish(0))
        nudge(model)
        new = stand.publisher(model, new_lineage=True)
        stand.fail("put_file")
        with pytest.raises(Unavailable):
            new.publish(1).wait(60)
        stand.mend()
        with pytest.raises(LineageChanged, match="new_lineage"):
            stand.publisher(model)
        nudge(model, 2)
        assert done(new.publish(2)).version == 2
        assert stand.held() == rows_of(model)

    def test_the_baseline_on_disk(self, stand: Stand) -> None:
        model = Small()
        own = stand.folder / "own"
        with stand.publisher(model, baseline="disk", folder=own) as publisher:
            for step in range(3):
                done(publisher.publish(step))
                assert stand.held() == rows_of(model)
                nudge(model, step)
            assert not (own / "rank0" / "baseline").exists(), "it has no name"
        with stand.publisher(model, baseline="disk", folder=own) as publisher:
            done(publisher.publish(3))
        assert stand.held() == rows_of(model)

    def test_temporary_folders_are_removed(
        self, stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        place = tmp_path / "temporary"
        place.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(place))
        with stand.publisher(Small()) as publisher:
            done(publisher.publish(0))
            assert list(place.iterdir()) != []
        assert list(place.iterdir()) == []
        with pytest.raises(InvalidArgument):
            stand.publisher(Small(), include=["nothing"])
        assert list(place.iterdir()) == []

    def test_anchors_and_merged_deltas_are_made_beside(self, tmp_path: Path) -> None:
        from thinwire import Policy

        model = Small()
        stream = open_stream(str(tmp_path / "s"), policy=Policy(merge_levels=(2,), anchor_every=3))
        with TorchPublisher(model, stream, folder=tmp_path / "own", when_busy="block") as publisher:
            for step in range(5):
                done(publisher.publish(step))
                nudge(model, step)
            store = stream.store
            wait_until(lambda: any("/merges/" in e.key for e in store.list("")))
        report = fsck(open_stream(str(tmp_path / "s")), deep=True)
        assert report.is_whole, report.problems


class TestRivals:
    def test_the_loser_is_told_and_followers_are_fine(self, stand: Stand) -> None:
        model, other = Small(), Small(seed=1)
        first = stand.publisher(model)
        done(first.publish(0))
        second = stand.publisher(other)
        nudge(model)
        winner = done(first.publish(1))
        before = {entry.key for entry in stand.store.list("")}
        lost = second.publish(2)
        with pytest.raises(CommitConflict):
            lost.wait(60)
        assert lost.state == "failed"
        left = {entry.key for entry in stand.store.list("")} - before
        assert left == set(), "what it uploaded is removed"
        with pytest.raises(Fenced):
            second.publish(3).wait(60)
        assert stand.held() == rows_of(model)
        nudge(model, 2)
        assert done(first.publish(4)).version == winner.version + 1
        assert stand.held() == rows_of(model)
        # Opened again, it goes on from there.
        again = stand.publisher(other)
        done(again.publish(5))
        assert stand.held() == rows_of(other)
        stand.check_whole()

    def test_both_make_the_first_version(self, stand: Stand) -> None:
        model, other = Small(), Small(seed=1)
        first, second = stand.publisher(model), stand.publisher(other)
        done(second.publish(0))
        with pytest.raises(CommitConflict):
            first.publish(0).wait(60)
        assert stand.held() == rows_of(other)
        stand.check_whole()


class TestSigned:
    def test_a_signed_stream(self, stand: Stand) -> None:
        key = SigningKey.generate()
        model = Small()
        publisher = stand.publisher(model, stream=open_stream(stand.store, signing_key=key))
        for step in range(2):
            version = done(publisher.publish(step))
            assert version.signer == key.public
            nudge(model, step)
        version = done(publisher.publish(2))
        publisher.close()
        pinned = open_stream(stand.store, trusted_keys=[key.public])
        assert stand.held(stream=pinned) == rows_of(model)
        other = open_stream(stand.store, trusted_keys=[SigningKey.generate().public])
        with pytest.raises(SignatureInvalid):
            stand.held(stream=other)

    def test_without_the_key(self, stand: Stand) -> None:
        key = SigningKey.generate()
        signed = open_stream(stand.store, signing_key=key)
        done(stand.publisher(Small(), stream=signed).publish(0))
        with pytest.raises((InvalidArgument, SignatureInvalid)):
            stand.publisher(Small())


def test_any_store_by_its_url(tmp_path: Path) -> None:
    for url in (f"memory://{tmp_path.name}", tmp_path / "path", f"file://{tmp_path}/url"):
        model = Small()
        with TorchPublisher(model, url, maintain=False) as publisher:
            done(publisher.publish(0))
        folder = tmp_path / "f" / str(abs(hash(str(url))))
        with Follower(url, folder, lease=False) as follower:
            follower.catch_up()
        assert held_in(folder) == rows_of(model)
