"""Models on a mesh: uneven shapes, a tensor of several chunks, every kind of sharding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

# Together more than a chunk's 2**20 words.
VOCABULARY, WIDTH = 4099, 258
SMALL_VOCABULARY = 211
HIDDEN = 518


class Net(nn.Module):
    """Looks tokens up, goes through a wide layer, and guesses."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        # Three rows: on four ranks one of them holds none.
        self.gate = nn.Parameter(torch.randn(3, 5) * 0.02)
        self.head = nn.Linear(WIDTH, 7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens).mean(1))
        x = x + self.down(torch.nn.functional.gelu(self.up(x)))
        return self.head(x) + self.gate.sum()


class TiedNet(Net):
    """The output layer shares the embedding's weights; so do two tensors with few rows."""

    def __init__(self) -> None:
        super().__init__(SMALL_VOCABULARY)
        self.head = nn.Linear(WIDTH, SMALL_VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.gate_again = self.gate


class LoraNet(Net):
    """A frozen model with small adapters beside its layers."""

    def __init__(self) -> None:
        super().__init__(SMALL_VOCABULARY)
        self.requires_grad_(False)
        for number in range(3):
            self.register_module(f"lora_a{number}", nn.Linear(WIDTH, 4, bias=False))
            self.register_module(f"lora_b{number}", nn.Linear(4, WIDTH, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens).mean(1))
        for number in range(3):
            a, b = getattr(self, f"lora_a{number}"), getattr(self, f"lora_b{number}")
            x = x + b(a(x))
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(x)))) + self.gate.sum()


class Layout(NamedTuple):
    """A way to spread a model over ranks.

    Attributes:
        make: The model on one device.
        spread: Spreads it over this many ranks.
    """

    make: Callable[[], nn.Module]
    spread: Callable[[nn.Module, int], nn.Module]


def _fsdp(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    return _sharded(model, mesh)


def _hsdp(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    return _sharded(model, mesh)


def _tensor_parallel(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    return _cut(model, mesh, ColwiseParallel(output_layouts=Replicate()))


def _tensor_parallel_fsdp(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    # Rows over one dimension of the mesh, and then over the other: strided, and uneven.
    rows = RowwiseParallel(input_layouts=Replicate())
    return _sharded(_cut(model, mesh["tp"], rows), mesh["dp"])


def _replicas(model: nn.Module, size: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _alone(model: nn.Module, size: int) -> nn.Module:
    return model


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _cut(model: nn.Module, mesh: DeviceMesh, embedding: ParallelStyle) -> nn.Module:
    plan = {"embed": embedding, "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


LAYOUTS = {
    "fsdp": Layout(Net, _fsdp),
    "hsdp": Layout(Net, _hsdp),
    "tp": Layout(Net, _tensor_parallel),
    "tp-fsdp": Layout(Net, _tensor_parallel_fsdp),
    "ddp": Layout(Net, _replicas),
    "alone": Layout(Net, _alone),
    "tied": Layout(TiedNet, _fsdp),
    "lora": Layout(LoraNet, _fsdp),
}


class Trained:
    """A model in training on some ranks.

    Args:
        layout: The name of its layout.
        seed: Of its first weights.
        loaded: Whole weights to begin with instead, by name.
    """

    def __init__(
        self, layout: str, size: int, seed: int, loaded: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        torch.manual_seed(seed)
        model = LAYOUTS[layout].make()
        if loaded is not None:
            model.load_state_dict(loaded)
        self.model = LAYOUTS[layout].spread(model, size)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=3e-5)

    def step(self, step: int) -> None:
        """One optimizer step."""
        # The same batch everywhere: tensor parallel ranks must not see different ones.
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, SMALL_VOCABULARY, (8, 6), generator=draw)
        targets = torch.randint(0, 7, (8,), generator=draw)
        loss = nn.functional.cross_entropy(self.model(tokens), targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def gathered(self) -> dict[str, torch.Tensor]:
        """The whole weights, by the module's names: every rank calls it."""
        model = self.model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        return {name: whole(tensor) for name, tensor in model.named_parameters()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from all ranks, by torch itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def stir(tensor: torch.Tensor, step: int) -> None:
    """Change every tenth weight or so: which ones, their own bits say, so replicas stay equal."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    is_chosen = (local.abs() * 1e5).long() % 10 == step % 10
    local.copy_(torch.where(is_chosen, local * 1.01, local))


class Stages:
    """A model whose first layers are on the first half of the ranks, the last ones on the rest.

    Each half shards its layers over its ranks; a tensor that both use is on all ranks. The halves
    make groups of their own, as pipelines do: not every rank is in as many.
    """

    def __init__(self, rank: int, size: int, seed: int) -> None:
        torch.manual_seed(seed)
        half = size // 2
        stages = [list(range(half)), list(range(half, size))]
        meshes = [DeviceMesh("cpu", ranks) for ranks in stages]
        # Such as first and last stage have it to sum the gradients of tied embeddings.
        self._ends = dist.new_group([0, size - 1])
        self._stage = 0 if rank < half else 1
        self._tensors: dict[str, torch.Tensor] = {
            "shared": torch.randn(67, 31),
        }
        for layer in range(4):
            weight = torch.randn(301 + layer, 307 if layer else 4099)
            if layer // 2 == self._stage:
                mesh = meshes[self._stage]
                sharded = fully_shard(_Holder(weight), mesh=mesh)
                self._tensors[f"layers.{layer}.weight"] = sharded.weight
        everyone = init_device_mesh("cpu", (size,))
        self._tensors["replicated"] = DTensor.from_local(
            torch.randn(11), everyone, [Replicate()], run_check=False
        )

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank holds."""
        return self._tensors

    def step(self, step: int) -> None:
        """Change some weights of each."""
        for tensor in self._tensors.values():
            stir(tensor, step)

    def gathered(self) -> dict[str, torch.Tensor]:
        """The whole of what this rank's stage holds."""
        return {name: whole(tensor) for name, tensor in self._tensors.items()}


_PLACEMENTS: Mapping[str, list[Placement]] = {
    "rows-rows": [Shard(0), Shard(0)],
    "rows-columns": [Shard(0), Shard(1)],
    "columns-rows": [Shard(1), Shard(0)],
    "columns-columns": [Shard(1), Shard(1)],
    "replica-columns": [Replicate(), Shard(1)],
    "rows-replica": [Shard(0), Replicate()],
    "replica-replica": [Replicate(), Replicate()],
}
_SHAPES = ((5, 7), (513, 257), (1, 3, 1), (67, 3, 43), (1031, 1033))


class Placed:
    """Tensors under all kinds of placements on a mesh of two dimensions, most of them uneven."""

    def __init__(self, size: int, seed: int) -> None:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        draw = torch.Generator().manual_seed(seed)
        self._tensors: dict[str, torch.Tensor] = {}
        # Known here: torch itself cannot gather some of these, whose parts are empty.
        self._whole: dict[str, torch.Tensor] = {}
        self._add("scalar", torch.randn((), generator=draw), lambda full: full.clone())
        for shape in _SHAPES:
            full = torch.randn(shape, generator=draw)
            for name, placements in _PLACEMENTS.items():
                self._add(name, full, partial(_placed, mesh=mesh, placements=placements))
            for dim in range(len(shape)):
                self._add(f"strided{dim}", full, partial(_strided, mesh=mesh, dim=dim))

    def _add(
        self,
        name: str,
        full: torch.Tensor,
        place: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        name = ".".join([name, *map(str, full.shape)])
        self._whole[name] = full.clone()
        self._tensors[name] = place(full)

    def state(self) -> dict[str, torch.Tensor]:
        """What this rank holds."""
        return self._tensors

    def step(self, step: int) -> None:
        """Change some weights of each."""
        for tensor in (*self._tensors.values(), *self._whole.values()):
            stir(tensor, step)

    def gathered(self) -> dict[str, torch.Tensor]:
        """The whole of each."""
        return self._whole


def _placed(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def _strided(full: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """As fully_shard cuts what tensor parallelism has cut already."""
    part = distribute_tensor(full, mesh["tp"], [Shard(dim)], src_data_rank=None)
    return fully_shard(_Holder(part), mesh=mesh["dp"]).weight


class _Holder(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
