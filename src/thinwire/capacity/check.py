"""The model against what it models: a real publisher, a real store and real followers.

The weights are made: normal numbers whose FP32 masters lie anywhere between BF16 values, moved by
one distance up or down, as AdamW does (docs/changes.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from thinwire.capacity.demand import follower_requests
from thinwire.capacity.payload import gets_of, payload_of
from thinwire.capacity.scenario import Scenario
from thinwire.capacity.timing import fetch_of, take_of
from thinwire.checkpoint.disk import write_file
from thinwire.errors import ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.publish import Publisher
from thinwire.publish.source import safetensors_header
from thinwire.store import CountingStore, Store, ThrottledStore, open_store
from thinwire.store.wrappers import Counts
from thinwire.stream import keys
from thinwire.stream.encoding import MAX_MANIFEST_BYTES
from thinwire.stream.records import Manifest

_SPREAD = 0.02
_SAMPLE_WORDS = 1 << 16
_HALVINGS = 40
# A joiner at version 1 asks for these beside the anchor's files: stream.json, head.json, the
# manifest, the next one, the catalog.
JOIN_GETS = 5


@dataclass(frozen=True)
class Row:
    """A number of the model beside the measured one.

    Attributes:
        name: What it is.
        predicted: By the model.
        measured: In the run.
        unit: Of both.
    """

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float:
        """Measured, in what was predicted."""
        return self.measured / self.predicted if self.predicted else math.nan


@dataclass(frozen=True)
class Trial:
    """A run to be made.

    Attributes:
        scenario: What the model is asked; its ``params`` are spread over ``tensors`` evenly.
        versions: Step deltas to publish after the first version.
        seed: Of the weights.
    """

    scenario: Scenario
    versions: int = 2
    seed: int = 0


class MadeModel:
    """Weights as a trainer has them: masters, and what is published of them."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        if scenario.dtype != "BF16":
            raise ValueError("made weights are BF16")
        self._random = np.random.default_rng(seed)
        words = scenario.params // scenario.tensors
        self._shapes = {f"layers.{n}.weight": (words,) for n in range(scenario.tensors)}
        self._masters = {name: self._made(words) for name in self._shapes}
        sample = np.concatenate([m[:_SAMPLE_WORDS] for m in self._masters.values()])
        self._move = np.float32(move_for(sample[: 4 * _SAMPLE_WORDS], scenario.changed))

    def step(self) -> None:
        """Move every weight."""
        for master in self._masters.values():
            signs = self._random.integers(0, 2, master.size, dtype=np.int8) * 2 - 1
            master += signs.astype(np.float32) * self._move

    def write(self, folder: Path) -> Path:
        """Write them as a checkpoint folder."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [(name, "BF16", shape) for name, shape in self._shapes.items()]
        body = b"".join(to_bf16(master).tobytes() for master in self._masters.values())
        path = folder / "model.safetensors"
        path.unlink(missing_ok=True)
        write_file(path, safetensors_header(rows) + body)
        return folder

    def _made(self, words: int) -> np.ndarray:
        made = self._random.normal(0, _SPREAD, words).astype(np.float32)
        # Anywhere between two BF16 values, as in the midst of a run.
        bits = made.view(np.uint32) & np.uint32(0xFFFF0000)
        low = self._random.integers(0, 1 << 16, words, dtype=np.uint32)
        found: np.ndarray = (bits | low).view(np.float32)
        return found


def to_bf16(values: np.ndarray) -> np.ndarray:
    """FP32 rounded to the nearest BF16, ties to even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def move_for(masters: np.ndarray, changed: float) -> float:
    """How far all weights must move for a share of them to change in BF16."""
    exponents = (masters.view(np.uint32) >> 23) & 0xFF
    spacing = np.ldexp(1.0, exponents.astype(np.int64) - 127 - 7)
    low, high = 0.0, float(spacing.max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        share = float(np.minimum(1.0, middle / spacing).mean())
        low, high = (middle, high) if share < changed else (low, middle)
    return high


@dataclass
class _Found:
    """What was counted, a number for each version (and follower)."""

    puts: list[int] = field(default_factory=list)
    gets: list[int] = field(default_factory=list)
    join_gets: list[int] = field(default_factory=list)
    up_bytes: list[int] = field(default_factory=list)
    down_bytes: list[int] = field(default_factory=list)
    manifest_bytes: list[int] = field(default_factory=list)
    payload_bytes: list[int] = field(default_factory=list)
    shards: list[int] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)

    def note_version(self, store: Store, manifest: Manifest) -> None:
        """A version that was committed."""
        key = keys.manifest(manifest.lineage, manifest.version)
        self.manifest_bytes.append(len(store.get(key, limit_bytes=MAX_MANIFEST_BYTES)))
        self.payload_bytes.append(manifest.payload_bytes)
        self.shards.append(len(manifest.shards))
        self.changes.append(manifest.changed_count)


def run_trial(trial: Trial, folder: Path, follower_count: int = 2) -> list[Row]:
    """Publish and follow without a throttle: bytes, objects, requests.

    Args:
        trial: What to run.
        folder: An empty folder to work in.
        follower_count: Followers, one after the other, each with a folder and counts of its own.

    Raises:
        ThinwireError: Publishing or following failed, or a follower holds other bytes.
    """
    found = _Found()
    bucket = open_store(str(folder / "bucket"), retry_s=0)
    publishing = CountingStore(bucket)
    reading = [CountingStore(bucket) for _ in range(follower_count)]
    limit = trial.scenario.memory_limit_bytes
    with ExitStack() as stack:
        publish = _publisher(stack, publishing, trial, folder)
        publish()
        followers = [
            Follower(
                open_stream(store),
                folder / f"replica-{number}",
                lease=False,
                memory_limit_bytes=limit,
            )
            for number, store in enumerate(reading)
        ]
        for follower, store in zip(followers, reading, strict=True):
            stack.enter_context(follower)
            follower.catch_up()
            found.join_gets.append(_sum(store.counts(), "get", "get_range"))
        for _ in range(trial.versions):
            publishing.reset()
            publish()
            counts = publishing.counts()
            found.puts.append(_sum(counts, "put", "put_file", "put_if_absent"))
            found.up_bytes.append(counts.uploaded_bytes)
            for follower, store in zip(followers, reading, strict=True):
                store.reset()
                follower.catch_up()
                counts = store.counts()
                found.gets.append(_sum(counts, "get", "get_range"))
                found.down_bytes.append(counts.downloaded_bytes)
            head = open_stream(bucket).tip().head
            assert head is not None
            found.note_version(bucket, head)
        _check_same(folder, follower_count)
    anchor_bytes = (folder / "trainer" / "model.safetensors").stat().st_size
    return _rows(trial.scenario, found, gets_of(anchor_bytes, limit))


def _rows(scenario: Scenario, found: _Found, anchor_gets: int) -> list[Row]:
    """The model twice: told nothing, and told how many bits a change took."""
    payload = payload_of(scenario)
    bits = 8 * sum(found.payload_bytes) / max(1, sum(found.changes))
    told = replace(
        scenario,
        changed=_mean(found.changes) / scenario.params,
        bits_per_change=bits,
        is_signed=False,
    )
    known = payload_of(told)
    version_bytes = payload.delta.total_bytes + payload.delta_manifest_bytes
    return [
        Row("changed weights", scenario.changed_count, _mean(found.changes), ""),
        Row("bits a change, whole file", payload.bits_per_change, bits, "bits"),
        Row("bytes of a version", payload.delta.total_bytes, _mean(found.payload_bytes), "bytes"),
        Row("bytes up, with manifest and hint", version_bytes, _mean(found.up_bytes), "bytes"),
        Row("bytes down, with the manifest", version_bytes, _mean(found.down_bytes), "bytes"),
        Row("shards of a version", payload.delta.count, _mean(found.shards), ""),
        Row("writes of a version", known.delta.count + 2, _mean(found.puts), ""),
        Row(
            "bytes of the manifest, bits told",
            known.delta_manifest_bytes,
            _mean(found.manifest_bytes),
            "bytes",
        ),
        Row(
            "reads of a version, bits told",
            follower_requests(told, known).get,
            _mean(found.gets),
            "",
        ),
        Row("reads of a join at version 1", JOIN_GETS + anchor_gets, _mean(found.join_gets), ""),
    ]


def run_throttled(trial: Trial, folder: Path) -> list[Row]:
    """Publish, then follow over one slow link: how long a version takes, from call to applied."""
    scenario = trial.scenario
    bucket = open_store(str(folder / "bucket"), retry_s=0)
    slow = ThrottledStore(bucket, bits_per_s=scenario.link_bits_per_s, latency_s=scenario.rtt_s)
    seconds = []
    with ExitStack() as stack:
        publish = _publisher(stack, bucket, trial, folder)
        publish()
        # Joined over the fast way: only steps are timed.
        with Follower(open_stream(bucket), folder / "replica-0", lease=False) as joiner:
            joiner.catch_up()
        follower = stack.enter_context(
            Follower(open_stream(slow), folder / "replica-0", lease=False)
        )
        follower.catch_up()
        for _ in range(trial.versions):
            publish()
            start_s = time.perf_counter()
            follower.catch_up()
            seconds.append(time.perf_counter() - start_s)
        _check_same(folder, 1)
    payload = payload_of(scenario)
    predicted = fetch_of(scenario, payload.delta).seconds
    predicted += sum(phase.seconds for phase in take_of(scenario, scenario.changed))
    return [
        Row("a version over the throttled link", predicted, sorted(seconds)[len(seconds) // 2], "s")
    ]


def _publisher(stack: ExitStack, store: Store, trial: Trial, folder: Path) -> Callable[[], int]:
    """What publishes the next version when it is called, and returns its number."""
    publisher = stack.enter_context(
        Publisher(
            open_stream(store),
            folder / "baseline",
            maintain=False,
            shard_raw_bytes=trial.scenario.shard_raw_bytes,
        )
    )
    model = MadeModel(trial.scenario, trial.seed)

    def publish() -> int:
        published = publisher.publish(model.write(folder / "trainer"), step=1000)
        model.step()
        return published.version

    return publish


def _check_same(folder: Path, follower_count: int) -> None:
    """Every follower holds the bytes of the trainer's last checkpoint."""
    wanted = (folder / "trainer" / "model.safetensors").read_bytes()
    for number in range(follower_count):
        if (folder / f"replica-{number}" / "model.safetensors").read_bytes() != wanted:
            raise ThinwireError(f"replica {number} holds other weights than the trainer")


def _sum(counts: Counts, *names: str) -> int:
    return sum(counts.requests.get(name, 0) for name in names)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)
