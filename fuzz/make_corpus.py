"""Writes the seeds of every target into fuzz/corpus/; never touches a file that is there.

    python -m fuzz.make_corpus

Findings are added by hand, by the name of what went wrong.
"""

from __future__ import annotations

import struct

from fuzz.target import CORPUS
from fuzz.targets import TARGETS

# native/fuzz/case.hpp: layout, base, change, tables, their number, flags, words, seed, payload.
_CASE = struct.Struct("<6BHQ")
_LAYOUTS = 11


def native_seeds() -> dict[str, bytes]:
    """Cases for the native harness: every layout, and payloads that no encoder writes."""
    seeds = {}
    for number in range(_LAYOUTS):
        # Words around the ends of a group, a block and a piece.
        words = (0, 1, 8, 127, 128, 129, 300, 2047, 2048, 2049, 5000)[number]
        for kind in range(2):
            change, tables = (number + 3 * kind) % 7, (number + 2 * kind) % 5
            case = _CASE.pack(number, 1 + kind, change, tables, number % 4, 0, words, number)
            seeds[f"layout-{number}-{kind}"] = case
    for name, payload in {
        "header-only": b"\0\x80",
        "one-byte": b"\0",
        "no-such-table": b"\x09\x80abc",
        "shift-too-small": b"\0\x3fabc",
        "shift-too-large": b"\0\xc1abc",
        "all-ones": b"\0\x40" + b"\xff" * 600,
        "all-zeros": b"\0\xc0" + bytes(600),
        "just-below-no-change": b"\0\x80" + b"\xff\xfe" * 40,
    }.items():
        seeds[name] = _CASE.pack(0, 1, 2, 1, 1, 0, 2300, 5) + payload
        seeds[name + "-wide"] = _CASE.pack(3, 0, 2, 4, 1, 0, 2300, 6) + payload
    return seeds


def main() -> None:
    """Write what is missing."""
    all_seeds = {name: target.seeds() for name, target in TARGETS.items()}
    for target_name, seeds in {**all_seeds, "native": native_seeds()}.items():
        folder = CORPUS / target_name
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            path = folder / f"seed-{name}"
            if not path.exists():
                path.write_bytes(data)
                print(f"{path.relative_to(CORPUS)}: {len(data)} bytes")


if __name__ == "__main__":
    main()
