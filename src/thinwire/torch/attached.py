"""A running model, kept at a host's copy of the checkpoint: how its words are changed, and proved.

Four ways lead there. *map*: the changed words alone, exchanged in the parameters where an index
map says they are. *dense*: the engine's loader is given every touched tensor, from the host's copy.
*patches*: a function of the engine's own that loads changed words through its loader. *reload*: the
engine loads everything and processes it as after a start. The map is tried first; a parameter that
it cannot place goes the dense way in the same update; where the engine arranges or converts weights
after loading, only a reload is right.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from thinwire.checkpoint import Checkpoint
from thinwire.errors import EngineError, TensorMismatch
from thinwire.torch.copy_loader import CopyLoader, patches_of
from thinwire.torch.costs import Costs, measure_swap
from thinwire.torch.index_map import IndexMap, Int64s
from thinwire.torch.live import lie_alike, parameters_of
from thinwire.torch.map_finder import MapFinder, Mapped
from thinwire.torch.probing import can_probe
from thinwire.torch.samples import Layout
from thinwire.torch.scatter import Change, LiveModel
from thinwire.torch.stored import words_of
from thinwire.torch.ways import WAYS, Facts, Loader, Staged, Way

# Beyond this share of a tensor, it is loaded whole rather than word by word.
_DENSE_SHARE = 1 / 20
# Parameters of fewer elements are scales and the like, which an engine makes by itself.
_SCALE_ELEMENTS = 256


class AttachedModel:
    """A model of a running engine, attached to a host's copy.

    Args:
        tensors: The model's parameters and buffers by name.
        loader: What the engine can do.
        cache: A folder for maps that were found.
        ways: The ways that may be taken.
        buffers: Which of the tensors are buffers: they need not be fed by the checkpoint.
        unfed: Shell patterns of parameters that need not be, either.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        loader: Loader,
        cache: Path,
        ways: Sequence[Way] = WAYS,
        *,
        buffers: Collection[str] = (),
        unfed: Sequence[str] = (),
    ) -> None:
        self._buffers = frozenset(buffers)
        self._unfed = tuple(unfed)
        self._tensors = dict(tensors)
        self._loader = CopyLoader(loader)
        self._cache = cache
        self._ways = tuple(ways)
        self._live: LiveModel | None = None
        self._loose: list[str] = []
        self._catalog: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._costs = Costs()
        self.facts: Facts | None = None

    def attach(self, copy: Checkpoint) -> Facts:
        """Bring the model, whatever it holds, to the host's copy. Nobody may use it meanwhile.

        Raises:
            EngineError: No way leads there; what it holds may be anything.
        """
        _refuse_empty(self._tensors)
        self._catalog = {name: (t.dtype, t.shape) for name, t in copy.tensors.items()}
        self._live, self._loose = None, []
        if "map" in self._ways:
            try:
                facts = self._attach_with_map(copy)
            except EngineError as error:
                if not self._may_reload():
                    raise
                facts = self._attach_without_map(copy, error.message)
        else:
            facts = self._attach_without_map(copy, "")
        self.facts = facts
        return facts

    def stage(self, copy: Checkpoint, places: Mapping[str, Int64s | None] | None) -> Staged:
        """Prepare the way to the host's copy; the model is used meanwhile.

        Args:
            copy: The host's copy, at the new version already.
            places: The rising positions of changed words by tensor, None for a tensor of which any
                word may have changed; None: of any tensor.

        Raises:
            TensorMismatch: The tensors are not those that the model was attached with.
        """
        self._check_same(copy)
        if places is None:
            places = dict.fromkeys(copy.tensors)
        if unknown := places.keys() - copy.tensors.keys():
            raise TensorMismatch(f"the copy has no tensor {sorted(unknown)[0]!r}")
        live = self._live
        if live is None:
            touched = list(places)
            way = "dense" if self.facts is None else self.facts.way
            if way == "reload":
                return Staged(None, [], [], touched, is_reload=True)
            if way == "patches":
                return Staged(None, [], patches_of(copy, places), touched)
            return Staged(None, touched, [], touched)
        whole = [name for name in self._loose if name in places]
        changes = []
        for name, positions in places.items():
            words = words_of(copy.tensors[name])
            if positions is None:
                at = live.differences(name, words)
                if "dense" in self._ways and at.size > words.size * _DENSE_SHARE:
                    # Positions would take several times the memory of the tensor.
                    whole.append(name)
                    continue
            else:
                at = positions
            if at.size:
                changes.append(Change(name, at, words[at]))
        swap = live.prepare(changes)
        byte_count = sum(copy.tensors[change.tensor].data.size for change in changes)
        is_loading_better = self._costs.is_loading_better(swap.word_count, byte_count)
        if "dense" in self._ways and is_loading_better:
            return Staged(None, [change.tensor for change in changes] + whole, [], list(places))
        return Staged(swap, whole, [], list(places))

    def apply(self, staged: Staged, copy: Checkpoint) -> None:
        """Take a staged way. Nobody may use the model meanwhile.

        Raises:
            EngineError: The engine's loader failed; what the model holds may be anything.
        """
        if staged.is_reload:
            self._loader.reload(copy)
            return
        if staged.swap is not None:
            staged.swap.swap()
        self._loader.patch(staged.patches)
        self._loader.load(copy, staged.dense)
        self._loader.loader.synchronize()

    def undo(self, staged: Staged) -> bool:
        """Take an applied way back; False: that is not possible."""
        if not staged.can_be_undone:
            return False
        # It may have failed before anything was exchanged.
        if staged.swap is not None and staged.swap.is_swapped:
            staged.swap.swap()
            self._loader.loader.synchronize()
        return True

    def holds(self, tensor: str) -> bool:
        """Whether changes of a tensor matter here: some of it is held, or it cannot be told."""
        live = self._live
        if live is None or tensor in self._loose:
            return True
        return tensor not in live.index_map.tensors or bool(live.index_map.runs_of(tensor))

    def is_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the tensors that it was made for, in the same memory."""
        return lie_alike(tensors, self._tensors)

    def held_counts(self) -> dict[str, int]:
        """How many elements of each tensor are held here, tensors held whole left out."""
        if self._live is None:
            return {}
        index_map = self._live.index_map
        counts = {name: index_map.held_count(name) for name in index_map.tensors}
        return {name: n for name, n in counts.items() if n < index_map.tensors[name][1]}

    def unseen_count(self) -> int:
        """Elements of the model that :meth:`differing_count` cannot see."""
        if self._live is None or self.facts is None:
            return sum(tensor.numel() for tensor in self._tensors.values())
        refused = [name for name in self.facts.refused if name in self._tensors]
        unplaced = sum(self._tensors[name].numel() for name in refused)
        return unplaced + sum(self.facts.uncovered.values())

    def differing_count(self, copy: Checkpoint, tensors: Iterable[str] | None = None) -> int | None:
        """How many words differ from the host's copy, as far as the map shows; None: it has none.

        Args:
            copy: The host's copy.
            tensors: The tensors to compare; None: all.
        """
        live = self._live
        if live is None:
            return None
        names = copy.tensors if tensors is None else tensors
        return sum(int(live.differences(name, words_of(copy.tensors[name])).size) for name in names)

    def _attach_with_map(self, copy: Checkpoint) -> Facts:
        finder = MapFinder(self._tensors, self._loader, self._cache, may_reload=self._may_reload())
        mapped = finder.find(copy)
        uncovered = _uncovered(mapped, self._buffers, self._unfed)
        live, index_map = mapped.live, mapped.live.index_map
        self._live, self._loose = live, _loose(index_map)
        swap_s = measure_swap(live, copy, self._loader.loader.synchronize)
        self._costs = Costs(swap_s, self._loader.load_s_per_byte)
        return Facts(
            way="map",
            run_count=len(index_map.runs),
            map_bytes=index_map.table_bytes,
            is_cached=mapped.is_cached,
            probe_s=mapped.probe_s,
            dense_s=mapped.load_s,
            refused={**index_map.refused, **mapped.unseen},
            uncovered=uncovered,
            loose=tuple(self._loose),
            absent=tuple(
                name
                for name in self._catalog
                if not index_map.held_count(name) and name not in self._loose
            ),
        )

    def _attach_without_map(self, copy: Checkpoint, reason: str) -> Facts:
        # Where the map was refused, loading in place is not right either.
        ways = [way for way in self._ways if way == "reload" or (way != "map" and not reason)]
        loader = self._loader.loader
        can = {"dense": True, "patches": loader.patch, "reload": loader.reload}
        possible = [way for way in ways if can[way]]
        if not possible:
            raise EngineError(f"this engine has none of the ways {', '.join(ways) or 'allowed'}")
        start_s = time.perf_counter()
        if possible[0] == "reload":
            self._loader.reload(copy)
        else:
            layout = Layout(self._tensors, parameters_of(self._tensors.items())[0])
            self._loader.load_all(copy)
            layout.check(copy, self._loader, None, may_reload=self._may_reload())
        return Facts(way=possible[0], reason=reason, dense_s=time.perf_counter() - start_s)

    def _may_reload(self) -> bool:
        return "reload" in self._ways and self._loader.loader.reload is not None

    def _check_same(self, copy: Checkpoint) -> None:
        found = {name: (t.dtype, t.shape) for name, t in copy.tensors.items()}
        if found != self._catalog:
            raise TensorMismatch(
                "the checkpoint's tensors are not those that the engine was attached with"
            )


def _uncovered(mapped: Mapped, buffers: Collection[str], unfed: Sequence[str]) -> dict[str, int]:
    """Parameters that no tensor of the checkpoint feeds, with their elements.

    Raises:
        EngineError: There are such, and nobody said that they may stay as they are.
    """
    index_map = mapped.live.index_map
    placed = {index_map.parameter_name(n) for n in set(index_map.runs[:, 1].tolist())}
    found = {
        name: parameter.count
        for name, parameter in mapped.parameters.items()
        if name not in placed
        and name not in index_map.refused
        and name not in buffers
        and parameter.count >= _SCALE_ELEMENTS
    }
    for name in found:
        if not any(fnmatchcase(name, pattern) for pattern in unfed):
            raise EngineError(
                f"the engine's parameter {name!r} is fed by no tensor of the checkpoint",
                hint="Publish all of the model; or say that it stays as the engine has it "
                "(unfed=[PATTERN], --unfed PATTERN)",
            )
    return found


def _loose(index_map: IndexMap) -> list[str]:
    """The tensors that go the dense way, since it is not known that all of them are placed."""
    # Which tensors feed what could not be placed is not known: those not found in full.
    return [
        name
        for name, (dtype, count) in index_map.tensors.items()
        if not can_probe(dtype) or (index_map.refused and index_map.held_count(name) < count)
    ]


def _refuse_empty(tensors: Mapping[str, torch.Tensor]) -> None:
    empty = [name for name, tensor in tensors.items() if not tensor.numel()]
    held = [name for name in empty if name.endswith(("weight", "weight_packed"))]
    if held:
        raise EngineError(
            f"parameter {held[0]!r} is empty: the engine keeps its weights packed elsewhere, "
            "where they can be neither changed nor compared",
            hint="On a CPU, let vLLM load the thinwire plugin (pip install thinwire[vllm] into "
            "its environment): it keeps weights plain",
        )
