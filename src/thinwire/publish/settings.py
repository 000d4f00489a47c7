"""What a trainer asks of a publisher that runs on its ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from thinwire.codec.chunk import Spec
from thinwire.follow.reference import source_of


class Settings(NamedTuple):
    """The same on every rank. What is not told here is as ``thinwire.torch.TorchPublisher`` says.

    Attributes:
        reference: Empty: the first version is uploaded as an anchor.
        metadata: What the headers of the first version's weights files say besides.
        may_lack: Whether a tensor of the stream, by name, is left out here on purpose.
    """

    new_lineage: bool = False
    reference: str = ""
    base: str | os.PathLike[str] | None = None
    files: Mapping[str, bytes] = {}
    weights_name: str = "model.safetensors"
    metadata: Mapping[str, str] = {}
    may_lack: Callable[[str], bool] = lambda name: False
    spec: Spec = Spec()
    workers: int = 1
    maintain: bool = True
    work_dir: Path | None = None

    def copy_folder(self) -> str | os.PathLike[str] | None:
        """Where the trainer says that the copy is: by ``base``, or by naming a folder to refer to.

        A folder that only the stream names is never opened: it is a path from elsewhere.
        """
        if self.base is not None or not self.reference:
            return self.base
        source = source_of(self.reference)
        return source.name if source.kind == "folder" else None
