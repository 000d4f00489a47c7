"""Ranks as threads: what they keep, find and publish, against whole arrays in numpy."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire.checkpoint import Checkpoint
from thinwire.codec.digest import tensor_digest, xxh3_64
from thinwire.codec.dtypes import byte_count, dtype_named
from thinwire.errors import BaseMismatch, NotFound, TensorMismatch, ThinwireError
from thinwire.follow import Follower, open_stream
from thinwire.maintain import fsck
from thinwire.publish import Publisher, units
from thinwire.publish import attempt as attempt_module
from thinwire.publish.attempt import Encoded, move_on
from thinwire.publish.baseline import Baseline, Changes
from thinwire.publish.held import Held
from thinwire.publish.making import Facts
from thinwire.publish.meeting import on_all
from thinwire.publish.rank_publisher import Captured, RankPublisher, Settings
from thinwire.publish.source import safetensors_header
from thinwire.publish.spreading import Holding
from thinwire.publish.staging import Found, Staging
from thinwire.publish.units import Plan
from thinwire.stream.events import Published, Refused
from thinwire.stream.records import Manifest

from .making import (
    ThreadRanks,
    held_in,
    holding,
    on_ranks,
    placed,
    spreads_of,
    taken,
    word_ids,
)

DTYPES = ["BF16", "F32", "U8", "C64", "I64"]
CHUNK_WORDS = 12
SMALL_WORDS = 6
RUN_WORDS = 5


class Tensor(NamedTuple):
    """A whole tensor's words, and which part each rank holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: Sequence[Held | None]

    @property
    def word_count(self) -> int:
        return byte_count(self.dtype, self.shape) // self.word_bytes

    @property
    def word_bytes(self) -> int:
        return dtype_named(self.dtype).word_bytes

    def local_ids(self, rank: int) -> np.ndarray:
        """Which words the rank holds, in the order in which they lie there."""
        held = self.placement[rank]
        if held is None:
            return np.empty(0, np.int64)
        ids = word_ids(self.dtype, self.shape).reshape(max(1, held.whole_count), -1)
        elements = taken(held, np.arange(held.whole_count).reshape(held.shape)).reshape(-1)
        found: np.ndarray = ids[elements].reshape(-1)
        return found


Model = dict[str, np.ndarray]  # words of whole tensors, by name


def random_model(tensors: Sequence[Tensor], rng: np.random.Generator) -> Model:
    return {
        t.name: rng.integers(0, 256, t.word_count * t.word_bytes, np.uint8).view(
            f"<u{t.word_bytes}"
        )
        for t in tensors
    }


def stepped(model: Model, rng: np.random.Generator, share: float) -> Model:
    new = {}
    for name, words in model.items():
        chosen = rng.random(words.size) < share
        new[name] = np.where(chosen, words ^ rng.integers(1, 200, words.size, words.dtype), words)
    return new


def holdings_of(tensors: Sequence[Tensor], rank: int) -> list[Holding]:
    return [
        holding(t.name, t.dtype, held) for t in tensors if (held := t.placement[rank]) is not None
    ]


def plan_of(tensors: Sequence[Tensor], ranks: int) -> Plan:
    return Plan(spreads_of([holdings_of(tensors, rank) for rank in range(ranks)]), ranks)


def capture(
    baseline: Baseline, tensors: Mapping[str, Tensor], model: Model, staging: Staging, run: int
) -> None:
    """What ``thinwire.torch`` does, in plain numpy; a run that changed a lot is kept whole."""
    for region in baseline.regions():
        tensor = tensors[baseline.plan.spreads[region.unit.tensor].name]
        mine = model[tensor.name][tensor.local_ids(baseline.rank)]
        new = mine[region.source.start : region.source.stop]
        old = region.baseline.view(new.dtype)
        for start in range(0, new.size, run):
            part = new[start : start + run]
            at = np.flatnonzero(part != old[start : start + run]).astype(np.uint32)
            if at.size > part.size // 2:
                found = Found(start, None, part.copy().view(np.uint8))
            else:
                found = Found(start, at, part[at].copy().view(np.uint8))
            if at.size:
                staging.add(baseline.plan.place_of(region.unit), found)


def write_checkpoint(path: Path, tensors: Sequence[Tensor], model: Model) -> Checkpoint:
    header = safetensors_header([(t.name, t.dtype, t.shape) for t in tensors])
    path.write_bytes(header + b"".join(model[t.name].tobytes() for t in tensors))
    return Checkpoint.open(path)


@st.composite
def jobs(draw: st.DrawFn, dtypes: Sequence[str] = DTYPES) -> tuple[int, list[Tensor]]:
    """Any number of ranks, and tensors cut any way between them."""
    ranks = draw(st.integers(1, 5))
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(dtypes))
        tensors.append(Tensor(f"t{number}", dtype, shape, draw(placed(shape, ranks))))
    return ranks, tensors


class TestBaseline:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        jobs(),
        st.integers(0, 2**32),
        st.sampled_from([0.0, 0.1, 0.6, 1.0]),
        st.sampled_from([0, 30, 1 << 20]),
        st.integers(1, 9),
    )
    def test_it_is_always_what_numpy_says(
        self,
        tmp_path: Path,
        job: tuple[int, list[Tensor]],
        seed: int,
        share: float,
        budget_bytes: int,
        run: int,
    ) -> None:
        """Filled, compared, sent to the owners, merged there and moved on: on every rank, twice."""
        ranks, tensors = job
        by_name = {t.name: t for t in tensors}
        rng = np.random.default_rng(seed)
        model = random_model(tensors, rng)
        with (
            mock.patch.object(units, "CHUNK_WORDS", CHUNK_WORDS),
            mock.patch.object(units, "SMALL_WORDS", SMALL_WORDS),
        ):
            plan = plan_of(tensors, ranks)
            baselines = [Baseline(plan, rank) for rank in range(ranks)]
            checkpoint = write_checkpoint(tmp_path / "m.safetensors", tensors, model)
            for baseline in baselines:
                baseline.fill(checkpoint)
                baseline.digest_owned()
                self.check(baseline, by_name, model)
            for _ in range(2):
                model = stepped(model, rng, share)
                self.step(tmp_path, baselines, by_name, model, budget_bytes, run)
                for baseline in baselines:
                    self.check(baseline, by_name, model)

    def step(
        self,
        folder: Path,
        baselines: Sequence[Baseline],
        tensors: Mapping[str, Tensor],
        model: Model,
        budget_bytes: int,
        run: int,
    ) -> None:
        plan = baselines[0].plan
        stagings = [Staging(folder, budget_bytes) for _ in baselines]
        for baseline, staging in zip(baselines, stagings, strict=True):
            capture(baseline, tensors, model, staging, run)
        for baseline, staging in zip(baselines, stagings, strict=True):
            changed: dict[int, tuple[Changes | None, int]] = {}
            for place, unit in baseline.owned():
                found = {
                    number: runs
                    for number, source in enumerate(unit.sources)
                    if (runs := list(stagings[source.rank].of(place)))
                }
                changes = baseline.merged(place, found)
                spread = plan.spreads[unit.tensor]
                self.check_merged(baseline, place, changes, model[spread.name])
                new = model[spread.name][unit.start : unit.stop].view(np.uint8)
                if changes.positions.size:
                    digest = self.digest(plan, unit, new)
                    changed[place] = (None if unit.is_own else changes, digest)
            move_on(baseline, staging, Encoded({}, changed))
        for staging in stagings:
            staging.close()

    def check_merged(
        self, baseline: Baseline, place: int, changes: Changes, words: np.ndarray
    ) -> None:
        unit = baseline.units[place]
        old = baseline.whole(place).view(words.dtype)
        new = words[unit.start : unit.stop]
        assert np.all(np.diff(changes.positions) > 0), "rising, none twice"
        assert set(np.flatnonzero(old != new)) <= set(changes.positions.tolist())
        assert np.array_equal(changes.words.view(words.dtype), new[changes.positions])

    def check(self, baseline: Baseline, tensors: Mapping[str, Tensor], model: Model) -> None:
        plan = baseline.plan
        for region in baseline.regions():
            tensor = tensors[plan.spreads[region.unit.tensor].name]
            mine = model[tensor.name][tensor.local_ids(baseline.rank)]
            expected = mine[region.source.start : region.source.stop]
            assert region.baseline.tobytes() == expected.tobytes()
            assert region.baseline.ctypes.data % tensor.word_bytes == 0, "the kernels read words"
        owned = dict(baseline.owned())
        assert set(baseline.digests) == set(owned)
        for place, unit in owned.items():
            new = model[plan.spreads[unit.tensor].name][unit.start : unit.stop]
            assert baseline.whole(place).tobytes() == new.tobytes()
            assert baseline.digests[place] == self.digest(plan, unit, new.view(np.uint8))

    @staticmethod
    def digest(plan: Plan, unit: units.Unit, data: np.ndarray) -> int:
        dtype = plan.spreads[unit.tensor].dtype
        return tensor_digest(dtype, data) if plan.is_small(unit.tensor) else xxh3_64(data)

    @settings(deadline=None)
    @given(jobs())
    def test_what_it_costs(self, job: tuple[int, list[Tensor]]) -> None:
        """The rank's share, and what it encodes for others: never twice a tensor's words."""
        ranks, tensors = job
        with (
            mock.patch.object(units, "CHUNK_WORDS", CHUNK_WORDS),
            mock.patch.object(units, "SMALL_WORDS", SMALL_WORDS),
        ):
            plan = plan_of(tensors, ranks)
            for rank in range(ranks):
                baseline = Baseline(plan, rank)
                exact = {id(baseline): 0}
                for place, unit in baseline.units.items():
                    size = (unit.stop - unit.start) * plan.spreads[unit.tensor].word_bytes
                    exact[id(baseline)] += -(-size // 64) * 64
                    if unit.owner == rank:
                        assert baseline.whole(place).size == size
                assert baseline.byte_count <= 2 * exact[id(baseline)]

    def test_alone_it_is_the_model_and_no_more(self) -> None:
        plan = plan_of([Tensor("t", "BF16", (3, 32), [Held.whole((3, 32))])], 1)
        assert Baseline(plan, 0).byte_count == 192

    def test_rows_are_kept_once(self) -> None:
        """Also in a chunk of two ranks' rows: what one captures lies in what it encodes."""
        shape = (24,)
        with (
            mock.patch.object(units, "CHUNK_WORDS", 24),
            mock.patch.object(units, "SMALL_WORDS", 1),
        ):
            halves = [Held(shape, (((0, 14),),)), Held(shape, (((14, 24),),))]
            plan = plan_of([Tensor("t", "I64", shape, halves)], 2)
            assert Baseline(plan, 0).byte_count == 192
            assert Baseline(plan, 1).byte_count == 128  # of 80, aligned

    def test_allocate_is_asked_once(self) -> None:
        asked: list[int] = []

        def allocate(size: int) -> np.ndarray:
            asked.append(size)
            return np.empty(size, np.uint8)

        plan = plan_of([Tensor("t", "BF16", (100,), [Held.whole((100,))])], 1)
        baseline = Baseline(plan, 0, allocate)
        assert asked == [baseline.byte_count]

    @pytest.mark.parametrize(
        "other", [("x", "F32", (4,)), ("t", "BF16", (4,)), ("t", "F32", (2, 2))]
    )
    def test_a_checkpoint_that_is_another_model(
        self, tmp_path: Path, other: tuple[str, str, tuple[int, ...]]
    ) -> None:
        baseline = Baseline(plan_of([Tensor("t", "F32", (4,), [Held.whole((4,))])], 1), 0)
        tensor = Tensor(*other, [None])
        model = random_model([tensor], np.random.default_rng(0))
        checkpoint = write_checkpoint(tmp_path / "m.safetensors", [tensor], model)
        with pytest.raises(TensorMismatch) as raised:
            baseline.fill(checkpoint)
        assert raised.value.context["tensor"] == "t"


# --- the whole way: ranks that publish ---


class Recorder:
    """Keeps events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_event(self, event: Any) -> None:
        self.events.append(event)


class Trainer:
    """One rank that publishes what it holds of whole models."""

    def __init__(
        self,
        store: Any,
        ranks: ThreadRanks,
        folder: Path,
        tensors: Sequence[Tensor],
        **options: Any,
    ) -> None:
        self.tensors = {t.name: t for t in tensors}
        self.ranks = ranks
        self.folder = folder / f"rank{ranks.rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = options.pop("run", 1 << 14)
        self.observer = Recorder()
        self.phases: list[str] = []
        self._count = 0
        self.publisher = RankPublisher(
            open_stream(store, retry_s=0) if isinstance(store, str) else store,
            ranks,
            self.folder,
            holdings_of(tensors, ranks.rank),
            Settings(**{"maintain": False, **options}),
            observer=self.observer,
        )

    def publish(self, model: Model, step: int) -> Manifest:
        self._count += 1
        staging = None
        baseline = self.publisher.baseline
        if self.publisher.has_base:
            staging = Staging(self.folder, 1 << 16)
            capture(baseline, self.tensors, model, staging, self.run)
        else:
            for region in baseline.regions():
                tensor = self.tensors[baseline.plan.spreads[region.unit.tensor].name]
                mine = model[tensor.name][tensor.local_ids(baseline.rank)]
                part = mine[region.source.start : region.source.stop]
                region.baseline[:] = part.view(np.uint8)
        facts = Facts(step, {"rank": self.ranks.rank})
        try:
            captured = Captured(staging, facts)
            return self.publisher.publish(f"{self._count}", "line", captured, self.phases.append)
        finally:
            if staging is not None:
                staging.close()


def expected_rows(tensors: Sequence[Tensor], model: Model) -> dict[str, Any]:
    return {t.name: (t.dtype, t.shape, model[t.name].tobytes()) for t in tensors}


def by_a_plain_publisher(
    folder: Path, tensors: Sequence[Tensor], models: Sequence[Model]
) -> list[str]:
    """The digest of the weights of each version, as ``thinwire.Publisher`` makes it."""
    digests = []
    with Publisher(folder / "plain", folder / "own", maintain=False) as publisher:
        for number, model in enumerate(models):
            path = folder / f"{number}.safetensors"
            write_checkpoint(path, tensors, model)
            digests.append(publisher.publish(path).weights)
    return digests


def check_run(
    folder: Path, ranks: int, tensors: Sequence[Tensor], models: Sequence[Model], **options: Any
) -> list[Manifest]:
    """Publish all models from so many ranks; followers and digests are those of one publisher."""
    url = str(folder / "stream")

    def act(line: ThreadRanks) -> list[Manifest]:
        trainer = Trainer(url, line, folder, tensors, **options)
        with closing(trainer.publisher):
            return [trainer.publish(model, step) for step, model in enumerate(models)]

    found = on_ranks(ranks, act)
    assert all(manifests == found[0] for manifests in found), "every rank is told of the same"
    manifests = found[0]
    assert [m.weights for m in manifests] == by_a_plain_publisher(folder, tensors, models)
    assert [m.metadata for m in manifests] == [{"rank": 0}] * len(models)
    with Follower(open_stream(url), folder / "follower", lease=False) as follower:
        for manifest, model in zip(manifests, models, strict=True):
            follower.catch_up(manifest.version)
            assert held_in(folder / "follower") == expected_rows(tensors, model)
    for before, after, manifest in zip(models, models[1:], manifests[1:], strict=False):
        changed = sum(int(np.count_nonzero(before[n] != after[n])) for n in after)
        assert manifest.changed_count == changed
        assert manifest.raw_bytes == sum(words.nbytes for words in after.values())
    report = fsck(open_stream(url), deep=True)
    assert report.is_whole, report.problems
    return manifests


class TestPublishing:
    @settings(
        max_examples=15,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(jobs(), st.integers(0, 2**32), st.sampled_from([0.0, 0.02, 0.5]), st.integers(1, 40))
    def test_small_tensors(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        job: tuple[int, list[Tensor]],
        seed: int,
        share: float,
        run: int,
    ) -> None:
        ranks, tensors = job
        rng = np.random.default_rng(seed)
        models = [random_model(tensors, rng)]
        models += [stepped(models[0], rng, share)]
        models += [stepped(models[1], rng, share)]
        check_run(tmp_path_factory.mktemp("run"), ranks, tensors, models, run=run)

    @pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
    def test_tensors_of_several_chunks(self, tmp_path: Path, ranks: int) -> None:
        """Rows, columns, uneven rows, replicas and both; chunks of one rank and of all."""
        rows, columns = (1 << 11, 700), (700, 1 << 11)

        def split(size: int, cuts: Sequence[int]) -> list[units.Runs]:
            return [((a, b),) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]

        even = [size * n // ranks for n, size in ((n, 1 << 11) for n in range(1, ranks))]
        uneven = sorted(3 * n * n for n in range(1, ranks))
        tensors = [
            Tensor(
                "rows", "U8", rows, [Held(rows, (r, ((0, 700),))) for r in split(1 << 11, even)]
            ),
            Tensor(
                "columns",
                "U8",
                columns,
                [Held(columns, (((0, 700),), r)) for r in split(1 << 11, even)],
            ),
            Tensor(
                "uneven", "U8", rows, [Held(rows, (r, ((0, 700),))) for r in split(1 << 11, uneven)]
            ),
            Tensor("replica", "BF16", (70_000,), [Held.whole((70_000,))] * ranks),
            Tensor("norm", "F32", (33,), [Held.whole((33,))] * ranks),
            Tensor(
                "of the last", "BF16", (66_000,), [None] * (ranks - 1) + [Held.whole((66_000,))]
            ),
        ]
        rng = np.random.default_rng(ranks)
        models = [random_model(tensors, rng)]
        models.append(stepped(models[-1], rng, 0.003))
        models.append({**models[-1], "norm": stepped(models[-1], rng, 0.5)["norm"]})
        manifests = check_run(tmp_path, ranks, tensors, models, workers=2)
        assert len(manifests[1].shards) >= min(ranks, 3), "so many ranks assemble and upload"

    def test_nothing_changed(self, tmp_path: Path) -> None:
        """It is a version all the same: whoever waits for that step must see it."""
        tensors = [Tensor("t", "BF16", (70_000,), [Held.whole((70_000,))])]
        model = random_model(tensors, np.random.default_rng(0))
        manifests = check_run(tmp_path, 1, tensors, [model] * 3)
        assert [m.changed_count for m in manifests] == [0, 0, 0]
        assert manifests[1].shards[0].size < 2000

    @pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 4)])
    def test_a_restart_with_other_ranks_goes_on(
        self, tmp_path: Path, before: int, after: int
    ) -> None:
        """In the same lineage, from the head, also where the job holds other weights by now."""
        shape = (1100, 64)
        url = str(tmp_path / "stream")
        rng = np.random.default_rng(5)

        def tensors(ranks: int) -> list[Tensor]:
            cuts = [1100 * n // ranks for n in range(ranks + 1)]
            parts = [Held(shape, (((a, b),), ((0, 64),))) for a, b in pairwise(cuts)]
            return [
                Tensor("w", "BF16", shape, parts),
                Tensor("b", "F32", (9,), [Held.whole((9,))] * ranks),
            ]

        models = [random_model(tensors(1), rng)]
        for _ in range(4):
            models.append(stepped(models[-1], rng, 0.01))

        def job(ranks: int, steps: Sequence[int]) -> list[Manifest]:
            def act(line: ThreadRanks) -> list[Manifest]:
                trainer = Trainer(url, line, tmp_path / f"job{ranks}", tensors(ranks))
                with closing(trainer.publisher):
                    return [trainer.publish(models[step], step) for step in steps]

            return on_ranks(ranks, act)[0]

        first = job(before, [0, 1])
        # Step 2 was trained and never published.
        second = job(after, [3, 4])
        assert [m.version for m in [*first, *second]] == [1, 2, 3, 4]
        assert len({m.lineage for m in [*first, *second]}) == 1
        with Follower(open_stream(url), tmp_path / "f", lease=False) as follower:
            for manifest, step in zip([*first, *second], [0, 1, 3, 4], strict=True):
                follower.catch_up(manifest.version)
                assert held_in(tmp_path / "f") == expected_rows(tensors(1), models[step])

    def test_the_bytes_do_not_depend_on_who_holds_what(self, tmp_path: Path) -> None:
        """One set of tables for all: the chunks of a job are those of a single process."""
        shape = (700, 200)
        rng = np.random.default_rng(1)
        alone = [Tensor("t", "BF16", shape, [Held.whole(shape)])]
        parts = [Held(shape, (((0, 700),), ((a, a + 50),))) for a in range(0, 200, 50)]
        cut = [Tensor("t", "BF16", shape, parts)]
        models = [random_model(alone, rng)]
        models.append(stepped(models[0], rng, 0.05))
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        one = check_run(tmp_path / "a", 1, alone, models)
        four = check_run(tmp_path / "b", 4, cut, models)
        assert one[1].shards == four[1].shards

    def test_what_is_sent_between_ranks_is_what_changed(self, tmp_path: Path) -> None:
        """Not the model: no rank ever has the whole of it."""
        shape = (1 << 10, 1100)
        parts = [Held(shape, (((0, 1 << 10),), ((a, a + 550),))) for a in (0, 550)]
        tensors = [Tensor("t", "U8", shape, parts)]
        rng = np.random.default_rng(2)
        models = [random_model(tensors, rng)]
        models.append(stepped(models[0], rng, 0.001))

        def act(line: ThreadRanks) -> int:
            trainer = Trainer(str(tmp_path / "s"), line, tmp_path, tensors)
            with closing(trainer.publisher):
                trainer.publish(models[0], 0)
                before = line.sent_bytes
                trainer.publish(models[1], 1)
                return line.sent_bytes - before

        assert max(on_ranks(2, act)) < 200_000

    def test_a_baseline_that_someone_wrote_to_is_noticed(self, tmp_path: Path) -> None:
        """No delta is made from weights that no follower has, and nothing is published."""
        tensors = [
            Tensor("large", "BF16", (70_000,), [Held.whole((70_000,))]),
            Tensor("small", "BF16", (70,), [Held.whole((70,))]),
        ]
        rng = np.random.default_rng(3)
        models = [random_model(tensors, rng)]
        models.append(stepped(models[0], rng, 0.1))
        for name in ("large", "small"):
            url = str(tmp_path / name)

            def act(line: ThreadRanks, url: str = url, name: str = name) -> list[str]:
                trainer = Trainer(url, line, tmp_path / f"own-{name}", tensors)
                trainer.publish(models[0], 0)
                for region in trainer.publisher.baseline.regions():
                    if trainer.publisher.plan.spreads[region.unit.tensor].name == name:
                        region.baseline[3] ^= 1
                with pytest.raises(BaseMismatch, match=f"tensor '{name}'"):
                    trainer.publish(models[1], 1)
                assert len(trainer.observer.events) == 2
                assert isinstance(trainer.observer.events[1], Refused)
                return [str(e.code) for e in trainer.observer.events[1:]]

            assert on_ranks(1, act) == [["base-mismatch"]]
            head = open_stream(url).tip().head
            assert head is not None
            assert head.version == 1

    def test_events_and_phases(self, tmp_path: Path) -> None:
        tensors = [Tensor("t", "BF16", (70_000,), [Held.whole((70_000,))] * 2)]
        model = random_model(tensors, np.random.default_rng(0))

        def act(line: ThreadRanks) -> tuple[list[str], list[Any]]:
            trainer = Trainer(str(tmp_path / "s"), line, tmp_path, tensors)
            trainer.publish(model, 0)
            trainer.publish(model, 1)
            return trainer.phases, trainer.observer.events

        (phases, events), (others, none) = on_ranks(2, act)
        assert phases == others == ["encoding", "uploading", "committing"] * 2
        assert [event.version for event in events if isinstance(event, Published)] == [1, 2]
        assert none == [], "only rank 0 tells"


class TestFailures:
    def tensors(self, ranks: int) -> list[Tensor]:
        """Columns of four chunks, so that every rank sends and encodes something."""
        shape = (1 << 11, 1600)
        cuts = [1600 * n // ranks for n in range(ranks + 1)]
        parts = [Held(shape, (((0, 1 << 11),), ((a, b),))) for a, b in pairwise(cuts)]
        return [
            Tensor("w", "U8", shape, parts),
            Tensor("b", "F32", (9,), [Held.whole((9,))] * ranks),
        ]

    @pytest.mark.parametrize(
        ("where", "failing"),
        [
            *((where, rank) for where in ("staging", "code") for rank in range(3)),
            # Two tensors, so two containers: rank 2 assembles none.
            *((where, rank) for where in ("write", "upload") for rank in (0, 1)),
        ],
    )
    def test_one_rank_fails_once(self, tmp_path: Path, where: str, failing: int) -> None:
        """All ranks are told the same, nothing is published, and the next publish has it all."""
        tensors = self.tensors(3)
        rng = np.random.default_rng(failing)
        models = [random_model(tensors, rng)]
        for _ in range(2):
            models.append(stepped(models[-1], rng, 0.001))
        url = str(tmp_path / "s")
        here = threading.local()
        is_failing = threading.Event()
        owner, name = {
            "staging": (Staging, "of"),
            "code": (attempt_module, "code_unit"),
            "write": (attempt_module, "write_coded"),
            "upload": (attempt_module, "put_files"),
        }[where]
        original: Any = getattr(owner, name)

        def hook(*arguments: Any, **options: Any) -> Any:
            if is_failing.is_set() and getattr(here, "rank", None) == failing:
                raise OSError("no space left here")
            return original(*arguments, **options)

        def act(line: ThreadRanks) -> tuple[str, Manifest]:
            here.rank = line.rank
            trainer = Trainer(url, line, tmp_path, tensors)
            trainer.publish(models[0], 0)
            line.share(b"all have published")
            is_failing.set()
            with pytest.raises(ThinwireError) as raised:
                trainer.publish(models[1], 1)
            assert trainer.publisher.is_settled
            line.share(b"all have failed")
            is_failing.clear()
            return str(raised.value), trainer.publish(models[2], 2)

        with mock.patch.object(owner, name, hook):
            found = on_ranks(3, act)
        (message,) = {message for message, _ in found}
        assert message.startswith(f"rank {failing}: ")
        assert "no space left here" in message
        assert all(manifest == found[0][1] for _, manifest in found)
        assert found[0][1].version == 2
        with Follower(open_stream(url), tmp_path / "f", lease=False) as follower:
            follower.catch_up()
            assert held_in(tmp_path / "f") == expected_rows(tensors, models[2])

    def test_a_rank_with_another_model(self, tmp_path: Path) -> None:
        def act(line: ThreadRanks) -> str:
            shape = (4,) if line.rank else (5,)
            tensors = [Tensor("t", "F32", shape, [Held.whole(shape)] * 2)]
            with pytest.raises(TensorMismatch) as raised:
                Trainer(str(tmp_path / "s"), line, tmp_path, tensors)
            return str(raised.value)

        found = on_ranks(2, act)
        assert len(set(found)) == 1

    def test_a_stream_of_another_model(self, tmp_path: Path) -> None:
        """All ranks learn of it, also those that could not have found out."""
        url = str(tmp_path / "s")
        first = [Tensor("t", "F32", (9,), [Held.whole((9,))])]
        check_run_once(url, tmp_path, first)

        def act(line: ThreadRanks) -> str:
            tensors = [Tensor("t", "BF16", (9,), [Held.whole((9,)), None])]
            with pytest.raises(TensorMismatch, match="'t'") as raised:
                Trainer(url, line, tmp_path / "other", tensors)
            return str(raised.value)

        messages = on_ranks(2, act)
        assert all("BF16" in message for message in messages)


def check_run_once(url: str, folder: Path, tensors: Sequence[Tensor]) -> None:
    def act(line: ThreadRanks) -> None:
        trainer = Trainer(url, line, folder, tensors)
        with closing(trainer.publisher):
            trainer.publish(random_model(tensors, np.random.default_rng(0)), 0)

    on_ranks(1, act)


def test_a_failure_is_the_same_error_on_every_rank() -> None:
    """Also of what is no error of thinwire's; of two that fail, the first one's."""

    def act(line: ThreadRanks) -> ThinwireError:
        def prepare() -> None:
            if line.rank == 1:
                raise MemoryError("no memory")
            if line.rank == 2:
                raise KeyError("w")

        with pytest.raises(ThinwireError) as raised:
            on_all(line, prepare)
        return raised.value

    found = on_ranks(3, act)
    assert [str(error) for error in found] == [str(found[0])] * 3
    assert "rank 1: MemoryError: no memory" in str(found[0])
    assert isinstance(found[1].__cause__, MemoryError)


@pytest.mark.parametrize("count", [0, 1], ids=["the first version", "a delta"])
def test_a_rank_that_writes_to_another_place(count: int, tmp_path: Path) -> None:
    """Its host's mount is away, and something lies in its place: what it uploads is nowhere."""
    shape = (2200, 64)
    parts = [Held(shape, (((a, b),), ((0, 64),))) for a, b in ((0, 1100), (1100, 2200))]
    tensors = [
        Tensor(f"w{number}", "BF16", shape, [part if rank == number else None for rank in (0, 1)])
        for number, part in enumerate([Held.whole(shape)] * 2)
    ] + [Tensor("both", "BF16", shape, parts)]
    rng = np.random.default_rng(3)
    models = [random_model(tensors, rng)]
    models += [stepped(models[0], rng, 0.01), stepped(models[0], rng, 0.02)]
    share = tmp_path / "share"
    share.mkdir()
    for rank in (0, 1):
        (tmp_path / f"host{rank}").mkdir()
        (tmp_path / f"host{rank}" / "store").symlink_to(share)

    def act(line: ThreadRanks) -> list[Manifest]:
        place = tmp_path / f"host{line.rank}" / "store"
        trainer = Trainer(str(place), line, tmp_path / "scratch", tensors)
        with closing(trainer.publisher):
            for step in range(count):
                trainer.publish(models[step], step)
            if line.rank == 1:
                place.unlink()
                (place / "lost+found").mkdir(parents=True)
            with pytest.raises(NotFound, match="was uploaded, and is not in"):
                trainer.publish(models[count], count)
            if line.rank == 1:
                shutil.rmtree(place)
                place.symlink_to(share)
            return [trainer.publish(models[count + 1], count + 1)]

    assert [m.version for m in on_ranks(2, act)[0]] == [count + 1]
    with Follower(open_stream(share), tmp_path / "follower", lease=False) as follower:
        follower.catch_up()
    assert held_in(tmp_path / "follower") == expected_rows(tensors, models[count + 1])
