"""Every other system's format by name, and which one a file or a folder has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import os_errors
from thinwire.codec.container import MAGIC
from thinwire.errors import InvalidArgument
from thinwire.interop.change import Change
from thinwire.interop.foreign import ChainVersion, ForeignDelta, OutFile


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format. Its module is imported when it is used.

    Attributes:
        name: As ``--to`` and ``--format`` take it.
        system: Whose it is.
        module: Where its functions are.
        reads: Whether deltas of it are read.
        writes_deltas: Whether deltas of it are written.
        writes_full: Whether full versions of it are written.
        has_folders: Whether a version is a folder of its own; else it is one file.
        is_contiguous: Whether a reader only takes the delta from one version to the very next.
        names_anchor: Whether a delta says which full version is the newest before it.
        full_every: After so many deltas a mirror writes a full version; 0: it need not.
        options: What a user may ask its writer of deltas for, and the values that it takes.
        name_pattern: What a version's name looks like: its folder, or its file.
        pointer: The object that names the newest version's folder, written anew with each; empty:
            there is none.
    """

    name: str
    system: str
    module: str
    reads: bool = True
    writes_deltas: bool = True
    writes_full: bool = True
    has_folders: bool = True
    is_contiguous: bool = False
    names_anchor: bool = False
    full_every: int = 0
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    name_pattern: str = r"(?!)"
    pointer: str = ""

    def is_delta(self, path: Path) -> bool:
        """Whether a file or folder looks like one delta of this format."""
        return self.reads and bool(self._function("is_delta")(path))

    def open_delta(self, path: Path) -> ForeignDelta:
        """Open one delta.

        Raises:
            FormatError, StoreError: It is malformed, or cannot be read.
        """
        opened: ForeignDelta = self._function("open_delta")(path)
        return opened

    def list_versions(self, folder: Path) -> list[ChainVersion]:
        """The versions of a chain, oldest first; none where the folder holds no such chain."""
        found: list[ChainVersion] = self._function("list_versions")(folder)
        return found

    def write_delta(
        self,
        change: Change,
        out: Path,
        *,
        version: int,
        base_version: int,
        workers: int = 1,
        **options: Any,
    ) -> list[OutFile]:
        """Write one delta into the empty folder ``out``: the same bytes for any number of threads.

        Raises:
            TensorMismatch, Unsupported: The format has no delta for that.
            StoreError: The disk is full.
        """
        if not self.writes_deltas:
            raise InvalidArgument(
                f"deltas of the {self.name} format are not written here",
                hint=f"Write one of {', '.join(names(lambda other: other.writes_deltas))}",
            )
        written: list[OutFile] = self._function("write_delta")(
            change,
            out,
            version=version,
            base_version=base_version,
            workers=workers,
            **options,
        )
        return written

    def write_full(
        self, checkpoint: Checkpoint, out: Path, *, version: int, **options: Any
    ) -> list[OutFile]:
        """Write one full version; what need not change is named where it lies.

        Raises:
            InvalidArgument: The format has no full versions.
            Unsupported: It cannot carry these weights.
        """
        if not self.writes_full:
            raise InvalidArgument(
                f"{self.system} has no full versions: both sides begin with the same checkpoint",
                hint="Begin with the checkpoint that the first delta was made from",
            )
        written: list[OutFile] = self._function("write_full")(
            checkpoint, out, version=version, **options
        )
        return written

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuse what the format's writer cannot be asked for.

        Raises:
            InvalidArgument: An option, or its value, is not known.
        """
        for name, value in options.items():
            known = self.options.get(name)
            if known is None:
                names = ", ".join(self.options) or "none"
                raise InvalidArgument(
                    f"the {self.name} format has no option {name!r}", hint=f"It has: {names}"
                )
            if value not in known:
                raise InvalidArgument(
                    f"the {self.name} format has no {name} {str(value)[:40]!r}",
                    hint=f"It has: {', '.join(known)}",
                )

    def _function(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(self.module), name)
        return found


_ROOM = "thinwire.interop"
FORMATS = {
    row.name: row
    for row in (
        Format(
            name="slime",
            system="slime's weight_v",
            module=f"{_ROOM}.slime",
            is_contiguous=True,
            full_every=50,
            options={
                "encoding": ("xor", "overwrite"),
                "checksum": ("xxh3-128", "blake3", "adler32"),
            },
            name_pattern=r"weight_v\d{6,18}",
        ),
        Format(
            name="fireworks",
            system="Fireworks' hot-load",
            module=f"{_ROOM}.fireworks.folder",
            full_every=25,
            options={"compression_format": ("arc_v2", "arc_v1", "arc_v3")},
            name_pattern=r"step-\d{8,18}|v\d{8,18}-[0-9a-f]{8}(-full-\d{1,9})?",
        ),
        Format(
            name="trl",
            system="TRL's delta weight sync",
            module=f"{_ROOM}.trl",
            has_folders=False,
            full_every=10,
            options={"layout": ("v2", "v1"), "encoding": ("gap_delta", "raw")},
            name_pattern=r"(deltas|anchors)/step_\d{6,18}\.safetensors",
        ),
        Format(
            name="skyrl",
            system="SkyRL's delta sync",
            module=f"{_ROOM}.skyrl",
            writes_full=False,
            is_contiguous=True,
            options={"checksum": ("xxh3-128", "sha256")},
            name_pattern=r"delta-\d{8,18}",
        ),
        Format(
            name="grail",
            system="grail's PULSE",
            module=f"{_ROOM}.grail",
            names_anchor=True,
            full_every=10,
            options={"layout": ("v3.1", "v3", "v2")},
            name_pattern=r"checkpoint-\d{1,18}",
        ),
        Format(
            name="nemo",
            system="NeMo-RL's sparse refit",
            module=f"{_ROOM}.nemo",
            writes_deltas=False,
            writes_full=False,
        ),
        Format(
            name="hf",
            system="Hugging Face's",
            module=f"{_ROOM}.hf",
            reads=False,
            writes_deltas=False,
            name_pattern=r"version_\d{6,18}",
            pointer="latest",
        ),
    )
}


def names(is_wanted: Callable[[Format], bool]) -> list[str]:
    """The names of the formats of a kind."""
    return [row.name for row in FORMATS.values() if is_wanted(row)]


def format_named(name: str) -> Format:
    """The format called ``name``.

    Raises:
        InvalidArgument: There is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        known = names(lambda row: row.writes_deltas or row.writes_full)
        raise InvalidArgument(
            f"no format {name[:40]!r}", hint=f"Known are thinwire, {', '.join(known)}"
        ) from None


def format_of(path: Path) -> Format | None:
    """Which format one delta has, by a look at it; None: none of these, such as thinwire's own."""
    if path.is_file():
        with os_errors("cannot read", path), path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return None
    return next((row for row in FORMATS.values() if row.is_delta(path)), None)


def chain_of(folder: Path) -> tuple[Format, list[ChainVersion]] | None:
    """Which format the chain in a folder has, and its versions; None: none of these."""
    if not folder.is_dir():
        return None
    for row in FORMATS.values():
        if row.name != "nemo" and (versions := row.list_versions(folder)):
            return row, versions
    return None
