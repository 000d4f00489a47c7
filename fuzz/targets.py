"""Every target by name."""

from __future__ import annotations

from fuzz.checkpoint import REDO_LOG, SAFETENSORS, WEIGHT_INDEX
from fuzz.container import CONTAINER
from fuzz.engine_files import INDEX_MAP, PLACES
from fuzz.stream import MANIFEST
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (CONTAINER, SAFETENSORS, WEIGHT_INDEX, REDO_LOG, MANIFEST, PLACES, INDEX_MAP)
}
