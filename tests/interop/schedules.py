"""Every order in which a few actors may make their calls, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Yield = Callable[[], None]
"""Called by an actor before each of its calls: waits for its turn."""
Begin = Callable[[], tuple[list[Callable[[Yield], T]], Callable[[list[T]], None]]]


class _Step(NamedTuple):
    """Who went on, of whom, and who had gone on before."""

    chosen: int
    options: list[int]
    last: int

    def is_change(self, choice: int) -> bool:
        """Whether a choice takes the turn from one that could go on."""
        return self.last in self.options and choice != self.last


def explore(begin: Begin[T], *, max_changes: int | None = None) -> int:
    """Run all orders; returns how many there are.

    Args:
        begin: Makes a new world: its actors, and what checks their results.
        max_changes: Only orders that take the turn so often from one that could go on.
    """
    waiting: list[list[int]] = [[]]
    count = 0
    while waiting:
        prefix = waiting.pop()
        actors, check = begin()
        steps, results = _run(actors, prefix)
        try:
            check(results)
        except BaseException as error:
            error.add_note(f"in the order {[step.chosen for step in steps]}")
            raise
        count += 1
        change_count = sum(step.is_change(step.chosen) for step in steps[: len(prefix)])
        for at, step in enumerate(steps[len(prefix) :], len(prefix)):
            before = [one.chosen for one in steps[:at]]
            for other in step.options:
                changes = change_count + step.is_change(other)
                if other != step.chosen and (max_changes is None or changes <= max_changes):
                    waiting.append([*before, other])
    return count


def _run(actors: list[Callable[[Yield], T]], prefix: list[int]) -> tuple[list[_Step], list[T]]:
    """Run one order: who is named first, then whoever can go on."""
    turns = [threading.Semaphore(0) for _ in actors]
    events: SimpleQueue[tuple[int, bool]] = SimpleQueue()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def act(number: int) -> None:
        def turn() -> None:
            events.put((number, False))
            turns[number].acquire()

        try:
            results[number] = actors[number](turn)
        except BaseException as error:
            errors.append(error)
        events.put((number, True))

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(actors))]
    for thread in threads:
        thread.start()
    waiting = {number for number, is_done in (events.get() for _ in actors) if not is_done}
    steps: list[_Step] = []
    last = -1
    while waiting:
        options = sorted(waiting)
        if len(steps) < len(prefix):
            chosen = prefix[len(steps)]
        else:
            chosen = last if last in waiting else options[0]
        steps.append(_Step(chosen, options, last))
        last = chosen
        turns[chosen].release()
        number, is_done = events.get()
        assert number == chosen
        if is_done:
            waiting.discard(number)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return steps, [results[number] for number in range(len(actors))]
