"""A whole version into a sink: from an anchor, or from a copy that is already here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from thinwire.checkpoint import Checkpoint, SafetensorsFile
from thinwire.checkpoint.apply import build_weights, write_small_file
from thinwire.checkpoint.disk import ByteArray, create_mapped, map_file, sync
from thinwire.checkpoint.file_names import INDEX_NAME, is_weights_name
from thinwire.checkpoint.plan import plan_result
from thinwire.checkpoint.safetensors_file import (
    LENGTH_BYTES,
    Header,
    StoredTensor,
    parse_header,
)
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.digest import tensor_digest
from thinwire.errors import ChecksumMismatch
from thinwire.follow.fetch import Fetcher, Wanted
from thinwire.follow.reference import check_content
from thinwire.follow.selection import Selection, is_held
from thinwire.follow.sink import Mark, Sink
from thinwire.follow.steps import Step, Weights, check_weights
from thinwire.stream.blocks import blocks_of
from thinwire.stream.weights import weights_digest

OnBytes = Callable[[int], None] | None


def install_anchor(
    sink: Sink,
    step: Step,
    mark: Mark,
    fetcher: Fetcher,
    selection: Selection,
    on_bytes: OnBytes = None,
) -> None:
    """Fetch an anchor and make it the sink's content.

    Raises:
        ChecksumMismatch: It is not what the manifest says. The sink is as it was.
    """
    with sink.installing(mark) as staged:
        staged_files: dict[str, Path] = {}
        for name, wanted in step.files.items():
            if is_weights_name(name):
                path = staged_files[name] = staged.path_for(name)
                if selection.is_all:
                    fetcher.into_file(wanted, path, on_bytes=on_bytes)
                else:
                    _fetch_part(fetcher, wanted, path, sink.scratch(), selection)
            elif selection.is_all or name != INDEX_NAME:
                fetcher.into_file(wanted, staged.path_for(name), on_bytes=on_bytes)
        if selection.is_all:
            _check_files(staged_files, step)


def install_reference(
    sink: Sink,
    step: Step,
    mark: Mark,
    delta: DeltaSet,
    copy: Checkpoint,
    selection: Selection,
    on_bytes: OnBytes = None,
) -> None:
    """Prove a local copy and make the version out of it, file for file as the publisher has it.

    Raises:
        BaseMismatch, TensorMismatch: The copy holds other weights. The sink is as it was.
    """
    assert step.manifest is not None
    check_weights(Weights.of_entries(delta.tensors.values()), step, None)
    check_content(copy, step.manifest.content)
    plan = plan_result(copy, delta)
    with sink.installing(mark) as staged:
        if selection.is_all:
            paths = {file.name: staged.path_for(file.name) for file in plan.weights}
            build_weights(copy, delta, plan.weights, paths, workers=1, on_bytes=on_bytes)
        else:
            for file in plan.weights:
                tensors = {name: copy.tensors[name].data for name in file.header.spans}
                _write_part(file.header, tensors, staged.path_for(file.name), selection)
        for small in plan.files:
            if selection.is_all or small.name != INDEX_NAME:
                write_small_file(copy, delta, small, staged.path_for(small.name))


def weights_of(tensors: Mapping[str, StoredTensor]) -> str:
    """The digest of all tensors of a checkpoint, read from its bytes."""
    return weights_digest(
        (name, tensor.dtype, list(tensor.shape), f"{tensor_digest(tensor.dtype, tensor.data):016x}")
        for name, tensor in tensors.items()
    )


def tensors_in(files: Mapping[str, Path]) -> dict[str, StoredTensor]:
    """The tensors of the weights files among files that lie under other names, as staged ones do.

    Raises:
        FormatError: A weights file is malformed.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, path in files.items():
        if is_weights_name(name):
            tensors.update(SafetensorsFile.open(path).tensors)
    return tensors


def _check_files(files: Mapping[str, Path], step: Step) -> None:
    """Raise ChecksumMismatch unless staged weights files hold the weights of the manifest."""
    if weights_of(tensors_in(files)) != step.weights:
        raise ChecksumMismatch(
            f"the anchor of version {step.target.version} holds other weights than its manifest "
            "says",
            hint="`thinwire fsck` shows what is wrong with the stream",
            version=step.target.version,
        )


def _fetch_part(
    fetcher: Fetcher, wanted: Wanted, path: Path, scratch: Path, selection: Selection
) -> None:
    """Fetch the chosen tensors of a weights file, and write a file of just these."""
    sparse = scratch / "anchor-part"
    sparse.unlink(missing_ok=True)
    fetched: set[int] = set()

    def have(ranges: list[tuple[int, int]]) -> ByteArray:
        missing = set(blocks_of(wanted.record, ranges)) - fetched
        if missing:
            fetcher.into_file(wanted, sparse, missing)
            fetched.update(missing)
        return map_file(sparse)

    length = min(LENGTH_BYTES, wanted.record.size)
    first = int.from_bytes(have([(0, length)])[:length].tobytes(), "little")
    # What a hostile length would reach beyond is cut, and the parser says so.
    stop = min(wanted.record.size, LENGTH_BYTES + first)
    header = parse_header(have([(0, stop)])[:stop].tobytes(), wanted.what)
    spans = [header.spans[name] for name in _chosen(header, selection)]
    data = have([(0, stop), *((span.start, span.stop) for span in spans)])
    tensors = {name: data[s.start : s.stop] for name, s in header.spans.items()}
    _write_part(header, tensors, path, selection)
    sparse.unlink()


def _chosen(header: Header, selection: Selection) -> list[str]:
    """The tensors that a partial follower keeps of a file."""
    return [
        name
        for name, span in header.spans.items()
        if is_held(name, span.dtype, span.shape, selection)
    ]


def _write_part(
    header: Header, tensors: Mapping[str, ByteArray], path: Path, selection: Selection
) -> None:
    """Write a safetensors file of the chosen tensors."""
    chosen = _chosen(header, selection)
    fields: dict[str, object] = {}
    if header.metadata:
        fields["__metadata__"] = dict(header.metadata)
    at = 0
    for name in chosen:
        span = header.spans[name]
        size = span.stop - span.start
        offsets = [at, at + size]
        fields[name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": offsets}
        at += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    view = create_mapped(path, LENGTH_BYTES + len(text) + at)
    view[: LENGTH_BYTES + len(text)] = memoryview(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    for data, start in _placed(chosen, tensors, LENGTH_BYTES + len(text)):
        view[start : start + data.size] = data
    sync(path)


def _placed(
    chosen: list[str], tensors: Mapping[str, ByteArray], start: int
) -> Iterator[tuple[ByteArray, int]]:
    for name in chosen:
        yield tensors[name], start
        start += tensors[name].size
