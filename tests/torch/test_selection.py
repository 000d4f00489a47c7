"""What of a model is published, under which names, in which dtypes, and what once."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch
from torch import nn

from thinwire import open_stream
from thinwire.errors import (
    InvalidArgument,
    TensorMismatch,
)

from .making import header_metadata
from .training import BF16, Small, Stand, done, nudge, row, rows_of, train


class TestSelection:
    def test_dtypes(self, stand: Stand) -> None:
        """The first pattern that fits counts; None is the tensor's own."""
        model = Small().double()
        model.layers[0].to(torch.float16)
        dtypes = {
            "layers.0.bias": torch.float32,
            "layers.0.*": None,
            "norm.*": torch.float16,
            "norm.weight": torch.float32,
        }
        publisher = stand.publisher(model, dtypes=dtypes)
        expected = {
            "embed.weight": BF16,
            "layers.0.weight": torch.float16,
            "layers.0.bias": torch.float32,
            "layers.1.weight": BF16,
            "norm.weight": torch.float16,
            "norm.bias": torch.float16,
        }
        named = dict(model.named_parameters())
        for step in range(2):
            done(publisher.publish(step))
            assert stand.held() == {n: row(named[n], dtype) for n, dtype in expected.items()}
            nudge(model, step)

    @pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
    def test_one_dtype_for_all(self, stand: Stand, dtype: torch.dtype | None) -> None:
        model = Small().to(BF16)
        done(stand.publisher(model, dtype=dtype).publish(0))
        assert stand.held() == {n: row(t, dtype) for n, t in model.named_parameters()}

    def test_quantised_and_whole_numbers_stay(self, stand: Stand) -> None:
        state = {
            "fp8": torch.randn(9, 9).to(torch.float8_e4m3fn),
            "scale": torch.randn(9),
            "ids": torch.arange(5),
            "mask": torch.tensor([True, False]),
        }
        done(stand.publisher(lambda: state).publish(0))
        assert stand.held() == {
            name: row(tensor, BF16 if name == "scale" else None) for name, tensor in state.items()
        }

    def test_include_and_exclude(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model, include=["layers.*", "norm.*"], exclude=["*.bias"])
        done(publisher.publish(0))
        nudge(model)
        done(publisher.publish(1))
        wanted = {"layers.0.weight", "layers.1.weight", "norm.weight"}
        assert stand.held() == {n: r for n, r in rows_of(model).items() if n in wanted}

    def test_nothing_is_left(self, stand: Stand) -> None:
        with pytest.raises(InvalidArgument, match="no tensors"):
            stand.publisher(Small(), include=["nothing"])

    def test_buffers(self, stand: Stand) -> None:
        """Persistent ones, in their own dtypes; and they change, too."""
        model = Small()
        publisher = stand.publisher(model, buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            done(publisher.publish(step))
            expected = rows_of(model)
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                expected[f"norm.{name}"] = row(getattr(model.norm, name), None)
            assert stand.held() == expected
            train(model, optimizer, step)

    def test_buffers_in_another_dtype(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model, buffers=True, dtypes={"*.running_*": BF16})
        done(publisher.publish(0))
        assert stand.held()["norm.running_var"] == row(model.norm.running_var)

    def test_rename(self, stand: Stand) -> None:
        """Patterns are of published names."""
        model = Small()

        def rename(name: str) -> str | None:
            return None if name.startswith("norm") else f"model.{name}"

        publisher = stand.publisher(model, rename=rename, exclude=["model.embed.*"])
        done(publisher.publish(0))
        expected = {f"model.{n}": r for n, r in rows_of(model).items() if n.startswith("layers.")}
        assert stand.held() == expected

    def test_two_of_one_name(self, stand: Stand) -> None:
        with pytest.raises(InvalidArgument, match="'one'"):
            stand.publisher(Small(), rename=lambda name: "one")

    @pytest.mark.parametrize("kind", ["compiled", "checkpointed", "both"])
    def test_wrapped_modules_have_their_plain_names(self, stand: Stand, kind: str) -> None:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

        model = Small()
        expected = {**rows_of(model), "norm.running_mean": row(model.norm.running_mean, None)}
        wrapped: Any = model
        if kind != "compiled":
            model.layers[0] = wrapping.checkpoint_wrapper(model.layers[0])
            model.norm = wrapping.checkpoint_wrapper(model.norm)
        if kind != "checkpointed":
            wrapped = torch.compile(model)
        publisher = stand.publisher(wrapped, buffers=True, exclude=["*.running_var", "*.num_b*"])
        done(publisher.publish(0))
        assert stand.held() == expected

    def test_a_function_that_makes_them(self, stand: Stand) -> None:
        """Merged adapters, say: other memory each time, in another order."""
        model = Small()
        turn = [1]

        def merged() -> dict[str, torch.Tensor]:
            turn[0] = -turn[0]
            names = sorted(dict(model.named_parameters()))[:: turn[0]]
            return {name: model.get_parameter(name) * 2 for name in names}

        publisher = stand.publisher(merged)
        for step in range(3):
            done(publisher.publish(step))
            assert stand.held() == rows_of(merged())
            nudge(model, step)

    def test_tensors_given_at_the_publish(self, stand: Stand) -> None:
        """Drawn one by one, each gone when the next one is."""
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        alive = [0]
        most = [0]

        class Counted:
            def __init__(self) -> None:
                alive[0] += 1
                most[0] = max(most[0], alive[0])

            def __del__(self) -> None:
                alive[0] -= 1

        def drawn() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in reversed(list(model.named_parameters())):
                copy: Any = tensor.detach().clone()
                copy.counted = Counted()
                yield name, copy
                del copy

        nudge(model)
        done(publisher.publish(1, tensors=drawn()))
        assert stand.held() == rows_of(model)
        assert most[0] <= 2, "the next is made while the last is still held, and no more"
        with pytest.raises(TensorMismatch, match="missing"):
            publisher.publish(2, tensors=list(model.named_parameters())[1:])

    @pytest.mark.parametrize(
        "model",
        [
            "a name",
            {"a": torch.ones(3)},
            lambda: [torch.ones(3)],
            lambda: {"a": [1.0]},
            lambda: {},
        ],
        ids=["text", "mapping", "list", "no tensor", "nothing"],
    )
    def test_what_is_no_model(self, stand: Stand, model: Any) -> None:
        with pytest.raises(InvalidArgument):
            stand.publisher(model)

    def test_the_meta_device(self, stand: Stand) -> None:
        with pytest.raises(InvalidArgument, match=r"'weight'.*meta"):
            stand.publisher(nn.Linear(3, 3, device="meta"))

    def test_fsdp1(self, stand: Stand) -> None:
        """The real one, alone in its job."""
        from torch.distributed import fsdp

        dist = torch.distributed
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = fsdp.FullyShardedDataParallel(Small(), device_id=torch.device("cpu"))
            with pytest.raises(InvalidArgument, match=r"FSDP1.*fully_shard"):
                stand.publisher(model)
            inner = nn.parallel.DistributedDataParallel(Small())
            done(stand.publisher(inner).publish(0))
            assert stand.held() == rows_of(inner.module)
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize(("option", "value"), [("baseline", "gpu"), ("when_busy", "queue")])
    def test_options_that_there_are_not(self, stand: Stand, option: str, value: str) -> None:
        with pytest.raises(InvalidArgument, match=value):
            stand.publisher(Small(), **{option: value})


class Tied(nn.Module):
    """As language models tie their embeddings."""

    def __init__(self, is_shared: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(400, 200)
        self.layer = nn.Linear(200, 200)
        self.lm_head = nn.Linear(200, 400, bias=False)
        self.lm_head.weight = (
            self.embed.weight if is_shared else nn.Parameter(self.embed.weight.detach().clone())
        )


class TestTied:
    def test_shared_memory_is_found(self, stand: Stand) -> None:
        """One copy travels; the header says who shares it."""
        model = Tied()
        publisher = stand.publisher(model)
        assert publisher.tied == {"lm_head.weight": "embed.weight"}
        for step in range(2):
            done(publisher.publish(step))
            assert stand.held() == rows_of(model)
            assert "lm_head.weight" not in stand.held()
            nudge(model, step)
        metadata = header_metadata(stand.folder / "joiner1" / "model.safetensors")
        assert metadata == {"format": "pt", "lm_head.weight": "embed.weight"}

    def test_a_head_that_was_untied(self, stand: Stand) -> None:
        """The stream promises that both are the same."""
        model = Tied()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())
        nudge(model.layer)
        assert done(publisher.publish(1)).version == 2, "as long as they are equal"
        assert stand.held() == {n: r for n, r in rows_of(model).items() if n != "lm_head.weight"}
        with torch.no_grad():
            model.lm_head.weight[3, 4] += 1
        with pytest.raises(TensorMismatch, match=r"'lm_head\.weight'.*'embed\.weight'") as raised:
            publisher.publish(2)
        assert raised.value.context["tensor"] == "lm_head.weight"
        head = open_stream(stand.store).tip().head
        assert head is not None
        assert head.version == 2

    def test_declared(self, stand: Stand) -> None:
        """Two copies that the trainer keeps equal, compared as they are published."""
        model = Tied(is_shared=False)
        publisher = stand.publisher(model, tied={"lm_head.weight": "embed.weight"})
        done(publisher.publish(0))
        assert "lm_head.weight" not in stand.held()
        with torch.no_grad():
            model.embed.weight[5] += 1
            model.lm_head.weight[5] += 1
            model.lm_head.weight[6, 6] *= 1 + 2**-20  # rounds to the same
        done(publisher.publish(1))
        assert stand.held()["embed.weight"] == row(model.embed.weight)
        with torch.no_grad():
            model.embed.weight[7, 7] = 0.0
            model.lm_head.weight[7, 7] = -0.0
        with pytest.raises(TensorMismatch, match=r"lm_head\.weight"):
            publisher.publish(2)

    def test_declared_the_other_way_round(self, stand: Stand) -> None:
        """The name that engines ask for is the one that is kept, also where memory is shared."""
        model = Tied()
        publisher = stand.publisher(model, tied={"embed.weight": "lm_head.weight"})
        done(publisher.publish(0))
        held = stand.held()
        assert "embed.weight" not in held
        assert held["lm_head.weight"] == row(model.lm_head.weight)
        assert publisher.tied == {"embed.weight": "lm_head.weight"}

    def test_tied_to_nothing(self, stand: Stand) -> None:
        with pytest.raises(InvalidArgument, match=r"'lm_head\.weight'.*'wte'"):
            stand.publisher(Tied(), tied={"lm_head.weight": "wte"})

    def test_parts_of_one_tensor_are_not_tied(self, stand: Stand) -> None:
        """Views of the same memory that are not the same tensor."""
        fused = torch.randn(300, 300)
        state = {"fused": fused, "q": fused[:100], "k": fused[100:200], "t": fused.T}
        done(stand.publisher(lambda: state).publish(0))
        assert stand.held() == rows_of(state)

    def test_equal_tensors_are_not_tied(self, stand: Stand) -> None:
        state = {"a": torch.ones(100), "b": torch.ones(100), "c": torch.ones(0), "d": torch.ones(0)}
        publisher = stand.publisher(lambda: state)
        done(publisher.publish(0))
        state["b"] += 1
        done(publisher.publish(1))
        assert publisher.tied == {}
        assert stand.held() == rows_of(state)
