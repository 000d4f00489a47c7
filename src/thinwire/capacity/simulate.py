"""A stream played through, event by event: the same seed gives the same run.

Versions come, replicas learn of them, go by the routes that followers plan, share links and relays,
crash and join; regions are cut off and come back. Nothing is fetched and no clock is asked. A
maintainer is done at once, relays forget nothing, and what the bucket refuses is nothing.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from thinwire.capacity import facts, relays
from thinwire.capacity.history import FIRST, History
from thinwire.capacity.links import SharedLink
from thinwire.capacity.outcome import Cut, RegionRun, Run, quantiles, weighted
from thinwire.capacity.payload import fetches_at_once, payload_of, range_bytes, windowed
from thinwire.capacity.scenario import Scenario
from thinwire.capacity.tables import merged_share
from thinwire.capacity.timing import exchange_s, take_of, timing_of
from thinwire.errors import HistoryPruned, InvalidArgument
from thinwire.stream.polling import MAX_WAIT_S, Cadence
from thinwire.stream.routes import Hop, Options, plan_route

MAX_STEPS = 10_000
MAX_REPLICAS = 20_000
HOUR_S = 3600.0
# How long a replica that crashed is away: a process, a host or a container is started again.
RESTART_S = 60.0
# A follower that found the store away looks again after so long.
_AWAY_S = 10.0


@dataclass
class _Replica:
    number: int
    region: int
    relay: int
    held: int | None
    cadence: Cadence = field(default_factory=Cadence)
    is_busy: bool = False
    life: int = 0  # what was begun in an earlier one is nobody's any more
    since_s: float = 0.0


class _Upstream:
    """What a relay, or a replica without one, has from the bucket, and who waits for more."""

    def __init__(self, link: SharedLink) -> None:
        self.link = link
        self.held: set[Hop] = set()
        self.waiting: dict[Hop, list[Callable[[float], None]]] = {}


def play(
    scenario: Scenario,
    step_count: int,
    *,
    cuts: Sequence[Cut] = (),
    crash_per_hour: float = 0.0,
    seed: int = 0,
) -> Run:
    """Play so many versions through, and one more of time for the last to arrive.

    Args:
        scenario: What there is.
        step_count: Versions after the first, which all replicas hold at the start.
        cuts: Regions that are cut off.
        crash_per_hour: Of all replicas, those that crash within an hour and begin with nothing.
        seed: Of everything random.

    Raises:
        InvalidArgument: More versions or replicas than this is made for, or no share crashes.
    """
    if not 0 <= crash_per_hour <= 1:
        raise InvalidArgument(
            f"crash_per_hour is {crash_per_hour:g}",
            hint="A share of all replicas: 0.02 is 2 %",
            field="crash_per_hour",
            value=crash_per_hour,
        )
    if not 1 <= step_count <= MAX_STEPS or scenario.replicas > MAX_REPLICAS:
        raise InvalidArgument(
            f"{step_count} versions of {scenario.replicas} replicas to simulate",
            hint=f"At most {MAX_STEPS} versions and {MAX_REPLICAS} replicas",
        )
    return _World(scenario, step_count, cuts, crash_per_hour, seed).run()


class _World:
    def __init__(
        self,
        scenario: Scenario,
        step_count: int,
        cuts: Sequence[Cut],
        crash_per_hour: float,
        seed: int,
    ) -> None:
        self._scenario = scenario
        self._step_count = step_count
        self._cuts = cuts
        self._crash_per_hour = crash_per_hour
        self._random = random.Random(seed)
        self._payload = payload_of(scenario)
        timing = timing_of(scenario, self._payload.delta)
        # A version waits until the one before is done.
        self._interval_s = max(scenario.step_s, timing.trainer_s)
        self._made_s = timing.stall_s + timing.trainer_s
        self._end_s = self._made_s + (step_count + 1) * self._interval_s
        self._history = History(
            scenario.policy, self._payload.delta.total_bytes, scenario.raw_bytes, scenario.step_s
        )
        self._options = _frozen(self._history)
        self._committed_s = {FIRST: 0.0}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_count = 0
        self._now_s = 0.0
        self._routes: dict[tuple[int | None, int], tuple[Hop, ...]] = {}
        self._sizes: dict[Hop, int] = {}
        self._take_s: dict[Hop, float] = {}
        self._make_links()
        self._replicas = [self._new_replica(number) for number in range(scenario.replicas)]
        self._behind: list[dict[int, float]] = [{} for _ in range(scenario.regions)]
        self._late_s: list[list[float]] = [[] for _ in range(scenario.regions)]
        self._all_served_s: list[float] = []
        self._unserved: dict[int, set[int]] = {}
        self._hops: Counter[str] = Counter()
        self._updates = self._joins = self._crashes = 0

    def _make_links(self) -> None:
        scenario, delta = self._scenario, self._payload.delta
        local = scenario.local_bits_per_s / 8
        at_once = fetches_at_once(delta.size, scenario.memory_limit_bytes)
        far = windowed(local, at_once, range_bytes(delta.size), scenario.rtt_s)
        link = scenario.link_bits_per_s / 8
        if scenario.has_relay:
            # Of each object that a relay fetches; what bounds all of them together is the link.
            far = relays.fetched_per_s(scenario, delta)
            local, _ = relays.sent_per_s(scenario)
        self._links = [SharedLink(link, far) for _ in range(scenario.regions)]
        self._relays = [[_Upstream(link) for _ in range(scenario.relays)] for link in self._links]
        self._near = [
            [SharedLink(local, local) for _ in range(scenario.relays)] for _ in self._links
        ]
        self._is_cut = [False] * scenario.regions

    def _new_replica(self, number: int) -> _Replica:
        region = number % self._scenario.regions
        relay = number // self._scenario.regions % self._scenario.relays
        return _Replica(number, region, relay, FIRST)

    def run(self) -> Run:
        for number in range(self._step_count):
            self._at(self._made_s + number * self._interval_s, self._commit)
        for cut in self._cuts:
            self._at(cut.start_s, partial(self._cut, cut.region, True))
            self._at(cut.stop_s, partial(self._cut, cut.region, False))
        for replica in self._replicas:
            self._at(self._random.random() * self._scenario.poll_s, partial(self._look, replica, 0))
            self._plan_crash(replica, 0.0)
        self._play()
        for replica in self._replicas:
            self._note_time(replica, self._end_s)
        return self._result()

    def _play(self) -> None:
        links = [*self._links, *(link for region in self._near for link in region)]
        while True:
            ends = [
                (at, n) for n, link in enumerate(links) if (at := link.next_end_s()) is not None
            ]
            end_s, number = min(ends, default=(float("inf"), 0))
            event_s = self._events[0][0] if self._events else float("inf")
            self._now_s = max(self._now_s, min(end_s, event_s))
            if self._now_s > self._end_s or min(end_s, event_s) == float("inf"):
                return
            if end_s <= event_s:
                links[number].end(self._now_s)
            else:
                heapq.heappop(self._events)[2](self._now_s)

    def _at(self, moment_s: float, action: Callable[[float], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (moment_s, self._event_count, action))

    def _commit(self, now_s: float) -> None:
        for replica in self._replicas:
            self._note_time(replica, now_s)
        self._history.go_on()
        self._options = _frozen(self._history)
        self._routes.clear()
        head = self._history.head
        self._committed_s[head] = now_s
        self._unserved[head] = {r.number for r in self._replicas if r.held is not None}
        if not self._scenario.has_hub:
            return
        for replica in self._replicas:
            if not replica.is_busy and not self._is_cut[replica.region]:
                wake_s = self._random.random() * facts.WAKE_S.value + self._scenario.rtt_s
                self._at(now_s + wake_s, partial(self._woken, replica, replica.life))

    def _cut(self, region: int, is_cut: bool, now_s: float) -> None:
        self._is_cut[region] = is_cut
        self._links[region].open(now_s, is_open=not is_cut)

    def _plan_crash(self, replica: _Replica, now_s: float) -> None:
        if self._crash_per_hour:
            wait_s = self._random.expovariate(self._crash_per_hour / HOUR_S)
            self._at(now_s + wait_s, partial(self._crash, replica))

    def _crash(self, replica: _Replica, now_s: float) -> None:
        self._note_time(replica, now_s)
        self._crashes += 1
        replica.held, replica.is_busy = None, False
        replica.life += 1
        for waiting in self._unserved.values():
            waiting.discard(replica.number)
        self._at(now_s + RESTART_S, partial(self._look, replica, replica.life))
        self._plan_crash(replica, now_s)

    def _woken(self, replica: _Replica, life: int, now_s: float) -> None:
        """A look out of turn: those of the follower's own clock go on."""
        if replica.life == life and not replica.is_busy and not self._is_cut[replica.region]:
            self._begin(replica, now_s)

    def _look(self, replica: _Replica, life: int, now_s: float) -> None:
        if replica.life != life:
            return
        wait_s = _AWAY_S
        if not self._is_cut[replica.region]:
            if not replica.is_busy:
                self._begin(replica, now_s)
            wait_s = MAX_WAIT_S
            if not self._scenario.has_hub:
                jitter = self._random.random()
                wait_s = replica.cadence.wait_s(now_s, self._scenario.poll_s, jitter)
        self._at(now_s + wait_s, partial(self._look, replica, life))

    def _begin(self, replica: _Replica, now_s: float) -> None:
        """Go to the head, by the way that a follower would plan."""
        head = self._history.head
        if replica.held == head:
            return
        replica.is_busy = True
        route = self._route(replica.held, head)
        sizes = sum(self._sizes[hop] for hop in route)
        left = {"near"} if self._scenario.has_relay else set()
        life = replica.life

        def arrived(part: object, at_s: float) -> None:
            left.discard(str(part))
            if not left and replica.life == life:
                done = partial(self._served, replica, life, head, route)
                self._at(self._taken_s(route, now_s, at_s), done)

        if self._scenario.has_relay:
            upstream = self._relays[replica.region][replica.relay]
            missing = [hop for hop in route if hop not in upstream.held]
            left.update(str(hop) for hop in missing)
            for hop in missing:
                self._fetch(upstream, hop, now_s, partial(arrived, hop))
            near = self._near[replica.region][replica.relay]
            near.add(now_s, sizes, partial(arrived, "near"))
        else:
            left.add("far")
            self._links[replica.region].add(now_s, sizes, partial(arrived, "far"))

    def _fetch(
        self, upstream: _Upstream, hop: Hop, now_s: float, arrived: Callable[[float], None]
    ) -> None:
        """Have a relay fetch something, once for all who want it."""
        waiting = upstream.waiting.get(hop)
        if waiting is not None:
            waiting.append(arrived)
            return
        upstream.waiting[hop] = [arrived]

        def done(at_s: float) -> None:
            upstream.held.add(hop)
            for tell in upstream.waiting.pop(hop):
                tell(at_s)

        upstream.link.add(now_s, self._sizes[hop], done)

    def _taken_s(self, route: Sequence[Hop], begun_s: float, fetched_s: float) -> float:
        """When the last of some hops is taken: each as soon as it is there and its turn comes."""
        trips = facts.COMMIT_ROUND_TRIPS.value + len(route) * self._payload.delta.count
        fetch_s = fetched_s - begun_s + trips * self._scenario.rtt_s
        taken_s = begun_s
        for number, hop in enumerate(route, 1):
            taken_s = max(taken_s, begun_s + fetch_s * number / len(route)) + self._take_s[hop]
        return taken_s

    def _served(
        self, replica: _Replica, life: int, version: int, route: Sequence[Hop], now_s: float
    ) -> None:
        if replica.life != life:
            return
        self._note_time(replica, now_s)
        before, replica.held, replica.is_busy = replica.held, version, False
        self._updates += 1
        self._joins += before is None
        self._hops.update(hop.kind for hop in route)
        created_s = self._committed_s[version]
        replica.cadence.note(created_s, now_s, version - (before or version))
        self._late_s[replica.region].append(now_s - created_s)
        for reached in [v for v in self._unserved if v <= version]:
            waiting = self._unserved[reached]
            waiting.discard(replica.number)
            if not waiting:
                del self._unserved[reached]
                self._all_served_s.append(now_s - self._committed_s[reached])
        if self._history.head > version and not self._is_cut[replica.region]:
            self._begin(replica, now_s)

    def _route(self, have: int | None, head: int) -> tuple[Hop, ...]:
        """The way that followers plan, with each step delta as a hop of its own."""
        known = self._routes.get((have, head))
        if known is not None:
            return known
        try:
            planned = plan_route(have, head, self._options)
        except HistoryPruned:
            planned = plan_route(None, head, self._options)
        hops: list[Hop] = []
        for hop in planned:
            if hop.kind == "steps":
                hops += [Hop("steps", v, v + 1) for v in range(hop.base, hop.version)]
            else:
                hops.append(hop)
        for hop in hops:
            if hop not in self._sizes:
                self._sizes[hop], self._take_s[hop] = self._weigh(hop)
        found = self._routes[have, head] = tuple(hops)
        return found

    def _weigh(self, hop: Hop) -> tuple[int, float]:
        """Bytes of a hop, and what a replica is busy with once it has them."""
        scenario = self._scenario
        if hop.kind == "anchor":
            return scenario.raw_bytes, 2 * scenario.raw_bytes / scenario.disk_bytes_per_s
        size = self._payload.delta.total_bytes
        changed = scenario.changed
        if hop.kind == "merge":
            size = self._options.merges[hop.base, hop.version]
            changed = merged_share(changed, hop.version - hop.base)
        take_s = sum(phase.seconds for phase in take_of(scenario, changed))
        return size, take_s + exchange_s(scenario, changed)

    def _note_time(self, replica: _Replica, now_s: float) -> None:
        """Count how long a replica was how far behind; one that holds nothing serves nothing."""
        if replica.held is not None and now_s > replica.since_s:
            behind = self._history.head - replica.held
            seconds = self._behind[replica.region]
            seconds[behind] = seconds.get(behind, 0.0) + now_s - replica.since_s
        replica.since_s = now_s

    def _result(self) -> Run:
        regions = []
        for number, link in enumerate(self._links):
            count = sum(replica.region == number for replica in self._replicas)
            late = sorted(self._late_s[number])
            regions.append(
                RegionRun(
                    number,
                    count,
                    link.total_bytes,
                    weighted(self._behind[number]),
                    quantiles(late),
                )
            )
        return Run(
            self._step_count,
            self._end_s,
            regions,
            quantiles(sorted(self._all_served_s)),
            self._updates,
            self._joins,
            self._crashes,
            dict(sorted(self._hops.items())),
        )


def _frozen(history: History) -> Options:
    return history.options._replace(anchors=dict(history.anchors), merges=dict(history.merges))
