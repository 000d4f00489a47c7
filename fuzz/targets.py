"""Every target by name."""

from __future__ import annotations

from fuzz.checkpoint import REDO_LOG, SAFETENSORS, WEIGHT_INDEX
from fuzz.container import CONTAINER
from fuzz.engine_files import INDEX_MAP, PLACES
from fuzz.interop_arc import ARC_V1, ARC_V2, ARC_V3
from fuzz.interop_nemo import NEMO
from fuzz.interop_payloads import SKYRL, SLIME
from fuzz.interop_pickles import PICKLES
from fuzz.interop_sparse import GRAIL, TRL
from fuzz.stream import MANIFEST
from fuzz.target import Target

_OWN = (CONTAINER, SAFETENSORS, WEIGHT_INDEX, REDO_LOG, MANIFEST, PLACES, INDEX_MAP)
_FOREIGN = (ARC_V1, ARC_V2, ARC_V3, SLIME, SKYRL, TRL, GRAIL, NEMO, PICKLES)

TARGETS: dict[str, Target] = {target.name: target for target in (*_OWN, *_FOREIGN)}
