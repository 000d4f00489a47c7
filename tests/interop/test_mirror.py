"""A mirror keeps another system's chain at the newest version, whatever interrupts it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tests.interop.chains import publish, read_tensors, write_versions

from thinwire.errors import AlreadyExists, InvalidArgument, NotFound, ThinwireError, Unavailable
from thinwire.follow import open_stream
from thinwire.interop.destination import RECORD, MirroredVersion
from thinwire.interop.formats import format_named
from thinwire.interop.mirror import Mirror, mirror_sink
from thinwire.publish import Publisher
from thinwire.store import Store, open_store
from thinwire.stream.version import Version
from thinwire.testing.faults import FaultStore, Rates

from .test_convert import replayed

Told = list[tuple[Version, MirroredVersion]]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_versions(tmp_path_factory.mktemp("versions"), 7)


class Lab:
    """A stream of the first versions, and mirrors of it."""

    def __init__(self, root: Path, versions: list[Path]) -> None:
        self.root = root
        self.versions = versions
        self.chain = root / "chain"
        self.count = 0
        self._replays = 0

    def publish(self, count: int = 1) -> None:
        publish(
            self.root / "stream",
            self.root / "state",
            self.versions[self.count : self.count + count],
            first_step=self.count + 1,
        )
        self.count += count

    def mirror(
        self,
        format: str = "slime",
        *,
        store: Store | None = None,
        full_every: int | None = 0,
        keep_full: int = 0,
        accept_new_lineages: bool | None = None,
    ) -> Mirror:
        stream = open_stream(self.root / "stream")
        sink = mirror_sink(
            stream,
            self.root / "copy",
            store or open_store(str(self.chain)),
            format_named(format),
            full_every=full_every,
            keep_full=keep_full,
        )
        return Mirror(stream, sink, accept_new_lineages=accept_new_lineages)

    def catch_up(self, **options: object) -> Told:
        with self.mirror(**options) as mirror:  # type: ignore[arg-type]
            return list(mirror.catch_up())

    def states(self) -> dict[int, dict[str, bytes]]:
        self._replays += 1
        return replayed(self.chain, None, self.root / f"work-{self._replays}")

    def wanted(self, *numbers: int) -> dict[int, dict[str, bytes]]:
        return {number: read_tensors(self.versions[number - 1]) for number in numbers}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.chain.iterdir() if path.name[0] != ".")

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.chain)): path.read_bytes()
            for path in sorted(self.chain.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def lab(tmp_path: Path, versions: list[Path]) -> Lab:
    return Lab(tmp_path, versions)


def shown(told: Told) -> list[tuple[int, int | None]]:
    return [(written.version, written.base) for _, written in told]


@pytest.mark.parametrize("format", ["slime", "fireworks", "trl", "grail"])
def test_begins_with_the_newest_and_goes_on(lab: Lab, format: str) -> None:
    lab.publish(2)
    assert shown(lab.catch_up(format=format)) == [(2, None)]
    assert lab.catch_up(format=format) == []
    lab.publish(3)
    assert shown(lab.catch_up(format=format)) == [(3, 2), (4, 3), (5, 4)]
    assert lab.states() == lab.wanted(2, 3, 4, 5)


def test_plain_checkpoints(lab: Lab) -> None:
    lab.publish(2)
    lab.catch_up(format="hf", keep_full=2)
    lab.publish(2)
    assert shown(lab.catch_up(format="hf", keep_full=2)) == [(3, None), (4, None)]
    assert lab.names() == ["latest", RECORD, "version_000003", "version_000004"]
    assert read_tensors(lab.chain / "version_000004") == read_tensors(lab.versions[3])


def test_nothing_published_yet(lab: Lab) -> None:
    with pytest.raises(NotFound):
        lab.catch_up()


def test_full_versions_at_their_time_and_old_ones_go(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=2, keep_full=1)
    lab.publish(6)
    told = lab.catch_up(full_every=2, keep_full=1)
    assert shown(told) == [(2, 1), (3, 2), (4, None), (5, 4), (6, 5), (7, None)]
    assert lab.names() == [RECORD, "weight_v000007"]
    assert lab.states() == lab.wanted(7)


def test_keeps_what_the_oldest_kept_full_version_needs(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up(full_every=2, keep_full=2)
    lab.publish(6)
    lab.catch_up(full_every=2, keep_full=2)
    assert lab.states() == lab.wanted(4, 5, 6, 7)


def test_what_the_format_cannot_carry_travels_in_full(lab: Lab, tmp_path: Path) -> None:
    lab.publish(1)
    lab.catch_up()
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in lab.versions[1].iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "config.json").write_text('{"model_type": "other"}')
    publish(tmp_path / "stream", tmp_path / "state", [changed])
    assert shown(lab.catch_up()) == [(2, None)]
    made = lab.chain / "weight_v000002"
    assert (made / "config.json").read_text() == '{"model_type": "other"}'
    assert read_tensors(made) == read_tensors(changed)


def test_new_lineage_begins_with_full_weights(lab: Lab) -> None:
    lab.publish(2)
    lab.catch_up()
    with Publisher(
        lab.root / "stream", lab.root / "state-2", new_lineage=True, maintain=False
    ) as publisher:
        publisher.publish(lab.versions[4], step=1)
        publisher.publish(lab.versions[5], step=2)
    with pytest.raises(ThinwireError) as raised:
        lab.catch_up()
    assert raised.value.code == "lineage-changed"
    told = lab.catch_up(accept_new_lineages=True)
    last = told[-1][1]
    states = lab.states()
    assert states[last.version] == read_tensors(lab.versions[5])
    assert any(written.base is None for _, written in told)


def test_destination_of_another_stream(lab: Lab, tmp_path: Path) -> None:
    lab.publish(1)
    lab.catch_up()
    before = lab.files()
    other = Lab(tmp_path / "other", lab.versions)
    (tmp_path / "other").mkdir()
    other.chain = lab.chain
    other.publish(1)
    with pytest.raises(InvalidArgument, match="mirror of another stream"):
        other.catch_up()
    assert lab.files() == before


def test_what_lay_there_before_is_not_replaced(lab: Lab) -> None:
    lab.publish(1)
    theirs = lab.chain / "weight_v000001" / "model.safetensors.index.json"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    for _ in range(2):
        with pytest.raises(AlreadyExists, match="did not write"):
            lab.catch_up()
    assert theirs.read_text() == "theirs"


def test_malformed_record(lab: Lab) -> None:
    lab.publish(1)
    lab.catch_up()
    (lab.chain / RECORD).write_text(json.dumps({"format": "slime"}))
    with pytest.raises(ThinwireError, match="malformed"):
        lab.catch_up()


class Died(BaseException):
    """Stands for the death of the process: nothing catches it."""


@pytest.mark.parametrize("is_first", [True, False])
def test_killed_at_every_call_of_the_store(lab: Lab, is_first: bool) -> None:
    """Wherever it dies, the next run ends with the very bytes of one that never did."""
    lab.publish(1)
    if not is_first:
        lab.catch_up()
        lab.publish(2)
    start = lab.files()
    copy = _copy_of(lab.root / "copy")
    calls: list[str] = []
    counting = FaultStore(
        open_store(str(lab.chain)), random.Random(1), hook=lambda *call: calls.append(call[1])
    )
    lab.catch_up(store=counting)
    wanted = lab.files()
    assert len(calls) > 5
    for death in range(len(calls)):
        _restore(lab.chain, start)
        _restore(lab.root / "copy", copy)
        left = [death]

        def die(*_: str, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Died
            left[0] -= 1

        dying = FaultStore(open_store(str(lab.chain)), random.Random(1), hook=die)
        with pytest.raises(Died):
            lab.catch_up(store=dying)
        lab.catch_up()
        assert lab.files() == wanted, f"died at call {death} ({calls[death]})"
    assert lab.states() == (lab.wanted(1) if is_first else lab.wanted(1, 2, 3))


def _copy_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _restore(folder: Path, files: dict[str, bytes]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
        else:
            path.rmdir()
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("seed", range(5))
def test_store_that_fails_now_and_then(lab: Lab, seed: int) -> None:
    lab.publish(1)
    lab.catch_up()
    lab.publish(3)
    flaky = FaultStore(
        open_store(str(lab.chain)),
        random.Random(seed),
        rates=Rates(fail_before=0.1, fail_after=0.1),
    )
    for _ in range(60):
        try:
            lab.catch_up(store=flaky)
        except Unavailable:
            continue
        break
    assert flaky.injected()
    states = lab.states()
    assert states[4] == read_tensors(lab.versions[3])
    assert all(state == read_tensors(lab.versions[n - 1]) for n, state in states.items())


def test_run_tells_passing_failures_and_stops(lab: Lab) -> None:
    told: list[tuple[int, int | None]] = []
    failures: list[ThinwireError] = []
    with lab.mirror() as mirror:

        def on_failure(error: ThinwireError) -> None:
            failures.append(error)
            lab.publish(2)

        for _, written in mirror.run(poll_s=0.01, on_failure=on_failure):
            told.append((written.version, written.base))
            if lab.count < 4:
                lab.publish(1)
            else:
                mirror.stop()
    assert [error.code for error in failures] == ["not-found"]
    assert told == [(2, None), (3, 2), (4, 3)]
    assert lab.states() == lab.wanted(2, 3, 4)
