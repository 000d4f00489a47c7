"""A running model, kept at a host's copy of the checkpoint: how its words are changed, and proved.

Four ways lead there. *map*: the changed words alone, exchanged in the parameters where an index
map says they are. *dense*: the engine's loader is given every touched tensor, from the host's copy.
*patches*: a function of the engine's own that loads changed words through its loader. *reload*: the
engine loads everything and processes it as after a start. The map is tried first; a parameter that
it cannot place goes the dense way in the same update; where the engine arranges or converts weights
after loading, only a reload is right.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import numpy as np
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.codec.dtypes import dtype_named
from thinwire.errors import EngineError, TensorMismatch
from thinwire.torch.index_map import IndexMap, Int64s
from thinwire.torch.live import Parameter, parameters_of, torch_dtype
from thinwire.torch.map_file import read_map, write_map
from thinwire.torch.probing import Prober, can_probe
from thinwire.torch.samples import Sample, digest_of, moved_parameters
from thinwire.torch.scatter import Change, LiveModel, Words
from thinwire.torch.ways import WAYS, Facts, Loader, Patch, Staged, Way

# Of words that are exchanged with themselves, to find out what one costs.
_MEASURED_SHARE = 0.01
_MEASURED_TIMES = 3
# Beyond this share of a tensor, it is loaded whole rather than word by word.
_DENSE_SHARE = 1 / 20
# Loading is chosen over exchanging words only where it is so many times quicker.
_DENSE_MARGIN = 4
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
        self._loader = loader
        self._cache = cache
        self._ways = tuple(ways)
        self._live: LiveModel | None = None
        self._loose: list[str] = []
        self._catalog: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._swap_s_per_word = 0.0
        self._dense_s_per_byte = 0.0
        self.facts: Facts | None = None

    def attach(self, copy: Checkpoint) -> Facts:
        """Bring the model, whatever it holds, to the host's copy. Nobody may use it meanwhile.

        Raises:
            EngineError: No way leads there; what it holds may be anything.
        """
        self._refuse_empty()
        self._catalog = {name: (t.dtype, t.shape) for name, t in copy.tensors.items()}
        self._live, self._loose = None, []
        if "map" in self._ways:
            try:
                facts = self._attach_with_map(copy)
            except EngineError as error:
                if "reload" not in self._ways or self._loader.reload is None:
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
                return Staged(None, [], self._patches(copy, places), touched)
            return Staged(None, touched, [], touched)
        whole = [name for name in self._loose if name in places]
        changes = []
        for name, positions in places.items():
            words = _words(copy, name)
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
        swap_s = swap.word_count * self._swap_s_per_word
        # What can be undone is worth something.
        if "dense" in self._ways and swap_s > _DENSE_MARGIN * byte_count * self._dense_s_per_byte:
            return Staged(None, [change.tensor for change in changes] + whole, [], list(places))
        return Staged(swap, whole, [], list(places))

    def apply(self, staged: Staged, copy: Checkpoint) -> None:
        """Take a staged way. Nobody may use the model meanwhile.

        Raises:
            EngineError: The engine's loader failed; what the model holds may be anything.
        """
        if staged.is_reload:
            self._reload(copy)
            return
        if staged.swap is not None:
            staged.swap.swap()
        if staged.patches:
            assert self._loader.patch is not None
            try:
                self._loader.patch(staged.patches)
            except Exception as error:
                raise EngineError(f"the engine's patches failed: {error}"[:500]) from error
        self._load(copy, staged.dense)
        self._loader.synchronize()

    def undo(self, staged: Staged) -> bool:
        """Take an applied way back; False: that is not possible."""
        if not staged.can_be_undone:
            return False
        # It may have failed before anything was exchanged.
        if staged.swap is not None and staged.swap.is_swapped:
            staged.swap.swap()
            self._loader.synchronize()
        return True

    def holds(self, tensor: str) -> bool:
        """Whether changes of a tensor matter here: some of it is held, or it cannot be told."""
        live = self._live
        if live is None or tensor in self._loose:
            return True
        return tensor not in live.index_map.tensors or bool(live.index_map.runs_of(tensor))

    def is_of(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether these are the tensors that it was made for, in the same memory."""
        return {name: _identity(t) for name, t in tensors.items()} == {
            name: _identity(t) for name, t in self._tensors.items()
        }

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
        return sum(int(live.differences(name, _words(copy, name)).size) for name in names)

    def _attach_with_map(self, copy: Checkpoint) -> Facts:
        parameters, unseen = parameters_of(self._tensors.items())
        samples = {name: Sample(parameter) for name, parameter in parameters.items()}
        path = self._cache / f"{self._key(parameters)}.map"
        index_map = read_map(path)
        probe_s, dense_s = 0.0, self._load_all(copy)
        if index_map is not None and self._misplaced(LiveModel(parameters, index_map), copy):
            # What the engine's own loader wrote is not where the map says.
            index_map = None
        is_cached = index_map is not None
        if index_map is None:
            index_map, probe_s = self._find_map(parameters, unseen, copy)
            self._load_all(copy)
            changed = self._misplaced(LiveModel(parameters, index_map), copy)
            index_map = index_map.without(
                dict.fromkeys(changed, "the loader changes some of the values that it writes to it")
            )
        self._check_layout(copy, parameters, samples, index_map)
        if not is_cached:
            write_map(path, index_map)
        uncovered = self._uncovered(parameters, index_map)
        # Which tensors feed what could not be placed is not known: those not found in full.
        self._loose = [
            name
            for name, (dtype, count) in index_map.tensors.items()
            if not can_probe(dtype) or (index_map.refused and index_map.held_count(name) < count)
        ]
        live = LiveModel(parameters, index_map)
        self._live = live
        self._measure(live, copy)
        return Facts(
            way="map",
            run_count=len(index_map.runs),
            map_bytes=index_map.table_bytes,
            is_cached=is_cached,
            probe_s=probe_s,
            dense_s=dense_s,
            refused={**index_map.refused, **unseen},
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
        can = {"dense": True, "patches": self._loader.patch, "reload": self._loader.reload}
        possible = [way for way in ways if can[way]]
        if not possible:
            raise EngineError(f"this engine has none of the ways {', '.join(ways) or 'allowed'}")
        start_s = time.perf_counter()
        if possible[0] == "reload":
            self._reload(copy)
        else:
            parameters, _ = parameters_of(self._tensors.items())
            samples = {name: Sample(parameter) for name, parameter in parameters.items()}
            self._load_all(copy)
            self._check_layout(copy, parameters, samples, None)
        return Facts(way=possible[0], reason=reason, dense_s=time.perf_counter() - start_s)

    def _load_all(self, copy: Checkpoint) -> float:
        """Have the engine's loader load everything; returns the seconds it took."""
        start_s = time.perf_counter()
        self._load(copy, list(copy.tensors))
        dense_s = time.perf_counter() - start_s
        self._dense_s_per_byte = dense_s / max(1, sum(t.data.size for t in copy.tensors.values()))
        return dense_s

    def _find_map(
        self,
        parameters: Mapping[str, Parameter],
        unseen: Mapping[str, str],
        copy: Checkpoint,
    ) -> tuple[IndexMap, float]:
        """Probe; whatever becomes of it, the copy is loaded again afterwards.

        Raises:
            EngineError: The loader fails.
        """
        before = {name: _bits(self._tensors[name]) for name in unseen}
        start_s = time.perf_counter()
        try:
            index_map = Prober(parameters, self._catalog, self._loader.load, self._cache).find()
        except EngineError:
            self._load_all(copy)
            raise
        # What cannot be seen flat matters where the loader writes to it.
        written = {
            name: reason
            for name, reason in unseen.items()
            if not torch.equal(before[name], _bits(self._tensors[name]))
        }
        return index_map.without(written), time.perf_counter() - start_s

    def _misplaced(self, live: LiveModel, copy: Checkpoint) -> set[str]:
        """The parameters that, after a load of the copy, do not hold it where the map says."""
        found: set[str] = set()
        for name in copy.tensors:
            found |= live.differing_parameters(name, _words(copy, name))
        return found

    def _check_layout(
        self,
        copy: Checkpoint,
        parameters: Mapping[str, Parameter],
        samples: Mapping[str, Sample],
        index_map: IndexMap | None,
    ) -> None:
        """Make sure that what the loader writes is what the engine computes with.

        An engine may arrange or convert weights after loading. Its own reload does what a start
        does; it must leave every parameter as the loader alone has left it. Where there is no
        reload, most of what the engine held when it was met must lie where it lies now.

        Raises:
            EngineError: It does not.
        """
        if "reload" in self._ways and self._loader.reload is not None:
            loaded = {name: digest_of(parameter) for name, parameter in parameters.items()}
            self._reload(copy)
            moved = [name for name, p in parameters.items() if digest_of(p) != loaded[name]]
            if self._loader.tensors is not None and not self.is_of(self._loader.tensors()):
                moved.append("a parameter that it replaces")
        elif index_map is None:
            moved = [name for name, p in parameters.items() if samples[name].is_replaced(p)]
        else:
            moved = moved_parameters(samples, index_map, copy, _words)
            moved += [
                name
                for name in index_map.refused
                if name in parameters and samples[name].is_replaced(parameters[name])
            ]
        if moved:
            raise EngineError(
                f"{len(moved)} of the engine's parameters, such as {moved[0]!r}, do not hold what "
                "its loader writes there: it arranges or converts weights after loading",
                hint="Only a reload is right then (way reload). Where the engine has none, start "
                "it from a checkpoint of this stream, so that this can be told",
            )

    def _uncovered(
        self, parameters: Mapping[str, Parameter], index_map: IndexMap
    ) -> dict[str, int]:
        """Parameters that no tensor of the checkpoint feeds, with their elements.

        Raises:
            EngineError: There are such, and nobody said that they may stay as they are.
        """
        placed = {index_map.parameter_name(n) for n in set(index_map.runs[:, 1].tolist())}
        found = {
            name: parameter.count
            for name, parameter in parameters.items()
            if name not in placed
            and name not in index_map.refused
            and name not in self._buffers
            and parameter.count >= _SCALE_ELEMENTS
        }
        for name in found:
            if not any(fnmatchcase(name, pattern) for pattern in self._unfed):
                raise EngineError(
                    f"the engine's parameter {name!r} is fed by no tensor of the checkpoint",
                    hint="Publish all of the model; or say that it stays as the engine has it "
                    "(unfed=[PATTERN], --unfed PATTERN)",
                )
        return found

    def _measure(self, live: LiveModel, copy: Checkpoint) -> None:
        """Find out what exchanging a word costs, by exchanging some with themselves."""
        name = max(copy.tensors, key=live.index_map.held_count)
        words = _words(copy, name)
        if not words.size:
            return
        count = max(1, int(words.size * _MEASURED_SHARE))
        at = np.unique(np.linspace(0, words.size - 1, count).astype(np.int64))
        swap = live.prepare([Change(name, at, words[at])])
        seconds = []
        for _ in range(_MEASURED_TIMES):
            start_s = time.perf_counter()
            swap.swap()
            self._loader.synchronize()
            seconds.append(time.perf_counter() - start_s)
        self._swap_s_per_word = min(seconds) / max(1, swap.word_count)

    def _load(self, copy: Checkpoint, names: Sequence[str]) -> None:
        if not names:
            return
        # Where two share a place, the one that comes later in the checkpoint stays.
        chosen = set(names)
        ordered = [name for name in copy.tensors if name in chosen]
        try:
            with torch.no_grad():
                self._loader.load((name, _as_tensor(copy, name)) for name in ordered)
        except Exception as error:
            raise EngineError(
                f"the engine's loader failed: {type(error).__name__}: {error}"[:500],
                hint="Is the engine's model the one of this stream?",
            ) from error
        self._loader.synchronize()

    def _reload(self, copy: Checkpoint) -> None:
        assert self._loader.reload is not None
        try:
            with torch.no_grad():
                self._loader.reload((name, _as_tensor(copy, name)) for name in copy.tensors)
        except Exception as error:
            raise EngineError(
                f"the engine's reload failed: {type(error).__name__}: {error}"[:500],
                hint="Restart the engine",
            ) from error
        self._loader.synchronize()

    def _patches(self, copy: Checkpoint, places: Mapping[str, Int64s | None]) -> list[Patch]:
        patches = []
        for name, positions in places.items():
            value = _as_tensor(copy, name).reshape(-1)
            at = np.arange(value.numel(), dtype=np.int64) if positions is None else positions
            index = torch.from_numpy(at)
            patches.append(Patch(name, copy.tensors[name].shape, index, value[index]))
        return patches

    def _check_same(self, copy: Checkpoint) -> None:
        found = {name: (t.dtype, t.shape) for name, t in copy.tensors.items()}
        if found != self._catalog:
            raise TensorMismatch(
                "the checkpoint's tensors are not those that the engine was attached with"
            )

    def _refuse_empty(self) -> None:
        empty = [name for name, tensor in self._tensors.items() if not tensor.numel()]
        held = [name for name in empty if name.endswith(("weight", "weight_packed"))]
        if held:
            raise EngineError(
                f"parameter {held[0]!r} is empty: the engine keeps its weights packed elsewhere, "
                "where they can be neither changed nor compared",
                hint="On a CPU, let vLLM load the thinwire plugin (pip install thinwire[vllm] into "
                "its environment): it keeps weights plain",
            )

    def _key(self, parameters: Mapping[str, Parameter]) -> str:
        """What a map depends on."""
        places = [(name, p.dtype, p.count) for name, p in parameters.items()]
        shapes = [list(self._tensors[name].shape) for name in parameters]
        strides = [list(self._tensors[name].stride()) for name in parameters]
        catalog = [(name, dtype, shape) for name, (dtype, shape) in self._catalog.items()]
        told = msgspec.json.encode([self._loader.identity, catalog, places, shapes, strides])
        return hashlib.sha256(told).hexdigest()[:32]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes."""
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _words(copy: Checkpoint, name: str) -> Words:
    tensor = copy.tensors[name]
    size = dtype_named(tensor.dtype).word_bytes
    data = tensor.data
    if data.ctypes.data % size:
        data = data.copy()
    return data.view(f"u{size}")


def _as_tensor(copy: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of the copy, borrowed from the mapped file: for reading only."""
    stored = copy.tensors[name]
    words = _words(copy, name)
    with warnings.catch_warnings():
        # Of a tensor that cannot be written, which nobody wants to.
        warnings.simplefilter("ignore", UserWarning)
        flat = torch.from_numpy(words.view(np.uint8))
    return flat.view(torch_dtype(stored.dtype)).reshape(stored.shape)
