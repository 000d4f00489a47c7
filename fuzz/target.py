"""What a fuzz target is, what counts as a finding, and how much memory a reader may take."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

CORPUS = Path(__file__).parent / "corpus"
MAX_INPUT_BYTES = 1 << 14
MEMORY_BYTES = 512 << 20


class Finding(AssertionError):
    """Something that must never happen, happened."""


class Target(NamedTuple):
    """One reader under test.

    Attributes:
        name: That of its corpus folder.
        run: Reads an input; returns if all is well, whether the input was taken or refused.
        mutate: Another input from one; knows the structure, so that it gets behind the checksums.
        seeds: Sound inputs; from these the corpus was made.
    """

    name: str
    run: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes]
    seeds: Callable[[], dict[str, bytes]]

    def corpus(self) -> list[Path]:
        """The files to begin with: seeds, and what once was a finding."""
        return sorted((CORPUS / self.name).iterdir())


def require(holds: bool, what: str) -> None:
    """Raise a finding unless ``holds``; unlike ``assert`` also under ``python -O``."""
    if not holds:
        raise Finding(what)


@contextmanager
def bounded_memory(extra_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """Let the process take ``extra_bytes`` more than now; beyond that ``MemoryError`` comes.

    Where the system cannot tell or limit the address space, the peak of the resident memory is
    compared afterwards.
    """
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    status = Path("/proc/self/statm")
    if status.exists():
        mapped_bytes = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + extra_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before) << 10
    require(grown <= extra_bytes, f"resident memory grew by {grown} bytes")


def run_bounded(target: Target, data: bytes) -> None:
    """Run one input; taking much memory for it is a finding, too."""
    with bounded_memory():
        target.run(data)
