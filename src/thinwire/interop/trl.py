"""TRL's delta weight sync: ``anchors/step_000010.safetensors``, ``deltas/step_000011.safetensors``.

TRL proposed it three times (pull requests 5417, 5932 and 5937) and never released it. An anchor is
all weights in one file. A delta has two tensors for each changed one, its positions and its new
values, in one of two layouts:

- v1 (5417): ``{name}.indices`` and ``{name}.values``; the metadata lists the names.
- v2 (5932, 5937): ``{name}.idx`` and ``{name}.val``, positions as they are (``raw``) or as gaps of
  16 or 32 bits (``gap_delta``); a third encoding is a library's own, and not read here.

Nothing in a file says what the weights were before or, but for the first drafts of v1, what they
are afterwards: **a wrong base cannot be noticed** where its sizes allow the positions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.checkpoint import Checkpoint
from thinwire.checkpoint.disk import map_file, os_errors
from thinwire.checkpoint.safetensors_file import LENGTH_BYTES, SafetensorsFile, StoredTensor
from thinwire.errors import (
    ChecksumMismatch,
    FormatError,
    TensorMismatch,
    ThinwireError,
    Unsupported,
)
from thinwire.interop.foreign import (
    MAX_DESCRIPTION_BYTES,
    MAX_TENSORS,
    ChainVersion,
    Facts,
    ForeignDelta,
    ForeignTensor,
    check_count,
    require_base,
    rule_broken,
)
from thinwire.interop.sparse import NewWords, words_of
from thinwire.interop.trl_layout import (
    BASE_KEY,
    EMPTY_KEY,
    INDEX_DTYPES,
    LAYOUTS,
    PATCH,
    RAW,
    SYSTEM,
    VALUE_DTYPE,
    decode_index,
    step_of,
)
from thinwire.interop.trl_writing import write_delta, write_full

NAME = "trl"

_NAMES_KEY = "changed_params"
_NUMBER = re.compile(r"[0-9]{1,15}")


class TrlDelta(ForeignDelta):
    """One opened delta; see :class:`thinwire.interop.foreign.ForeignDelta`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = file = _open_file(path)
        layout_name = _layout_of(file)
        if layout_name is None:
            raise rule_broken(
                SYSTEM,
                "its metadata is not that of a delta, or none of its tensors is",
                file=path,
                error=Unsupported,
                hint="An anchor is a checkpoint: open it as one",
            )
        self._layout = LAYOUTS[layout_name]
        self._encoding = file.metadata.get("encoding", RAW)
        if self._encoding not in self._layout.encodings:
            raise rule_broken(
                SYSTEM,
                f"positions coded as {self._encoding[:40]!r} are not read here",
                file=path,
                error=Unsupported,
                hint=f"Have it written as one of {', '.join(self._layout.encodings)}",
            )
        names = self._names()
        if _NAMES_KEY in file.metadata:
            self._check_listed(names)
        self._tensors = {name: self._check_pair(name) for name in names}
        self._check_counts()
        version = self._number("model_version", step_of(path.name))
        base_version = self._number(BASE_KEY, None if version is None else version - 1)
        self._facts = Facts(
            format=NAME,
            encoding=self._encoding,
            version=version,
            base_version=base_version,
            file_bytes=file.header.file_bytes,
            metadata={
                **{key: text for key, text in file.metadata.items() if key != _NAMES_KEY},
                "layout": layout_name,
            },
        )

    @property
    def facts(self) -> Facts:
        """See :class:`ForeignDelta`; the base is the version before where the file is silent."""
        return self._facts

    @property
    def tensors(self) -> Mapping[str, ForeignTensor]:
        """See :class:`ForeignDelta`."""
        return self._tensors

    def new_tensor(self, name: str, base: StoredTensor | None) -> StoredTensor:
        """See :class:`ForeignDelta`. There is no checksum that could tell a wrong base."""
        old = require_base(SYSTEM, name, base, self._path)
        if old.dtype != VALUE_DTYPE:
            raise TensorMismatch(
                f"{self._path}: tensor {name[:200]!r} is {old.dtype} in the base, and values are"
                f" {VALUE_DTYPE} ({SYSTEM} format)",
                hint="Give the checkpoint that the delta was made from, with BF16 weights",
                tensor=name,
            )
        index, values = self._pair(name)
        new = NewWords(SYSTEM, self._path, name, old)
        # Positions carry a sign only in the raw encoding: one that is negative is found there.
        signed = "<i4" if index.dtype == "I32" else None
        index_words = words_of(index).view(signed) if signed else words_of(index)
        start, new_words = 0, words_of(values)
        for positions in decode_index(index_words, self._encoding):
            new.put(positions, new_words[start : start + positions.size])
            start += positions.size
        return new.finish()

    def check_weights(self, base: Checkpoint) -> bool:
        """Compare the hash of all new weights with what the file says: the first drafts of v1 do.

        Every tensor is decoded once more for that, one at a time.

        Returns:
            Whether they are proved to be the trainer's. False: the file has no hash, or the base
            has weights that are not BF16, of which the trainer hashed a rounded copy.

        Raises:
            ChecksumMismatch: They are not, as with any base but the trainer's.
            FormatError, ApplyError: As :meth:`new_tensor`.
        """
        said = self._file.metadata.get("checksum_sha256")
        if not said or any(tensor.dtype != VALUE_DTYPE for tensor in base.tensors.values()):
            return False
        hasher = hashlib.sha256()
        for name, old in sorted(base.tensors.items()):
            new = self.new_tensor(name, old) if name in self._tensors else old
            hasher.update(new.data.data)
        if hasher.hexdigest() != said:
            raise ChecksumMismatch(
                f"{self._path}: the new weights are not those of its checksum_sha256"
                f" ({SYSTEM} format)",
                hint="Give the checkpoint that the delta was made from, or fetch the delta again",
                file=str(self._path),
            )
        return True

    def close(self) -> None:
        """Nothing to let go of: the file is unmapped with its last view."""

    def _names(self) -> list[str]:
        """The changed tensors in the file's order; each key is one half of one of them."""
        names: dict[str, None] = {}
        for key in self._file.tensors:
            suffix = next((end for end in self._layout[:2] if key.endswith(end)), None)
            if suffix is not None:
                names[key.removesuffix(suffix)] = None
            elif key != EMPTY_KEY or len(self._file.tensors) > 1:
                raise self._fault("is neither positions nor values", key, error=Unsupported)
        return list(names)

    def _pair(self, name: str) -> tuple[StoredTensor, StoredTensor]:
        tensors = self._file.tensors
        return tensors[name + self._layout.index_suffix], tensors[name + self._layout.value_suffix]

    def _check_pair(self, name: str) -> ForeignTensor:
        for suffix in self._layout[:2]:
            if name + suffix not in self._file.tensors:
                raise self._fault(f"its {suffix!r} is missing", name)
        index, values = self._pair(name)
        if values.dtype != VALUE_DTYPE:
            raise self._fault(f"its values are {values.dtype}, not {VALUE_DTYPE}", name)
        if index.dtype not in INDEX_DTYPES[self._encoding]:
            wanted = " or ".join(INDEX_DTYPES[self._encoding])
            raise self._fault(f"its positions are {index.dtype}, not {wanted}", name)
        if len(index.shape) != 1 or index.shape != values.shape:
            raise self._fault(
                f"{list(index.shape)[:4]} positions for {list(values.shape)[:4]} values", name
            )
        payload_bytes = index.data.size + values.data.size
        return ForeignTensor(payload_bytes, VALUE_DTYPE, changed_count=values.shape[0])

    def _check_listed(self, names: list[str]) -> None:
        try:
            listed = json.loads(self._file.metadata[_NAMES_KEY])
        except (ValueError, RecursionError):
            listed = None
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise self._fault("its changed_params is not a list of names")
        if len(listed) != len(names) or set(listed) != set(names):
            raise self._fault("its changed_params are not the tensors that it holds")

    def _check_counts(self) -> None:
        counts = {
            "num_changed_params": len(self._tensors),
            "total_changed_elements": sum(row.changed_count or 0 for row in self._tensors.values()),
        }
        for key, count in counts.items():
            said = self._number(key, count)
            if said != count:
                raise self._fault(f"its {key} is {said}, and it holds {count}")

    def _number(self, key: str, otherwise: int | None) -> int | None:
        text = self._file.metadata.get(key)
        if text is None or (key == BASE_KEY and text == "-1"):
            return otherwise
        if not _NUMBER.fullmatch(text):
            raise self._fault(f"its {key} is no whole number: {text[:40]!r}")
        if key == "model_version" and otherwise not in (None, int(text)):
            raise self._fault(f"its model_version is {int(text)}, and its name says {otherwise}")
        return int(text)

    def _fault(self, rule: str, name: str | None = None, **kind: Any) -> FormatError:
        return rule_broken(SYSTEM, rule, file=self._path, tensor=name, **kind)


def is_delta(path: Path) -> bool:
    """Whether a file looks like a delta of TRL's."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    try:
        return _layout_of(_open_file(path)) is not None
    except ThinwireError:
        return False


def open_delta(path: Path) -> TrlDelta:
    """Open one delta, a file, and check all that can be checked without the base.

    Raises:
        FormatError: It is malformed, or coded in a way that is not read here.
        StoreError: It cannot be read.
    """
    return TrlDelta(path)


def list_versions(folder: Path) -> list[ChainVersion]:
    """The steps in ``anchors`` and ``deltas``, oldest first.

    Where a step has both, it is the delta if the step before it is there, so that a chain stays
    one.

    Raises:
        FormatError: A delta's metadata is malformed.
        StoreError: A folder cannot be listed.
    """
    anchors, deltas = _steps(folder / "anchors"), _steps(folder / "deltas")
    versions: list[ChainVersion] = []
    for step in sorted(anchors.keys() | deltas.keys()):
        before = versions[-1].version if versions else None
        if step in deltas:
            base_version = _base_version(deltas[step], step)
            if step not in anchors or base_version == before:
                path = deltas[step]
                versions.append(ChainVersion(step, base_version, path, f"deltas/{path.name}"))
                continue
        path = anchors[step]
        versions.append(ChainVersion(step, None, path, f"anchors/{path.name}"))
    return versions


def _open_file(path: Path) -> SafetensorsFile:
    """A file whose header is not larger than a delta's can be."""
    header_bytes = int.from_bytes(map_file(path)[:LENGTH_BYTES].tobytes(), "little")
    check_count(SYSTEM, "bytes of header", header_bytes, MAX_DESCRIPTION_BYTES, path)
    file = SafetensorsFile.open(path)
    check_count(SYSTEM, "tensors", len(file.tensors), 2 * MAX_TENSORS, path)
    return file


def _layout_of(file: SafetensorsFile) -> str | None:
    """Which layout a delta has, by its metadata and names; None: it is no delta."""
    metadata = file.metadata
    if metadata.get("sparse", "True") != "True":
        return None
    if metadata.get("format") == PATCH and "encoding" in metadata:
        name = "v2"
    elif _NAMES_KEY in metadata:
        name = "v1"
    else:
        return None
    # The first drafts do not say whether a file is sparse: whole tensors alone are an anchor.
    ends = (*LAYOUTS[name][:2], EMPTY_KEY)
    return name if not file.tensors or any(key.endswith(ends) for key in file.tensors) else None


def _steps(folder: Path) -> dict[int, Path]:
    """The files of a folder by their step; none where there is no such folder."""
    if not folder.is_dir():
        return {}
    with os_errors("cannot list", folder):
        paths = [path for path in folder.iterdir() if path.is_file()]
    named = {step_of(path.name): path for path in sorted(paths)}
    return {step: path for step, path in named.items() if step is not None}


def _base_version(path: Path, step: int) -> int:
    said = _open_file(path).metadata.get(BASE_KEY, "")
    return int(said) if _NUMBER.fullmatch(said) else step - 1


__all__ = [
    "NAME",
    "TrlDelta",
    "is_delta",
    "list_versions",
    "open_delta",
    "write_delta",
    "write_full",
]
