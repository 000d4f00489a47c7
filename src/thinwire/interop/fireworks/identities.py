"""The order of snapshots by their identities; no file of theirs says which one they are made from.

thinwire calls them ``step-00000007`` and ``v00000007-`` with eight digits of the manifest's digest,
and ``-full-2`` behind that says that a full snapshot was sent because another one had failed. Other
names are ordered by the one number that differs between them. Where that is not one, or two
snapshots have the same, there is no order that could be trusted, and that is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from thinwire.errors import InvalidArgument

_AGAIN = re.compile(r"-full-(\d{1,18})\Z", re.ASCII)
_OWN = re.compile(r"(?:step-(\d{8,18})|v(\d{8,18})-[0-9a-f]{8})\Z", re.ASCII)
_NUMBER = re.compile(r"\d+", re.ASCII)
_MAX_DIGITS = 18


def stem_of(identity: str) -> tuple[str, int]:
    """An identity without what says that it was sent again, and how often it was."""
    again = _AGAIN.search(identity)
    return (identity[: again.start()], int(again[1])) if again else (identity, 0)


def version_of(identity: str) -> int | None:
    """The number of one snapshot: thinwire's own, or the last in its name; None: it has none."""
    numbers = _numbers(stem_of(identity)[0])
    return numbers[-1] if numbers else None


def order_of(stems: Sequence[str], where: object) -> list[int]:
    """A number for each of several stems, by which they are in order.

    Args:
        stems: Names without what says that they were sent again; each one once.
        where: The folder that they lie in.

    Raises:
        InvalidArgument: Their names do not say in which order they are.
    """
    rows = [_numbers(stem) for stem in stems]
    if not any(rows):
        by_name = sorted(stems)
        return [by_name.index(stem) for stem in stems]
    lengths = {len(row) for row in rows}
    if lengths != {len(rows[0])}:
        odd = next(n for n, row in enumerate(rows) if len(row) != len(rows[0]))
        raise _unordered(f"{_shown(stems[0])} and {_shown(stems[odd])} have unlike numbers", where)
    differing = [column for column in zip(*rows, strict=True) if len(set(column)) > 1]
    if len(differing) > 1:
        raise _unordered(f"more than one number differs, as in {_shown(stems[0])}", where)
    numbers = list(differing[0]) if differing else [row[-1] for row in rows]
    seen: dict[int, str] = {}
    for number, stem in zip(numbers, stems, strict=True):
        if number in seen:
            both = f"{_shown(seen[number])} and {_shown(stem)}"
            raise _unordered(f"{both} both have the number {number}", where)
        seen[number] = stem
    return numbers


def _numbers(stem: str) -> list[int]:
    if own := _OWN.match(stem):
        return [int(own[1] or own[2])]
    # No counter has more digits: those of digests and the like may.
    found = (number for number in _NUMBER.findall(stem) if len(number) <= _MAX_DIGITS)
    return [int(number) for number in found]


def _shown(name: str) -> str:
    return repr(name[:80])


def _unordered(what: str, where: object) -> InvalidArgument:
    return InvalidArgument(
        f"{where}: the snapshots' names do not say their order: {what}",
        hint="Leave the snapshots of one chain in the folder, or rename them so that one number"
        " counts up",
        path=str(where),
    )
