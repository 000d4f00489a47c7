"""What names and shapes of 1 T weights alone can show: ``capacity_check.py limits``."""

from __future__ import annotations

import math
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from thinwire.checkpoint import Checkpoint, apply_in_place, diff_checkpoint
from thinwire.codec.container import (
    GroupRecord,
    Index,
    TensorRecord,
    pack_head,
    parse_head,
    section_starts,
)
from thinwire.codec.digest import CHUNK_WORDS
from thinwire.codec.plan import GROUP_WORDS, SMALL_WORDS
from thinwire.errors import InvalidArgument
from thinwire.follow.steps import Outcome
from thinwire.publish.first import FirstVersion, weights_files
from thinwire.publish.meeting import _met
from thinwire.publish.messages import Hello, pack
from thinwire.publish.ranks import Alone
from thinwire.publish.source import FILE_BYTES, index_of, safetensors_header
from thinwire.publish.spreading import Holding, inventory_of, spread_over
from thinwire.publish.units import Plan
from thinwire.stream.blocks import ObjectRecord, block_bytes_for
from thinwire.stream.encoding import parse, seal
from thinwire.stream.records import FORMAT, FileRecord, Link, Manifest

T = TypeVar("T")
Shapes = list[tuple[str, tuple[int, ...]]]
BITS_PER_CHANGE = 6.0
CHANGED = 0.02


def limits() -> None:
    """Everything that names and shapes alone can show."""
    for experts, width in ((384, 2048), (1024, 768)):
        shapes = mixture(experts=experts, width=width)
        words = sum(math.prod(shape) for _, shape in shapes)
        print(f"\n{len(shapes):,} tensors, {words:.3e} words")
        for count in (1, 64):
            show_index(shapes, count)
        show_equal(shapes)
        show_digests(shapes)
        folder = Path(tempfile.mkdtemp(prefix="thinwire-capacity-"))
        try:
            show_checkpoint(shapes, folder / "model")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    show_manifests()
    for layers, ranks in ((8, 64), (61, 64), (2, 1000)):
        show_meeting("parts", split(mixture(layers=layers), ranks), ranks)
    show_meeting("whole experts", whole(mixture(), 64), 64)
    for layers in (2, 3, 5):
        show_rounds("parts", split(mixture(layers=layers, vocab=4096), 64), 64)
    for layers in (3, 9):
        show_rounds("whole experts", whole(mixture(layers=layers, vocab=4096), 64), 64)
    show_store()


def large() -> None:
    """A tensor of more than 2**32 words (sparse files): diffed, applied in place, looked at."""
    words = (1 << 32) + (1 << 21) + 5
    changed = [3, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 17, words - 1]
    header = safetensors_header([("w", "BF16", (words,))])
    folder = Path(tempfile.mkdtemp(prefix="thinwire-capacity-"))
    try:
        base, new, delta = (folder / name for name in ("a.safetensors", "b.safetensors", "d.tw"))
        for path in (base, new):
            with path.open("wb") as file:
                file.write(header)
                file.truncate(len(header) + 2 * words)
        with new.open("r+b") as file:
            for place in changed:
                file.seek(len(header) + 2 * place)
                file.write(b"\x01\x00")
        _, diff_s = timed(lambda: diff_checkpoint(base, new, delta))
        _, apply_s = timed(lambda: apply_in_place(base, delta))
        with base.open("rb") as file:
            for place in [*changed, *(one + 1 for one in changed[:-1])]:
                file.seek(len(header) + 2 * place)
                if file.read(2) != (b"\x01\x00" if place in changed else b"\0\0"):
                    sys.exit(f"word {place} is wrong")
        print(
            f"{words:,} words in one tensor: diffed in {diff_s:.1f} s, applied in {apply_s:.1f} s"
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def mixture(
    layers: int = 61,
    experts: int = 384,
    hidden: int = 7168,
    width: int = 2048,
    vocab: int = 163_840,
) -> Shapes:
    """Names and shapes of a mixture of experts whose experts are tensors of their own."""
    found: Shapes = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found += [
            (f"{at}input_layernorm.weight", (hidden,)),
            (f"{at}post_attention_layernorm.weight", (hidden,)),
            (f"{at}self_attn.q_a_proj.weight", (1536, hidden)),
            (f"{at}self_attn.q_a_layernorm.weight", (1536,)),
            (f"{at}self_attn.q_b_proj.weight", (12_288, 1536)),
            (f"{at}self_attn.kv_a_proj_with_mqa.weight", (576, hidden)),
            (f"{at}self_attn.kv_a_layernorm.weight", (512,)),
            (f"{at}self_attn.kv_b_proj.weight", (16_384, 512)),
            (f"{at}self_attn.o_proj.weight", (hidden, 8192)),
        ]
        if layer == 0:
            found += _feed_forward(f"{at}mlp.", hidden, 18_432)
            continue
        found += [
            (f"{at}mlp.gate.weight", (experts, hidden)),
            (f"{at}mlp.gate.e_score_correction_bias", (experts,)),
        ]
        for expert in range(experts):
            found += _feed_forward(f"{at}mlp.experts.{expert}.", hidden, width)
        found += _feed_forward(f"{at}mlp.shared_experts.", hidden, width)
    return [*found, ("model.norm.weight", (hidden,)), ("lm_head.weight", (vocab, hidden))]


def _feed_forward(at: str, hidden: int, width: int) -> Shapes:
    return [
        (f"{at}gate_proj.weight", (width, hidden)),
        (f"{at}up_proj.weight", (width, hidden)),
        (f"{at}down_proj.weight", (hidden, width)),
    ]


def show_index(shapes: Shapes, container_count: int) -> None:
    """The head of a container as the codec packs and parses it, without sections."""
    random = np.random.default_rng(0)
    part = shapes[: -(-len(shapes) // container_count)]
    index = Index([])
    filled = GROUP_WORDS
    for name, shape in part:
        words = math.prod(shape)
        record = TensorRecord(name, "BF16", list(shape), changed=int(words * CHANGED))
        if words < SMALL_WORDS:
            if filled >= GROUP_WORDS:
                index.groups.append(GroupRecord("BF16", 2000))
                filled = 0
            filled += words
            record.group = len(index.groups) - 1
        else:
            mean = CHUNK_WORDS * CHANGED * BITS_PER_CHANGE / 8
            sizes = random.normal(mean, mean / 10, -(-words // CHUNK_WORDS))
            record.sizes = [int(size) for size in sizes]
        index.tensors.append(record)
    digests = [int(one) for one in random.integers(0, 1 << 63, 2 * len(part))]
    section_bytes = section_starts(index)[-1]
    plain = len(msgspec.json.encode(index))
    head, pack_s = timed(lambda: pack_head(index, digests, section_bytes))
    data = memoryview(head)
    _, parse_s = timed(lambda: parse_head(data, len(head) + section_bytes + 8))
    print(
        f"- {container_count} containers: a head of {len(head):,} bytes, its index {plain:,} "
        f"unpacked; packed in {pack_s:.2f} s, parsed in {parse_s:.2f} s"
    )


def show_equal(shapes: Shapes) -> None:
    """The index of a version by reference, in which every tensor is equal: what packs best."""
    index = Index([TensorRecord(name, "BF16", list(s), kind="same") for name, s in shapes])
    plain = len(msgspec.json.encode(index))
    head = pack_head(index, [1] * len(shapes), 0)
    ratio = plain / (len(head) - 8 * len(shapes))
    print(f"- all of them equal: an index of {plain:,} bytes, packed {ratio:.0f} to 1")


def show_digests(shapes: Shapes) -> None:
    """The digest of all weights, before and after, from digests of tensors."""
    rows = [(name, "BF16", list(shape), 1, 2) for name, shape in shapes]
    _, seconds = timed(lambda: Outcome.of_rows(rows, [("config.json", "file", 1, 1)]))
    print(f"- digests of all weights: {seconds:.2f} s; {resident():,} MiB in this process so far")


def show_checkpoint(shapes: Shapes, folder: Path) -> None:
    """A folder of empty (sparse) files of the full size, opened."""
    folder.mkdir()
    files: list[Shapes] = [[]]
    size = 0
    for name, shape in shapes:
        if files[-1] and size + 2 * math.prod(shape) > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append((name, shape))
        size += 2 * math.prod(shape)
    homes: dict[str, str] = {}
    header_bytes = 0
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header = safetensors_header([(tensor, "BF16", shape) for tensor, shape in file])
        header_bytes += len(header)
        homes.update({tensor: name for tensor, _ in file})
        with (folder / name).open("wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(2 * math.prod(shape) for _, shape in file))
    index = index_of(homes, sum(2 * math.prod(shape) for _, shape in shapes))
    (folder / "model.safetensors.index.json").write_bytes(index)
    _, seconds = timed(lambda: Checkpoint.open(folder))
    print(
        f"- a checkpoint of {len(files)} files (sparse): headers {header_bytes:,} bytes, "
        f"index.json {len(index):,}; opened in {seconds:.1f} s"
    )


def show_manifests() -> None:
    """Manifests of 2 TB of weights, sealed and parsed."""
    raw = 2 * 10**12
    delta = int(raw / 2 * CHANGED * BITS_PER_CHANGE / 8)
    print("\n| manifest | objects | bytes | sealed in | parsed in |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, count, size, is_anchor in (
        ("a delta, 2 % changed", 64, delta // 64, False),
        ("the same in the most shards", 4096, delta // 4096, False),
        ("a delta of 29 % of the weights", 64, int(raw * 0.29) // 64, False),
        ("an anchor in files of 5 GiB", -(-raw // FILE_BYTES), FILE_BYTES, True),
        ("an anchor in one file", 1, raw, True),
        ("most shards of 142 MB each", 4096, 142_000_000, False),
    ):
        made = _manifest(count, size, is_anchor)
        try:
            (_, data), seal_s = timed(lambda made=made: seal(made, None))
        except InvalidArgument as error:
            print(f"| {name} | {count:,} | refused: {error.message.partition(': ')[2]} | | |")
            continue
        _, parse_s = timed(lambda data=data: parse(data, Manifest, "the manifest"))
        print(f"| {name} | {count:,} | {len(data):,} | {seal_s:.3f} s | {parse_s:.3f} s |")


def _manifest(count: int, size: int, is_anchor: bool) -> Manifest:
    block = block_bytes_for(size)
    digests = ["0" * 64] * -(-size // block)
    shards = [] if is_anchor else [ObjectRecord(size, block, digests)] * count
    files = [
        FileRecord(size=size, block=block, blocks=digests, name=f"model-{n:05d}.safetensors")
        for n in range(count if is_anchor else 0)
    ]
    return Manifest(
        format=FORMAT,
        type=Manifest.TYPE,
        stream="0" * 32,
        created_ms=1,
        kind="anchor" if is_anchor else "delta",
        lineage="0" * 32,
        first=1,
        version=1 if is_anchor else 2,
        session="0" * 32,
        base=None if is_anchor else Link(1, "0" * 64),
        weights="0" * 64,
        layout="0" * 64,
        raw_bytes=size * count,
        shards=shards,
        files=files,
    )


def split(shapes: Shapes, ranks: int) -> Iterator[list[Holding]]:
    """Rows of every tensor on every rank, as FSDP2 has them; rank by rank."""
    for rank in range(ranks):
        held = []
        for name, shape in shapes:
            rows = -(-shape[0] // ranks)
            part = (min(shape[0], rank * rows), min(shape[0], (rank + 1) * rows))
            held.append(Holding(name, "BF16", shape, ((part,), *(((0, n),) for n in shape[1:]))))
        yield held


def whole(shapes: Shapes, ranks: int) -> Iterator[list[Holding]]:
    """Experts whole on ranks in turn, all else on every rank."""
    found: list[list[Holding]] = [[] for _ in range(ranks)]
    for name, shape in shapes:
        holding = Holding(name, "BF16", shape, tuple(((0, n),) for n in shape))
        expert = name.partition(".experts.")[2].partition(".")[0]
        for held in [found[int(expert) % ranks]] if expert else found:
            held.append(holding)
    yield from found


def show_meeting(how: str, holdings: Iterable[list[Holding]], ranks: int) -> None:
    """What rank 0 does with what every rank says of itself."""
    said, count = [], 0
    for held in holdings:
        count += len(held)
        said.append(pack(Hello("host", "0" * 32, inventory_of(held))))
    packed = sum(map(len, said))
    met, seconds = timed(lambda: _met(said))
    assert met.fault is None
    print(
        f"\n{ranks} ranks, {how}: {len(met.tensors):,} tensors, {count:,} holdings "
        f"({packed:,} bytes packed): met in {seconds:.1f} s, {1e6 * seconds / count:.0f} us each"
        f"; {resident():,} MiB in this process so far",
        flush=True,
    )


class _Many(Alone):
    """The first of many ranks, which says nothing to the others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def show_rounds(how: str, holdings: Iterable[list[Holding]], ranks: int) -> None:
    """How a first version is spread over rounds of exchange, which every rank works out."""
    plan = Plan(spread_over(map(inventory_of, holdings)), ranks)
    none: np.ndarray = np.empty(0, np.uint8)
    first = FirstVersion(plan, _Many(ranks), none, Path(), weights_files(plan), {})  # type: ignore[arg-type]
    rounds, seconds = timed(first._rounds)
    print(
        f"{ranks} ranks, {how}: {plan.total_units:,} chunks in {len(rounds):,} rounds, "
        f"worked out in {seconds:.1f} s, {1e6 * seconds / plan.total_units:.0f} us a chunk",
        flush=True,
    )


def show_store() -> None:
    """How often the job's store answers one who asks whether something is there."""
    try:
        from torch.distributed import TCPStore
    except ImportError:
        print("torch is not installed: the job's store was not asked")
        return
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    count = 20_000
    _, seconds = timed(lambda: [client.check(["a"]) for _ in range(count)])
    print(f"\ntorch's TCPStore: {count / seconds:,.0f} checks a second, one client")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and its seconds."""
    start_s = time.perf_counter()
    return call(), time.perf_counter() - start_s


def resident() -> int:
    """The most memory that this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (
        20 if sys.platform == "darwin" else 10
    )
