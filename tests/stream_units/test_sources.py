"""What a trainer can publish, and that followers hold exactly that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from thinwire.checkpoint import Checkpoint
from thinwire.errors import InvalidArgument, TensorMismatch, ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.publish.source import FileSource, open_source

from .making import (
    DTYPES,
    Arrays,
    DictStore,
    HookStore,
    bits,
    held,
    history,
    joined,
    model,
    publisher,
    small_files,
    stepped,
    tiny,
    write_folder,
    write_safetensors,
)


class Pair:
    """A publisher and a follower of one store."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = DictStore()
        self.folder = folder
        self.trainer = publisher(self.store, folder / "baseline", **options)
        self.follower = Follower(open_stream(self.store), folder / "sink")

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.close()
        self.follower.close()

    def publish(self, source: Any, **facts: Any) -> Any:
        """Publish and follow."""
        version = self.trainer.publish(source, **facts)
        assert self.follower.catch_up() == version
        return version

    def check(self, wanted: Mapping[str, Any]) -> None:
        """Both folders, and whoever joins now, hold the same."""
        assert held(self.folder / "sink") == bits(wanted)
        assert held(self.folder / "baseline") == bits(wanted)


def test_every_step_of_a_mapping(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        for step, arrays in enumerate(history(4)):
            version = pair.publish(arrays, step=10 * step, metadata={"reward": 0.5 * step})
            assert (version.step, version.metadata) == (10 * step, {"reward": 0.5 * step})
            pair.check(arrays)


def test_bfloat16(tmp_path: Path) -> None:
    """With bits that no float comparison would tell apart."""
    words = np.arange(1 << 16, dtype=np.uint16)
    with Pair(tmp_path) as pair:
        for order in (words, words[::-1].copy(), words ^ 0x8000):
            arrays = {"w": order.view(ml_dtypes.bfloat16)}
            pair.publish(arrays)
            pair.check(arrays)


def test_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    weight = torch.randn(300, 250).to(torch.bfloat16)
    state = {"w": weight, "tied": weight, "t": torch.randn(30, 40).t(), "n": torch.tensor(3)}
    with Pair(tmp_path) as pair:
        for _ in range(2):
            pair.publish(state)
            wanted = {
                "w": weight.view(torch.uint16).numpy().view(ml_dtypes.bfloat16),
                "tied": weight.view(torch.uint16).numpy().view(ml_dtypes.bfloat16),
                "t": state["t"].contiguous().numpy(),
                "n": state["n"].numpy(),
            }
            pair.check(wanted)
            weight += 1


def test_views_that_are_not_contiguous(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(0, 1, (60, 50)).astype(np.float32)
    with Pair(tmp_path) as pair:
        for _ in range(2):
            views = {"t": whole.T, "s": whole[::3, ::2], "b": whole[::-1], "e": whole[:0]}
            pair.publish(views)
            pair.check({name: np.ascontiguousarray(view) for name, view in views.items()})
            whole[7] += 1


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    arrays = {"a": np.float32(1.5).reshape(()), "b": np.zeros((0, 5), np.float16)}
    with Pair(tmp_path) as pair:
        pair.publish(arrays)
        pair.check(arrays)
        arrays = arrays | {"a": np.float32(-0.0).reshape(())}
        pair.publish(arrays)
        pair.check(arrays)


def test_order_of_names_does_not_matter(tmp_path: Path) -> None:
    arrays = model()
    with Pair(tmp_path) as pair:
        first = pair.publish(arrays)
        second = pair.publish(dict(reversed(arrays.items())))
        assert second.weights == first.weights
        assert second.changed_count == 0
        pair.check(arrays)


def test_nothing_changed(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        first = pair.publish(model())
        second = pair.publish(model(), step=2)
        assert (second.version, second.changed_count, second.weights) == (2, 0, first.weights)
        assert second.payload_bytes < 2000
        pair.check(model())


def test_several_optimizer_steps_between_two_publishes(tmp_path: Path) -> None:
    """Changed, and changed elsewhere, and changed back: what counts is the last version."""
    versions = history(4)
    with Pair(tmp_path) as pair:
        pair.publish(versions[0])
        pair.publish(versions[3])
        pair.check(versions[3])
        assert pair.publish(versions[0]).version == 3
        pair.check(versions[0])


def test_counts(tmp_path: Path) -> None:
    arrays = tiny()
    changed = {"w": arrays["w"].copy()}
    changed["w"].view(np.uint16)[[3, 5, 300]] ^= 0x8000
    with Pair(tmp_path) as pair:
        first = pair.publish(arrays)
        assert (first.raw_bytes, first.word_count, first.changed_count) == (800, 400, 0)
        second = pair.publish(changed)
        assert (second.raw_bytes, second.word_count, second.changed_count) == (800, 400, 3)
        assert second.payload_bytes == sum(
            len(data) for key, (data, _) in pair.store.objects.items() if "/deltas/" in key
        )


def without(arrays: Arrays, name: str) -> Arrays:
    return {key: array for key, array in arrays.items() if key != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: without(a, "norm"), "'norm' is missing"),
        (lambda a: a | {"more": a["norm"]}, "'more' is new"),
        (lambda a: a | {"norm": a["norm"].reshape(7, 11)}, "F16 [7, 11]"),
        (lambda a: a | {"norm": a["norm"].astype(np.float32)}, "F32 [77]"),
        (lambda a: a | {"norm": a["norm"].view(np.int16)}, "I16 [77]"),
        (lambda a: without(a, "norm") | {"Norm": a["norm"]}, "'norm' is missing"),
    ],
)
def test_other_tensors_are_refused_and_nothing_is_published(
    change: Any, says: str, tmp_path: Path
) -> None:
    versions = history(2)
    with Pair(tmp_path) as pair:
        pair.publish(versions[0])
        before = pair.store.find()
        with pytest.raises(TensorMismatch) as caught:
            pair.trainer.publish(change(versions[1]))
        assert says in str(caught.value)
        assert pair.store.find() == before
        assert pair.trainer.head is not None
        assert pair.trainer.head.version == 1
        assert pair.publish(versions[1]).version == 2
        pair.check(versions[1])


@pytest.mark.parametrize(
    "source", [{}, {1: np.zeros(3)}, {"w": "text"}, {"w": object()}, 5, None, [np.zeros(3)]]
)
def test_sources_that_are_none(source: Any, tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        with pytest.raises(ThinwireError):
            pair.trainer.publish(source)
        assert pair.store.find("manifests") == []


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        (tmp_path / "empty").mkdir()
        for source in (tmp_path / "nowhere", tmp_path / "empty", str(tmp_path)):
            with pytest.raises(ThinwireError):
                pair.trainer.publish(source)
        assert pair.store.find("manifests") == []


# Checkpoint folders, whose layout may change


def test_a_folder_of_every_change(tmp_path: Path) -> None:
    """Tensors and files come, change and go; headers and dtypes change; files are split."""
    arrays = model()
    steps: list[dict[str, Any]] = []
    steps.append({"model": arrays, "config_json": b"{}", "vocab_txt": b"words", "empty_txt": b""})
    arrays = stepped(arrays, 1)
    steps.append(steps[0] | {"model": arrays})
    steps.append(steps[1] | {"config_json": b'{"a": 1}'})
    arrays = stepped(arrays, 2) | {"more": np.ones(9, np.float32)}
    steps.append(steps[2] | {"model": arrays, "notes_txt": b"new"})
    arrays = stepped(without(arrays, "norm"), 3)
    steps.append(steps[3] | {"model": arrays})
    half = {"layers.0.weight": arrays["layers.0.weight"]}
    rest = without(arrays, "layers.0.weight")
    steps.append({"a": half, "b": rest, "config_json": b"{}"})
    steps.append({"a": half, "b": stepped(rest, 4), "config_json": b"{}"})
    rest = stepped(rest, 5) | {"scale": rest["scale"].astype(np.float16)}
    steps.append({"a": half | rest, "empty_txt": b""})
    with Pair(tmp_path) as pair:
        for number, files in enumerate(steps):
            folder = write_folder(tmp_path / str(number), **files)
            pair.publish(folder)
            tensors: dict[str, Any] = {}
            for content in files.values():
                tensors |= content if isinstance(content, dict) else {}
            pair.check(tensors)
            for name in ("sink", "baseline"):
                assert small_files(tmp_path / name) == small_files(folder)
        for number in (1, 4, 6, 8):
            joined(pair.store, tmp_path / f"joined-{number}", number)
            folder = tmp_path / str(number - 1)
            assert held(tmp_path / f"joined-{number}") == held(folder)
            assert small_files(tmp_path / f"joined-{number}") == small_files(folder)


def test_headers_are_kept_to_the_byte(tmp_path: Path) -> None:
    """Metadata and the order of tensors are part of a file."""
    arrays = model()
    with Pair(tmp_path) as pair:
        for number, (order, metadata) in enumerate(
            [(1, None), (1, {"step": "1"}), (-1, {"step": "1"}), (1, {"step": "é"})]
        ):
            folder = tmp_path / str(number)
            folder.mkdir()
            path = folder / "model.safetensors"
            write_safetensors(path, dict([*arrays.items()][::order]), metadata)
            pair.publish(folder)
            assert (tmp_path / "sink" / "model.safetensors").read_bytes() == path.read_bytes()


def test_mappings_and_folders_may_take_turns(tmp_path: Path) -> None:
    versions = history(3)
    folder = write_folder(tmp_path / "folder", model=versions[0], config_json=b"{}")
    with Pair(tmp_path) as pair:
        pair.publish(folder)
        pair.publish(versions[1])
        pair.check(versions[1])
        assert small_files(tmp_path / "sink") == {"config.json": b"{}"}
        pair.publish(write_folder(tmp_path / "next", model=versions[2]))
        pair.check(versions[2])
        assert small_files(tmp_path / "sink") == {}


def test_single_files(tmp_path: Path) -> None:
    versions = history(2)
    with Pair(tmp_path) as pair:
        for number, arrays in enumerate(versions):
            path = write_safetensors(tmp_path / f"{number}.safetensors", arrays, {"format": "pt"})
            pair.publish(path)
            pair.check(arrays)
        more = versions[1] | {"more": versions[1]["norm"]}
        with pytest.raises(TensorMismatch):
            pair.trainer.publish(write_safetensors(tmp_path / "more.safetensors", more))


def test_tied_names_are_kept(tmp_path: Path) -> None:
    """Two names for one array: both are there after every update, and both are right."""
    embedding = np.random.default_rng(0).normal(0, 0.02, (700, 100)).astype(np.float16)
    with Pair(tmp_path) as pair:
        for _ in range(3):
            arrays = {"embed.weight": embedding, "lm_head.weight": embedding}
            pair.publish(arrays)
            pair.check(arrays)
            embedding.view(np.uint16)[::7] ^= 1


def test_hostile_and_unusual_tensor_names(tmp_path: Path) -> None:
    """A name is never a path."""
    names = ["../../evil", "/abs", "a/b", "é", "日本", " ", "x" * 200, ".hidden", "__metadata"]
    arrays = {name: np.full(5, n, np.float32) for n, name in enumerate(names)}
    with Pair(tmp_path) as pair:
        pair.publish(arrays)
        pair.publish(stepped(arrays, 1))
        pair.check(stepped(arrays, 1))
    assert {path.name for path in tmp_path.iterdir()} == {"baseline", "sink"}


# Sources that change meanwhile


@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_source_that_changes_is_not_published(
    kind: str, is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone writes the checkpoint while it is read: no torn version."""
    versions = history(3)
    folder = write_folder(tmp_path / "source", model=versions[1])
    path = folder / "model.safetensors"

    def touch(original: Any) -> Any:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            write_safetensors(path, versions[2])
            return result

        return wrapper

    with Pair(tmp_path) as pair:
        if not is_first:
            pair.publish(versions[0])
        with monkeypatch.context() as patch:
            from thinwire.publish import making, source

            patch.setattr(making, "write_shards", touch(making.write_shards))
            patch.setattr(source, "_copy", touch(source._copy))
            patch.setattr(source, "_write_safetensors", touch(source._write_safetensors))
            with pytest.raises(InvalidArgument, match="changed"):
                pair.trainer.publish(folder if kind == "folder" else path)
        assert len(pair.store.find("manifests")) == (0 if is_first else 1)
        pair.publish(folder)
        pair.check(versions[2])


def test_sources_are_told_apart(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", tiny())
    assert isinstance(open_source(path), FileSource)
    assert DTYPES["float16"] == Checkpoint.open(path).tensors["w"].dtype


# What travels along


@pytest.mark.parametrize(
    "facts",
    [
        {"metadata": {"a": float("nan")}},
        {"metadata": {"a": "x" * 20_000}},
        {"metadata": {"a": object()}},
        {"step": 1.5},
        {"step": True},
        {"step": 2**63},
        {"step": "1"},
    ],
)
def test_facts_that_are_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    with Pair(tmp_path) as pair:
        with pytest.raises(InvalidArgument):
            pair.trainer.publish(tiny(), **facts)
        assert pair.store.find("manifests") == []


def test_facts_arrive(tmp_path: Path) -> None:
    metadata = {"text": "é" * 3000, "deep": [{"a": [1, None, -2.5e-300]}], "": 2**60}
    with Pair(tmp_path) as pair:
        for step in (-(2**61), 0, 2**61, None):
            version = pair.publish(tiny(), step=step, metadata=metadata)
            assert (version.step, version.metadata) == (step, metadata)
            assert pair.follower.version() == version


# Several shards


def test_several_shards_are_one_version(tmp_path: Path) -> None:
    """They are applied together or not at all."""
    versions = history(3)
    with Pair(tmp_path, shard_raw_bytes=1000) as pair:
        for arrays in versions[:2]:
            pair.publish(arrays)
            pair.check(arrays)
        pair.trainer.publish(versions[2])
        shards = pair.store.find("000000000002-000000000003/")
        assert len(shards) == 3
        data, at = pair.store.objects[shards[2]]
        pair.store.objects[shards[2]] = (data[:-1] + b"x", at)
        with pytest.raises(ThinwireError):
            pair.follower.catch_up()
        assert held(tmp_path / "sink") == bits(versions[1])
        pair.store.objects[shards[2]] = (data, at)
        pair.follower.catch_up()
        pair.check(versions[2])


def test_shards_of_a_changing_layout(tmp_path: Path) -> None:
    arrays = model()
    with Pair(tmp_path, shard_raw_bytes=1000) as pair:
        for number, one in enumerate(
            [arrays, stepped(arrays, 1) | {"x": np.ones(700)[:0].astype(np.float32)}, arrays]
        ):
            folder = write_folder(tmp_path / str(number), model=one, config_json=b"%d" % number)
            pair.publish(folder)
            pair.check(one)


# The commit


def test_the_baseline_moves_after_the_commit(tmp_path: Path) -> None:
    """Seen from the very moment of the commit, and from a commit that failed."""
    versions = history(3)
    seen: list[dict[str, str]] = []
    fail = False

    def before(operation: str, key: str) -> None:
        if operation == "put_if_absent" and "/manifests/" in key:
            seen.append(held(tmp_path / "baseline"))
            if fail:
                raise ConnectionError("the process is in trouble")

    store = DictStore()
    with publisher(HookStore(store, before), tmp_path / "baseline") as trainer:
        for arrays in versions[:2]:
            trainer.publish(arrays)
        fail = True
        with pytest.raises(ConnectionError):
            trainer.publish(versions[2])
        assert held(tmp_path / "baseline") == bits(versions[1])
        fail = False
        assert trainer.publish(versions[2]).version == 3
    assert seen == [{}, bits(versions[0]), bits(versions[1]), bits(versions[1])]
    assert held(tmp_path / "baseline") == bits(versions[2])
    assert joined(store, tmp_path / "sink") == bits(versions[2])


def test_objects_come_before_the_manifest(tmp_path: Path) -> None:
    """At the moment of the commit everything that it names is there."""
    store = DictStore()
    order: list[str] = []

    def note(operation: str, key: str) -> None:
        if operation.startswith("put"):
            order.append(f"{operation} {key.split('/')[1] if '/' in key else key}")

    with publisher(HookStore(store, note), tmp_path / "baseline", shard_raw_bytes=1000) as trainer:
        order.clear()
        trainer.publish(model())
        assert order == ["put_file anchors", "put_if_absent manifests", "put head.json"]
        order.clear()
        trainer.publish(stepped(model(), 1))
    assert order == ["put_file deltas"] * 3 + ["put_if_absent manifests", "put head.json"]


def test_another_model_is_refused(tmp_path: Path) -> None:
    """One wrong path must not turn a whole fleet into another model."""
    store = DictStore()
    with publisher(open_stream(store), tmp_path / "baseline") as trainer:
        trainer.publish({"a": np.zeros(9000, np.float32), "b": np.ones(9, np.float32)})
        save_file({"z": np.zeros(9000, np.float32)}, tmp_path / "other.safetensors")
        (tmp_path / "other").mkdir()
        save_file({"z": np.zeros(9000, np.float32)}, tmp_path / "other" / "model.safetensors")
        for other in ("other", "other.safetensors"):
            with pytest.raises(TensorMismatch):
                trainer.publish(tmp_path / other)
        assert trainer.publish({"a": np.ones(9000, np.float32), "b": np.ones(9, np.float32)})
        assert trainer.head is not None
        assert trainer.head.version == 2
