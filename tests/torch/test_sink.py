"""A module in place at exactly one version: bits, dtypes, names, restarts, other ways there."""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: TorchSink was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import thinwire
from thinwire import Follower, Maintainer, Publisher, open_stream
from thinwire.errors import BaseUnusable, InvalidArgument, LineageChanged, TensorMismatch
from thinwire.torch import TorchPublisher, TorchSink
from thinwire.torch.sink_places import Content, Spot

from .sinking import addresses, bits, blank, check, following, publish, small
from .training import BF16, Small, Stand, nudge

WAYS: list[dict[str, Any]] = [{}, {"canonical": "none"}, {"_device": True}]


def sink_of(module: nn.Module, way: dict[str, Any], **options: Any) -> TorchSink:
    options = {**{k: v for k, v in way.items() if k != "_device"}, **options}
    found = TorchSink(module, **options)
    # The same code as for a GPU, on the CPU.
    found._swaps_on_host = "_device" not in way
    return found


@pytest.mark.parametrize("way", WAYS, ids=["folder", "none", "device"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float16])
def test_a_module_follows_in_place(stand: Stand, way: dict[str, Any], dtype: torch.dtype) -> None:
    if way.get("canonical") == "none" and dtype != BF16:
        pytest.skip("its bits cannot be decoded against")
    model, held = Small(), small(dtype)
    publisher = stand.publisher(model)
    publish(publisher, model, 0)
    before = addresses(held)
    sink = sink_of(held, way)
    assert sink.version is None
    with following(stand, sink) as follower:
        for seed in range(1, 5):
            found = follower.catch_up()
            check(model, held)
            with sink.reading() as version:
                assert version == found == follower.version()
            assert sink.prove() is True
            assert follower.prove()
            if seed > 1:
                assert sink.last_update is not None
                assert sink.last_update.word_count > 0
            publish(publisher, model, seed, share=0.4 if seed == 3 else 0.01)
        # Over several versions at once, and back.
        publish(publisher, model, 9)
        follower.catch_up()
        check(model, held)
        follower.catch_up(1, reset=True)
        check(Small(), held)
        assert sink.prove()
    assert addresses(held) == before


def test_prove_sees_what_somebody_changed(stand: Stand) -> None:
    model, held = Small(), small()
    publish(stand.publisher(model), model, 0)
    for way in WAYS:
        sink = sink_of(held, way)
        with following(stand, sink) as follower:
            follower.catch_up()
            with torch.no_grad():
                held.embed.weight[3, 3] += 1
            assert sink.prove() is False
            if "canonical" not in way:
                sink.distrust("somebody changed it")
                with pytest.raises(BaseUnusable, match="somebody"), sink.reading():
                    pass
                follower.catch_up()
                check(model, held)
                assert sink.prove() is True
            else:
                # What it decodes against is what it holds, so that the follower sees it, too.
                assert not follower.prove()
                assert sink.prove() is True
                check(model, held)


def test_a_changed_module_without_a_copy_is_read_anew(stand: Stand) -> None:
    model, held = Small(), small()
    publisher = stand.publisher(model)
    publish(publisher, model, 0)
    sink = TorchSink(held, canonical="none")
    with following(stand, sink) as follower:
        follower.catch_up()
        with torch.no_grad():
            held.layers[0].weight += 1
        nudge(model, 3, 0.05)
        publish(publisher, model, 3)
        # No anchor of version 2: back to version 1 and on, all by itself.
        follower.catch_up()
        check(model, held)
        assert sink.prove()


_DTYPES = ["BF16", "F16", "F32", "F8_E4M3"]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_bits_in_any_dtypes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """What a module holds is what copying the published tensors into it makes of them."""
    torch_of = {"BF16": BF16, "F16": torch.float16, "F32": torch.float32}
    torch_of["F8_E4M3"] = torch.float8_e4m3fn
    folder = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 70), max_size=2).map(tuple), min_size=1, max_size=4)
    )
    published = [torch_of[data.draw(st.sampled_from(_DTYPES))] for _ in shapes]
    own = [torch_of[data.draw(st.sampled_from(_DTYPES))] for _ in shapes]
    transposed = [data.draw(st.booleans()) for _ in shapes]

    def some(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # No NaN where something is cast: which one comes out is up to the processor.
        found = torch.tensor(rng.integers(0, 256, count).tolist(), dtype=torch.uint8).view(dtype)
        return (
            torch.where(found.float().isnan(), torch.ones(()), found.float()).to(dtype).view(shape)
        )

    tensors = {f"t{n}": some(s, d) for n, (s, d) in enumerate(zip(shapes, published, strict=True))}
    module = nn.Module()
    for number, (shape, dtype, is_turned) in enumerate(zip(shapes, own, transposed, strict=True)):
        tensor = torch.zeros(shape[::-1] if is_turned else shape, dtype=dtype)
        tensor = tensor.T if is_turned and len(shape) == 2 else tensor.view(shape)
        module.register_parameter(f"t{number}", nn.Parameter(tensor, requires_grad=False))
    url = str(folder / "stream")
    sink = TorchSink(module)
    sink._swaps_on_host = data.draw(st.booleans())
    with (
        TorchPublisher(lambda: tensors, url, dtype=None, maintain=False) as publisher,
        Follower(url, sink, lease=False) as follower,
    ):
        for version, share in enumerate([0.0, 0.05, 1.0]):
            if version:
                for name, tensor in tensors.items():
                    flat = tensor.reshape(-1)
                    chosen = torch.from_numpy(rng.random(flat.numel()) < share)
                    new = some(tuple(flat.shape), tensor.dtype)
                    tensors[name] = (
                        torch.where(chosen, new.float(), flat.float())
                        .to(tensor.dtype)
                        .view(tensor.shape)
                    )
            ticket = publisher.publish(version, when_busy="block")
            ticket.wait(60)
            follower.catch_up()
            assert sink.prove() is True
            for name, tensor in tensors.items():
                mine = getattr(module, name)
                expected = torch.empty(mine.shape, dtype=mine.dtype).copy_(tensor)
                assert bits(mine) == bits(expected)


class TestTied:
    class Model(nn.Module):
        def __init__(self, is_tied: bool) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embed = nn.Embedding(40, 16)
            self.head = nn.Linear(16, 40, bias=False)
            if is_tied:
                self.head.weight = self.embed.weight
            else:
                with torch.no_grad():
                    self.head.weight.copy_(self.embed.weight)

    @pytest.mark.parametrize("held_tied", [True, False])
    @pytest.mark.parametrize("way", WAYS, ids=["folder", "none", "device"])
    def test_published_once(self, stand: Stand, way: dict[str, Any], held_tied: bool) -> None:
        model = self.Model(True)
        publisher = stand.publisher(model)
        publish(publisher, model, 0)
        held = self.Model(held_tied).to(BF16)
        sink = sink_of(held, way)
        with following(stand, sink) as follower:
            for seed in range(1, 4):
                follower.catch_up()
                check(model, held)
                assert sink.prove()
                publish(publisher, model, seed, 0.1)
        assert (held.head.weight.data_ptr() == held.embed.weight.data_ptr()) == held_tied

    def test_said_by_the_caller(self, stand: Stand) -> None:
        """As of a folder of Hugging Face's, whose header says nothing."""
        held = self.Model(False).to(BF16)
        embed = {"embed.weight": torch.randn(40, 16).to(BF16)}
        publisher = stand.publisher(lambda: embed)
        publish(publisher, nn.Module(), 0)
        with (
            following(stand, TorchSink(held)) as follower,
            pytest.raises(TensorMismatch, match="head") as caught,
        ):
            follower.catch_up()
        assert caught.value.context["tensor"] == "head.weight"
        sink = TorchSink(held, tied={"head.weight": "embed.weight"})
        with following(stand, sink) as follower:
            follower.catch_up()
        assert bits(held.head.weight) == bits(held.embed.weight) == bits(embed["embed.weight"])

    @pytest.mark.parametrize("way", WAYS, ids=["folder", "none", "device"])
    def test_published_twice_into_one(self, stand: Stand, way: dict[str, Any]) -> None:
        model = self.Model(False)
        publisher = stand.publisher(model)
        publish(publisher, model, 0)
        held = self.Model(True).to(BF16)
        sink = sink_of(held, way)
        with following(stand, sink) as follower:
            follower.catch_up()
            with torch.no_grad():
                model.embed.weight[:4] *= -1
                model.head.weight[:4] *= -1
            publish(publisher, nn.Module(), 1)
            follower.catch_up()
            assert sink.prove()
            assert bits(held.head.weight) == bits(model.embed.weight.to(BF16))
            before = bits(held.head.weight)
            with torch.no_grad():
                model.head.weight[5] *= 3
            publish(publisher, nn.Module(), 2)
            with pytest.raises(TensorMismatch, match="share memory"):
                follower.catch_up()
            assert bits(held.head.weight) == before
            assert sink.version is not None
            assert sink.version.version == 2


class TestNames:
    def test_what_does_not_fit_is_named_before_anything_is_touched(self, stand: Stand) -> None:
        model = Small()
        publish(stand.publisher(model), model, 0)

        class Fewer(Small):
            def __init__(self) -> None:
                super().__init__()
                self.layers = self.layers[:1]

        class More(Small):
            def __init__(self) -> None:
                super().__init__()
                self.extra = nn.Linear(2, 2)

        class Wider(Small):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(600, 121)

        class Whole(Small):
            def __init__(self) -> None:
                super().__init__()
                self.norm.weight = nn.Parameter(torch.zeros(40, dtype=torch.int32), False)

        class Expanded(Small):
            def __init__(self) -> None:
                super().__init__()
                row = torch.zeros(1, dtype=BF16)
                self.norm.weight = nn.Parameter(row.expand(40), requires_grad=False)

        wanted = {
            Fewer: "layers.1.weight",
            More: "extra.weight",
            Wider: "embed.weight",
            Whole: "norm.weight",
            Expanded: "norm.weight",
        }
        for kind, name in wanted.items():
            held: nn.Module = kind()
            before = [bits(tensor) for tensor in held.state_dict().values()]
            sink = TorchSink(held)
            with following(stand, sink) as follower:
                with pytest.raises(TensorMismatch, match=f"'{name}'") as caught:
                    follower.catch_up()
                assert caught.value.context["tensor"] == name
                assert follower.version() is None
            assert [bits(tensor) for tensor in held.state_dict().values()] == before
            with pytest.raises(BaseUnusable), sink.reading():
                pass

    def test_rename_ignore_and_what_stays(self, stand: Stand) -> None:
        model = Small()
        publish(stand.publisher(model, rename=lambda name: f"model.{name}"), model, 0)

        class Other(Small):
            def __init__(self) -> None:
                super().__init__()
                self.layers = self.layers[:1]
                self.value_head = nn.Linear(4, 1)

        held = Other().to(BF16)
        value = bits(held.value_head.weight)

        def rename(name: str) -> str | None:
            return None if name.startswith("value_head") else f"model.{name}"

        sink = TorchSink(held, rename=rename, ignore=["model.layers.1.*"])
        with following(stand, sink) as follower:
            follower.catch_up()
            assert sink.prove()
        assert bits(held.value_head.weight) == value
        assert bits(held.embed.weight) == bits(model.embed.weight.to(BF16))

    @pytest.mark.parametrize("buffers", [True, False])
    def test_buffers_follow_where_they_are_published(self, stand: Stand, buffers: bool) -> None:
        model, held = Small(), small()
        model.norm.running_mean += 3
        publish(stand.publisher(model, buffers=buffers), model, 0)
        before = bits(held.norm.running_mean)
        sink = TorchSink(held.to(BF16))
        with following(stand, sink) as follower:
            follower.catch_up()
            assert sink.prove()
        expected = bits(model.norm.running_mean.to(BF16)) if buffers else before
        assert bits(held.norm.running_mean) == expected

    def test_tensors_that_come_and_go(self, tmp_path: Path) -> None:
        """A version with other tensors: what the module needs must be there."""
        from safetensors.torch import save_file

        held = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
        held["b"].register_buffer("scale", torch.zeros(3))
        held.to(BF16)
        base = {"a.weight": torch.randn(8, 8).to(BF16), "b.weight": torch.randn(8, 8).to(BF16)}
        scale = {"b.scale": torch.tensor([1.0, 2, 3]).to(BF16)}
        float32 = {"a.weight": torch.randn(8, 8)}
        url = str(tmp_path / "stream")
        folder = tmp_path / "model"
        folder.mkdir()
        for way in (WAYS[0], WAYS[1]):
            sink = sink_of(held, way)
            for number, tensors in enumerate([base, base | scale, base, base | float32]):
                save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
                with Publisher(url, tmp_path / f"publisher{len(url)}") as publisher:
                    publisher.publish(folder, step=number)
                with Follower(url, sink, lease=False) as follower:
                    if number == 3 and way:
                        with pytest.raises(TensorMismatch, match="F32"):
                            follower.catch_up()
                        continue
                    follower.catch_up()
                    assert sink.prove()
                for name, tensor in tensors.items():
                    mine = held.get_parameter(name) if "scale" not in name else held["b"].scale
                    assert bits(mine) == bits(tensor.to(BF16))
            url += "2"


class TestRestart:
    def test_from_a_folder(self, stand: Stand, tmp_path: Path) -> None:
        model = Small()
        publisher = stand.publisher(model)
        publish(publisher, model, 0)
        with following(stand, TorchSink(small(), folder=tmp_path / "copy")) as follower:
            follower.catch_up()
        publish(publisher, model, 1)
        held = small()
        sink = TorchSink(held, folder=tmp_path / "copy")
        with following(stand, sink) as follower:
            version = follower.version()
            assert version is not None
            assert (version.version, sink.version) == (1, version)
            assert sink.prove()
            follower.catch_up()
            assert sink.last_update is not None
            assert sink.last_update.word_count > 0
            check(model, held)

    def test_a_folder_that_somebody_changed_is_fetched_again(
        self, stand: Stand, tmp_path: Path
    ) -> None:
        model = Small()
        publish(stand.publisher(model), model, 0)
        with following(stand, TorchSink(small(), folder=tmp_path / "copy")) as follower:
            follower.catch_up()
        path = tmp_path / "copy" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        held = small()
        with following(stand, TorchSink(held, folder=tmp_path / "copy")) as follower:
            assert follower.version() is None
            follower.catch_up()
            check(model, held)

    def test_a_folder_of_another_model(self, stand: Stand, tmp_path: Path) -> None:
        model = Small()
        publish(stand.publisher(model), model, 0)
        with following(stand, TorchSink(small(), folder=tmp_path / "copy")) as follower:
            follower.catch_up()
        held = nn.Linear(3, 3)
        before = bits(held.weight)
        with (
            following(stand, TorchSink(held, folder=tmp_path / "copy")) as follower,
            pytest.raises(TensorMismatch),
        ):
            follower.catch_up()
        assert bits(held.weight) == before

    def test_a_temporary_folder_goes_with_the_sink(self, stand: Stand) -> None:
        model = Small()
        publish(stand.publisher(model), model, 0)
        for way in WAYS[:2]:
            sink = sink_of(small(), way)
            with following(stand, sink) as follower:
                follower.catch_up()
            folder = sink.checkpoint().path
            assert folder.exists()
            del sink, follower
            gc.collect()
            assert not folder.exists()


class TestOtherWays:
    def test_a_stream_that_begins_with_a_reference(self, stand: Stand, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        model = Small()
        local = tmp_path / "model"
        local.mkdir()
        tensors = {name: t.detach().to(BF16) for name, t in model.named_parameters()}
        save_file(tensors, str(local / "model.safetensors"), {"format": "pt"})
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(tensor.to(BF16))
        publisher = stand.publisher(model, reference=str(local), base=str(local))
        publish(publisher, model, 0)
        for way in WAYS:
            held = small()
            sink = sink_of(held, way)
            with following(stand, sink, base=local) as follower:
                follower.catch_up(1)
                assert sink.prove()
                publish(publisher, model, 5 + WAYS.index(way))
                follower.catch_up()
                check(model, held)

    def test_a_part_of_a_model(self, stand: Stand, tmp_path: Path) -> None:
        model = Small()
        publisher = stand.publisher(model)
        publish(publisher, model, 0)

        class Part(Small):
            def __init__(self) -> None:
                super().__init__()
                del self.layers, self.norm

        held = blank(Part())
        sink = TorchSink(held)
        with following(stand, sink, tensors=["embed.*"]) as follower:
            for seed in range(1, 4):
                follower.catch_up()
                assert bits(held.embed.weight) == bits(model.embed.weight.to(BF16))
                assert sink.prove()
                publish(publisher, model, seed)
        with (
            following(stand, TorchSink(held, canonical="none"), tensors=["embed.*"]) as follower,
            pytest.raises(InvalidArgument, match="whole"),
        ):
            follower.catch_up()

    def test_a_new_lineage(self, stand: Stand) -> None:
        model, held = Small(), small()
        publisher = stand.publisher(model)
        publish(publisher, model, 0)
        publisher.close()
        sink = TorchSink(held)
        with following(stand, sink) as follower:
            follower.catch_up()
            again = Small(4)
            publish(stand.publisher(again, new_lineage=True), again, 0)
            with pytest.raises(LineageChanged):
                follower.catch_up()
            check(model, held)
            follower.catch_up(reset=True)
            check(again, held)

    def test_merged_deltas(self, stand: Stand) -> None:
        model, held = Small(), small()
        publisher = stand.publisher(model)
        publish(publisher, model, 0)
        sink = TorchSink(held)
        with following(stand, sink) as follower:
            follower.catch_up()
            for seed in range(1, 7):
                publish(publisher, model, seed)
            with Maintainer(open_stream(stand.store), stand.folder / "maintainer") as maintainer:
                maintainer.run_once()
            follower.catch_up()
            check(model, held)
            assert sink.prove()

    def test_the_modules_own_loader(self, stand: Stand) -> None:
        """Fused: two published tensors are one in the module, which only its loader knows."""
        model = Small()
        publisher = stand.publisher(model)
        publish(publisher, model, 0)
        held = nn.Module()
        held.rest = nn.Parameter(torch.zeros(2, 40, dtype=BF16), requires_grad=False)
        given: list[str] = []

        def load(tensors: Any) -> None:
            for name, tensor in tensors:
                given.append(name)
                if name in ("norm.weight", "norm.bias"):
                    held.rest[int(name == "norm.bias")].copy_(tensor)

        sink = TorchSink(held, load=load)
        with following(stand, sink) as follower:
            follower.catch_up()
            assert set(given) == {name for name, _ in model.named_parameters()}
            given.clear()
            with torch.no_grad():
                model.norm.bias[7] = 4
            publish(publisher, nn.Module(), 1)
            follower.catch_up()
            assert given == ["norm.bias"]
            assert sink.prove() is None
        assert bits(held.rest[1]) == bits(model.norm.bias.to(BF16))


class Fused:
    """Places of q, k and v in one parameter, k's rows in reverse; a shard holds every other one."""

    equal: ClassVar[dict[str, str]] = {}

    def __init__(self, weight: torch.Tensor, is_shard: bool) -> None:
        self._weight = weight.detach()
        self._step = 2 if is_shard else 1

    def bind(self, content: Content) -> Fused:
        assert set(content.tensors) == {"q", "k", "v"}
        return self

    def _rows(self, name: str) -> torch.Tensor:
        height = self._weight.shape[0] // 3
        return self._weight[(at := "qkv".index(name) * height) : at + height]

    def targets(self, name: str) -> list[torch.Tensor]:
        return [self._weight]

    def pairs(self, name: str, values: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        rows = self._rows(name)
        source = values.view(-1, rows.shape[1])[:: self._step]
        if name == "k":
            # A view cannot run backwards: row by row.
            yield from ((rows[-1 - n], source[n]) for n in range(len(rows)))
        else:
            yield rows, source

    def spots(self, name: str, first: int, offsets: np.ndarray) -> list[Spot]:
        rows = self._rows(name)
        row, column = np.divmod(offsets.astype(np.int64) + first, rows.shape[1])
        chosen = np.flatnonzero(row % self._step == 0)
        row = row[chosen] // self._step
        row = len(rows) - 1 - row if name == "k" else row
        start = rows.storage_offset()
        at = (row * rows.shape[1] + column[chosen]).astype(np.uint32)
        return [Spot(self._weight.view(-1), start, at, chosen)]


@pytest.mark.parametrize("is_shard", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=["folder", "none", "device"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_places_of_another_kind(
    stand: Stand, way: dict[str, Any], is_shard: bool, dtype: torch.dtype
) -> None:
    if way.get("canonical") == "none" and (is_shard or dtype != BF16):
        pytest.skip("its bits cannot be decoded against")
    tensors = {name: torch.randn(90, 16).to(BF16) for name in "qkv"}
    publisher = stand.publisher(lambda: tensors)
    publish(publisher, nn.Module(), 0)
    step = 2 if is_shard else 1
    module = nn.Linear(16, 270 // step).to(dtype)
    sink = sink_of(module, way, places=Fused(module.weight, is_shard))
    with following(stand, sink) as follower:
        for _ in range(4):
            follower.catch_up()
            assert sink.prove() is True
            parts = [tensors["q"], tensors["k"], tensors["v"]]
            parts = [part[::step] for part in parts]
            expected = torch.cat([parts[0], parts[1].flip(0), parts[2]]).to(dtype)
            assert bits(module.weight) == bits(expected)
            for tensor in tensors.values():
                chosen = torch.rand(tensor.shape) < 0.1
                tensor[chosen] = torch.randn(int(chosen.sum())).to(BF16)
            publish(publisher, nn.Module(), 0)


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    for options in (
        {"canonical": "disk"},
        {"canonical": "none", "folder": tmp_path},
        {"canonical": "none", "load": print},
        {"load": print, "rename": str},
    ):
        with pytest.raises(InvalidArgument):
            TorchSink(module, **options)  # type: ignore[arg-type]
    with pytest.raises(thinwire.errors.InvalidArgument):
        TorchSink(module, canonical="none", ignore=["x"])


def test_two_followers_of_one_sink(stand: Stand) -> None:
    publish(stand.publisher(Small()), nn.Module(), 0)
    for way in WAYS[:2]:
        sink = sink_of(small(), way)
        with following(stand, sink), pytest.raises(BaseUnusable), following(stand, sink):
            pass
