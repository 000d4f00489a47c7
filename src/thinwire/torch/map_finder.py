"""The index map of a running model: from a cache or by probing, and made sure of in any case."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from thinwire.checkpoint import Checkpoint
from thinwire.errors import EngineError
from thinwire.torch.copy_loader import CopyLoader
from thinwire.torch.index_map import IndexMap
from thinwire.torch.live import Parameter, parameters_of
from thinwire.torch.map_file import read_map, write_map
from thinwire.torch.probing import Catalog, Prober
from thinwire.torch.samples import Layout
from thinwire.torch.scatter import LiveModel
from thinwire.torch.stored import words_of


class Mapped(NamedTuple):
    """A model whose map was found.

    Attributes:
        live: The model, seen through the map.
        parameters: What of it can be seen flat, by name.
        unseen: What cannot, with why.
        is_cached: Whether the map came from the cache.
        probe_s: Seconds that probing took.
        load_s: Seconds that the engine's loader took for all tensors.
    """

    live: LiveModel
    parameters: Mapping[str, Parameter]
    unseen: Mapping[str, str]
    is_cached: bool
    probe_s: float
    load_s: float


class MapFinder:
    """Finds the index map of a model that nobody uses meanwhile.

    Args:
        tensors: The model's parameters and buffers by name.
        loader: What the engine can do.
        cache: A folder for maps that were found.
        may_reload: Whether the engine's reload may be called, to compare what it leaves.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        loader: CopyLoader,
        cache: Path,
        *,
        may_reload: bool,
    ) -> None:
        self._tensors = tensors
        self._loader = loader
        self._cache = cache
        self._may_reload = may_reload

    def find(self, copy: Checkpoint) -> Mapped:
        """Find it; then the model holds the host's copy, as far as the map shows.

        Raises:
            EngineError: There is no map that is right; what the model holds may be anything.
        """
        catalog = {name: (t.dtype, t.shape) for name, t in copy.tensors.items()}
        parameters, unseen = parameters_of(self._tensors.items())
        layout = Layout(self._tensors, parameters)
        path = self._cache / f"{self._key(catalog, parameters)}.map"
        index_map = read_map(path)
        probe_s, load_s = 0.0, self._loader.load_all(copy)
        if index_map is not None and _misplaced(LiveModel(parameters, index_map), copy):
            # What the engine's own loader wrote is not where the map says.
            index_map = None
        is_cached = index_map is not None
        if index_map is None:
            index_map, probe_s = self._probe(catalog, parameters, unseen, copy)
            self._loader.load_all(copy)
            changed = _misplaced(LiveModel(parameters, index_map), copy)
            index_map = index_map.without(
                dict.fromkeys(changed, "the loader changes some of the values that it writes to it")
            )
        layout.check(copy, self._loader, index_map, may_reload=self._may_reload)
        if not is_cached:
            write_map(path, index_map)
        live = LiveModel(parameters, index_map)
        return Mapped(live, parameters, unseen, is_cached, probe_s, load_s)

    def _probe(
        self,
        catalog: Catalog,
        parameters: Mapping[str, Parameter],
        unseen: Mapping[str, str],
        copy: Checkpoint,
    ) -> tuple[IndexMap, float]:
        """Probe; where that fails, the copy is loaded again.

        Raises:
            EngineError: The loader fails.
        """
        before = {name: _bits(self._tensors[name]) for name in unseen}
        start_s = time.perf_counter()
        try:
            index_map = Prober(parameters, catalog, self._loader.loader.load, self._cache).find()
        except EngineError:
            self._loader.load_all(copy)
            raise
        # What cannot be seen flat matters where the loader writes to it.
        written = {
            name: reason
            for name, reason in unseen.items()
            if not torch.equal(before[name], _bits(self._tensors[name]))
        }
        return index_map.without(written), time.perf_counter() - start_s

    def _key(self, catalog: Catalog, parameters: Mapping[str, Parameter]) -> str:
        """What a map depends on."""
        places = [(name, p.dtype, p.count) for name, p in parameters.items()]
        shapes = [list(self._tensors[name].shape) for name in parameters]
        strides = [list(self._tensors[name].stride()) for name in parameters]
        tensors = [(name, dtype, shape) for name, (dtype, shape) in catalog.items()]
        told = msgspec.json.encode([self._loader.loader.identity, tensors, places, shapes, strides])
        return hashlib.sha256(told).hexdigest()[:32]


def _misplaced(live: LiveModel, copy: Checkpoint) -> set[str]:
    """The parameters that, after a load of the copy, do not hold it where the map says."""
    found: set[str] = set()
    for name in copy.tensors:
        found |= live.differing_parameters(name, words_of(copy.tensors[name]))
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's bytes."""
    return tensor.detach().reshape(-1).clone().view(torch.uint8)
