"""``thinwire cat``: one tensor at one version."""

from __future__ import annotations

import glob
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json, ModelCopy, Trust, Url
from thinwire.cli.output import print_json, printable
from thinwire.cli.signals import terminable
from thinwire.errors import AlreadyExists, InvalidArgument, NotFound

if TYPE_CHECKING:
    from thinwire.checkpoint.safetensors_file import StoredTensor
    from thinwire.stream.version import Version


def cat(
    url: Url,
    tensor: Annotated[str, typer.Argument(help="The tensor's name.")],
    version: Annotated[
        int | None,
        typer.Option("--version", min=1, show_default=False, help="Default: the newest."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", show_default=False, help="The file for the bytes."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    trust: Trust = None,
    base: ModelCopy = None,
    cache: Annotated[
        Path | None,
        typer.Option(show_default=False, help="A folder of fetched blocks, shared by followers."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the bytes of one tensor, row-major and little-endian, to OUT or stdout.

    On a terminal without -o, and with --json, its dtype, shape, digest and first values are shown
    instead. Only the parts of the stream that the tensor needs are fetched, and verified.
    """
    with reported(as_json), terminable():
        from thinwire.checkpoint.disk import os_errors
        from thinwire.follow import Follower, open_stream

        if out is not None and not overwrite and out.exists():
            raise AlreadyExists(f"{out} exists", hint="Choose another path, or --overwrite")
        stream = open_stream(url, trusted_keys=trust or ())
        with (
            os_errors("cannot work in", tempfile.gettempdir()),
            tempfile.TemporaryDirectory(prefix="thinwire-cat-") as folder,
            Follower(
                stream,
                folder,
                tensors=[glob.escape(tensor)],
                base=base,
                cache_dir=cache,
                lease=False,
            ) as follower,
        ):
            try:
                held = follower.catch_up("latest" if version is None else version)
            except InvalidArgument as error:
                if "tensors" not in error.context:
                    raise
                raise NotFound(
                    f"{stream.url} has no tensor {tensor!r}",
                    hint="Names are those in the checkpoint's safetensors files",
                    tensor=tensor,
                ) from error
            found = follower.sink.checkpoint().tensors[tensor]
            if out is not None:
                _write(out, found, overwrite)
            if as_json:
                print_json(_as_json(tensor, held, found, out))
            elif out is not None:
                print(f"{printable(str(out))}: {found.data.size:,} bytes of {_title(tensor, held)}")
            elif sys.stdout.isatty():
                _show(tensor, held, found)
            else:
                sys.stdout.buffer.write(found.data.data)
                sys.stdout.buffer.flush()


def _write(out: Path, tensor: StoredTensor, overwrite: bool) -> None:
    from thinwire.checkpoint.disk import (
        put_in_place,
        remove_quietly,
        temporary_sibling,
        write_file,
    )

    temporary = temporary_sibling(out)
    try:
        write_file(temporary, tensor.data.data)
        put_in_place(temporary, out, overwrite=overwrite)
    finally:
        remove_quietly(temporary)


def _digest(tensor: StoredTensor) -> str:
    from thinwire.codec.digest import tensor_digest

    return f"{tensor_digest(tensor.dtype, tensor.data):016x}"


def _title(name: str, held: Version) -> str:
    return f"{printable(name)} at version {held.version}"


def _show(name: str, held: Version, tensor: StoredTensor) -> None:
    from thinwire.cli.values import FIRST_COUNT, first_values

    shape = "x".join(map(str, tensor.shape)) or "scalar"
    print(f"{_title(name, held)}: {tensor.dtype} {shape}, {tensor.data.size:,} bytes")
    print(f"digest {_digest(tensor)}")
    values = first_values(tensor.dtype, tensor.data)
    print(" ".join(values) + (" ..." if len(values) == FIRST_COUNT else ""), flush=True)


def _as_json(name: str, held: Version, tensor: StoredTensor, out: Path | None) -> dict[str, Any]:
    from thinwire.cli.values import first_values

    return {
        "tensor": name,
        "version": held.version,
        "step": held.step,
        "lineage": held.lineage,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": int(tensor.data.size),
        "digest": _digest(tensor),
        "first_values": first_values(tensor.dtype, tensor.data),
        "out": None if out is None else str(out),
    }
