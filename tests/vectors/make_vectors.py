"""Makes the golden files of the present format version; refuses to rewrite any.

Run from the root of the repository::

    python -m tests.vectors.make_vectors [FOLDER]

Golden files say what the format is: code changes to fit them, not the other way round. So this
script writes only where nothing lies yet. A case that is added later goes into a folder of its own
(tests read every folder below this one that has a manifest), as does another format version.

FOLDER gets ``valid/NAME.tw`` with ``NAME.base.safetensors`` and ``NAME.new.safetensors`` (gzipped
where large), ``invalid/NAME.tw``, and ``manifest.json``, which gives each valid file's attachments
and, for each invalid one, whose base it is for and the code of the error.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from thinwire.codec.delta import Delta
from thinwire.codec.write import Attachment, Pair, write_delta
from thinwire.errors import ThinwireError

from ..codec.writer import zstd
from .invalid_cases import INVALID
from .valid_cases import ATTACHMENTS, VALID, Tensors

GZIP_FROM_BYTES = 20_000
MOST_BYTES = 20_000


def attachments_of(name: str) -> list[Attachment]:
    """Attachments as the writer takes them."""
    rows = []
    for file_name, kind, text, of_base in ATTACHMENTS.get(name, []):
        content = (of_base if text is None else text).encode()
        data = None if text is None else content
        digest = xxhash.xxh3_64_intdigest(content)
        rows.append(Attachment(file_name, kind, data, len(content), digest))
    return rows


def encode(base: Tensors, new: Tensors, attachments: list[Attachment]) -> bytes:
    """The delta; tensors in the order of new, then those that are gone."""

    def bits(tensors: Tensors, name: str) -> np.ndarray | None:
        return np.frombuffer(tensors[name][2], np.uint8) if name in tensors else None

    pairs = []
    for name, (dtype, shape, _) in (new | {n: t for n, t in base.items() if n not in new}).items():
        alike = name in base and base[name][:2] == (dtype, shape)
        pairs.append(Pair(name, dtype, shape, bits(base, name) if alike else None, bits(new, name)))
    out = io.BytesIO()
    write_delta(out, pairs, attachments)
    return out.getvalue()


def safetensors_bytes(tensors: Tensors) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(t[2] for t in tensors.values())


def error_code(base: Tensors, payload: bytes) -> str:
    """The code of the error that applying the delta raises."""
    try:
        with Delta.open(payload) as delta:
            bases = {name: np.frombuffer(t[2], np.uint8) for name, t in base.items()}
            delta.apply(bases, lambda entry: np.empty(entry.byte_count, np.uint8))
    except ThinwireError as error:
        return error.code
    return ""


def make_files() -> dict[str, bytes]:
    """All files by their path below the folder."""
    files: dict[str, bytes] = {}
    manifest: dict[str, Any] = {"format_version": 1, "zstd": zstd.zstd_version}
    manifest |= {"valid": {}, "invalid": {}}
    bases: dict[str, Tensors] = {}
    for name, make in VALID.items():
        base, new = make()
        bases[name] = base
        files[f"valid/{name}.tw"] = encode(base, new, attachments_of(name))
        manifest["valid"][name] = {
            "attachments": [
                {"name": a.name, "kind": a.kind, "size": a.size, "digest": f"{a.digest:016x}"}
                | {"text": None if a.data is None else a.data.decode()}
                for a in attachments_of(name)
            ]
        }
        for side, tensors in (("base", base), ("new", new)):
            data = safetensors_bytes(tensors)
            ending = ""
            if len(data) > GZIP_FROM_BYTES:
                data, ending = gzip.compress(data, 9, mtime=0), ".gz"
            files[f"valid/{name}.{side}.safetensors{ending}"] = data
    for name, (source, code, damage) in INVALID.items():
        payload = damage(files[f"valid/{source}.tw"])
        found = error_code(bases[source], payload)
        if found != code:
            raise SystemExit(
                f"invalid/{name}.tw gives {found!r}, not {code!r}: nothing was written"
            )
        files[f"invalid/{name}.tw"] = payload
        manifest["invalid"][name] = {"base_of": source, "error": code}
    files["manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode()
    return files


def main(folder: Path) -> None:
    """Write all files, or none where one of them exists."""
    files = make_files()
    existing = [path for path in files if (folder / path).exists()]
    if existing:
        raise SystemExit(f"{folder / existing[0]} exists: golden files are never rewritten")
    for path, data in files.items():
        if len(data) > MOST_BYTES:
            raise SystemExit(f"{path} would have {len(data)} bytes; the most is {MOST_BYTES}")
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with (folder / path).open("xb") as file:
            file.write(data)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes, in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
