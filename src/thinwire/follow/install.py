"""A whole version into a sink: from an anchor, or from a copy that is already here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from thinwire.checkpoint import Checkpoint, SafetensorsFile
from thinwire.checkpoint.apply import build_weights, write_small_file
from thinwire.checkpoint.disk import ByteArray, create_mapped, map_file, sync
from thinwire.checkpoint.file_names import INDEX_NAME, is_weights_name
from thinwire.checkpoint.plan import plan_result
from thinwire.checkpoint.safetensors_file import (
    LENGTH_BYTES,
    Header,
    build_header,
    check_header_bytes,
    parse_header,
)
from thinwire.codec.delta_set import DeltaSet
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.errors import ChecksumMismatch, InvalidArgument
from thinwire.follow.fetch import Fetcher, Wanted
from thinwire.follow.reference import check_content
from thinwire.follow.selection import Selection, is_held
from thinwire.follow.sink import Mark, Sink
from thinwire.follow.steps import Step
from thinwire.stream.blocks import blocks_of
from thinwire.stream.weights import LayoutRow, layout_digest, weights_digest

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
        wanted_count = 0
        for name, wanted in step.files.items():
            if is_weights_name(name):
                path = staged_files[name] = staged.path_for(name)
                if selection.is_all:
                    fetcher.into_file(wanted, path, on_bytes=on_bytes)
                else:
                    scratch = sink.scratch()
                    header = _fetch_part(fetcher, wanted, path, scratch, selection)
                    wanted_count += _count_wanted(header, selection)
            elif selection.is_all or name != INDEX_NAME:
                path = staged_files[name] = staged.path_for(name)
                fetcher.into_file(wanted, path, on_bytes=on_bytes)
        if selection.is_all:
            _check_files(staged_files, step)
        else:
            _check_any(wanted_count, selection)


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
    check_content(copy, step.manifest.content)
    plan = plan_result(copy, delta)
    with sink.installing(mark) as staged:
        if selection.is_all:
            paths = {file.name: staged.path_for(file.name) for file in plan.weights}
            build_weights(copy, delta, plan.weights, paths, workers=1, on_bytes=on_bytes)
        else:
            headers = [file.header for file in plan.weights]
            _check_any(sum(_count_wanted(header, selection) for header in headers), selection)
            for file in plan.weights:
                tensors = {name: copy.tensors[name].data for name in file.header.spans}
                _write_part(file.header, tensors, staged.path_for(file.name), selection)
        for small in plan.files:
            if selection.is_all or small.name != INDEX_NAME:
                write_small_file(copy, delta, small, staged.path_for(small.name))


class Content(NamedTuple):
    """What a folder holds: the digests that a manifest names."""

    weights: str
    layout: str

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Content:
        """Read from the bytes of an opened checkpoint."""
        return cls._of(checkpoint.weights, checkpoint.files)

    @classmethod
    def of_files(cls, files: Mapping[str, Path]) -> Content:
        """Read from files that lie under other names, as staged ones do.

        Raises:
            FormatError: A weights file is malformed.
        """
        weights = {
            name: SafetensorsFile.open(path)
            for name, path in files.items()
            if is_weights_name(name)
        }
        return cls._of(weights, {n: path for n, path in files.items() if n not in weights})

    @classmethod
    def _of(cls, weights: Mapping[str, SafetensorsFile], files: Mapping[str, Path]) -> Content:
        tensors = [
            (
                name,
                tensor.dtype,
                list(tensor.shape),
                f"{tensor_digest(tensor.dtype, tensor.data):016x}",
            )
            for file in weights.values()
            for name, tensor in file.tensors.items()
        ]
        return cls(weights_digest(tensors), _layout(weights, files))


def layout_of(checkpoint: Checkpoint) -> str:
    """The digest of a checkpoint's headers and other files: weights are not read."""
    return _layout(checkpoint.weights, checkpoint.files)


def _layout(weights: Mapping[str, SafetensorsFile], files: Mapping[str, Path]) -> str:
    rows: list[LayoutRow] = [
        (name, "header", len(file.header_bytes), f"{xxh3_64(file.header_bytes):016x}")
        for name, file in weights.items()
    ]
    for name, path in files.items():
        data = map_file(path)
        rows.append((name, "file", data.size, f"{xxh3_64(data):016x}"))
    return layout_digest(rows)


def _check_files(files: Mapping[str, Path], step: Step) -> None:
    """Raise ChecksumMismatch unless staged files are those of the manifest."""
    if Content.of_files(files) != Content(step.weights, step.layout):
        raise ChecksumMismatch(
            f"the anchor of version {step.target.version} holds something else than its manifest "
            "says",
            hint="`thinwire fsck` shows what is wrong with the stream",
            version=step.target.version,
        )


def _fetch_part(
    fetcher: Fetcher, wanted: Wanted, path: Path, scratch: Path, selection: Selection
) -> Header:
    """Fetch the chosen tensors of a weights file, and write a file of just these.

    Returns:
        The header of the whole file.
    """
    sparse = scratch / "anchor-part"
    sparse.unlink(missing_ok=True)
    fetched: set[int] = set()

    def have(ranges: list[tuple[int, int]]) -> ByteArray:
        missing = set(blocks_of(wanted.record, ranges)) - fetched
        if missing:
            fetcher.into_file(wanted, sparse, missing)
            fetched.update(missing)
        return map_file(sparse)

    try:
        length = min(LENGTH_BYTES, wanted.record.size)
        first = int.from_bytes(have([(0, length)])[:length].tobytes(), "little")
        check_header_bytes(LENGTH_BYTES + first, wanted.what)
        # What a length would reach beyond the end is cut, and the parser says so.
        stop = min(wanted.record.size, LENGTH_BYTES + first)
        header = parse_header(have([(0, stop)])[:stop].tobytes(), wanted.what)
        spans = [header.spans[name] for name in _chosen(header, selection)]
        data = have([(0, stop), *((span.start, span.stop) for span in spans)])
        tensors = {name: data[s.start : s.stop] for name, s in header.spans.items()}
        _write_part(header, tensors, path, selection)
        return header
    finally:
        sparse.unlink(missing_ok=True)


def _count_wanted(header: Header, selection: Selection) -> int:
    return sum(selection.wants(name) for name in header.spans)


def _check_any(wanted_count: int, selection: Selection) -> None:
    """Raise InvalidArgument where no tensor is wanted: the patterns are misspelled."""
    if not wanted_count:
        raise InvalidArgument(
            f"no tensor is named like {', '.join(selection.patterns)[:200]}",
            hint="`thinwire inspect` on a delta, or the model's index, shows the names",
            tensors=selection.patterns,
        )


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
    rows = [(name, header.spans[name].dtype, header.spans[name].shape) for name in chosen]
    begin = build_header(rows, header.metadata, path)
    view = create_mapped(path, len(begin) + sum(tensors[name].size for name in chosen))
    view[: len(begin)] = memoryview(begin)
    for data, start in _placed(chosen, tensors, len(begin)):
        view[start : start + data.size] = data
    sync(path)


def _placed(
    chosen: list[str], tensors: Mapping[str, ByteArray], start: int
) -> Iterator[tuple[ByteArray, int]]:
    for name in chosen:
        yield tensors[name], start
        start += tensors[name].size
