"""How ranks begin: who holds what; and what all of them must do, or none."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from thinwire.errors import InvalidArgument, ThinwireError
from thinwire.follow import Stream
from thinwire.publish.held import Held
from thinwire.publish.messages import Hello, Met, SentLayout, pack, unpack
from thinwire.publish.ranks import Fault, Ranks
from thinwire.publish.spreading import Holding, Inventory, inventory_of, spread_over
from thinwire.publish.units import Layout, Plan, Spread

T = TypeVar("T")


def meet(ranks: Ranks, stream: Stream, holdings: Sequence[Holding]) -> tuple[list[str], Plan]:
    """Rank 0 learns what each rank holds and tells all of them; all make the same plan."""
    hello = Hello(_host(), "", inventory_of(holdings))
    try:
        hello.stream = stream.record().stream
    except ThinwireError as error:
        hello.fault = Fault.of(error)
    ranks.report("hello", pack(hello))
    if ranks.rank == 0:
        said = ranks.collect("hello", sign_of_life="greeting")
        ranks.tell("met", pack(_met(said)))
    data = ranks.hear("met", sign_of_life="greeting")
    met = msgspec.msgpack.decode(unpack(data), type=Met)
    if met.fault is not None:
        raise met.fault.error()
    layouts = [
        Layout(
            layout.shape,
            tuple(Held(layout.shape, dims) for dims in layout.parts),
            tuple(layout.holders),
        )
        for layout in met.layouts
    ]
    spreads = [
        Spread(name, dtype, layouts[number].shape, layouts[number])
        for name, dtype, number in met.tensors
    ]
    return met.hosts, Plan(spreads, ranks.size)


def on_all(ranks: Ranks, prepare: Callable[[], T]) -> T:
    """What ``prepare`` returns, once it did on every rank.

    Raises:
        ThinwireError: That of the first rank on which it failed, on every rank. What one rank alone
            met is raised as it is.
    """
    found: T | None = None
    mine: Exception | None = None
    try:
        found = prepare()
    except Exception as error:
        mine = error
    if mine is not None and ranks.size == 1:
        raise mine
    fault = None if mine is None else Fault.of(mine)
    said = ranks.share(msgspec.msgpack.encode(fault))
    for rank, data in enumerate(said):
        first = msgspec.msgpack.decode(data, type=Fault | None)
        if first is not None:
            raise first.error(rank) from mine
    return cast(T, found)


def _host() -> str:
    """What tells hosts apart; containers may share a name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _other_stream(rank: int) -> InvalidArgument:
    return InvalidArgument(
        f"rank {rank} sees another stream than rank 0",
        hint="Pass the same URL on every rank; a folder must be one that all hosts share",
    )


def _met(said: Sequence[bytes]) -> Met:
    """What rank 0 makes of what every rank said."""
    hosts: list[str] = []
    try:
        spreads = spread_over(_inventories(said, hosts))
        if not spreads:
            return Met(fault=Fault.of(InvalidArgument("there are no tensors to publish")))
        Plan(spreads, len(said))
    except ThinwireError as error:
        return Met(fault=Fault.of(error))
    numbers = {layout: n for n, layout in enumerate(dict.fromkeys(s.layout for s in spreads))}
    layouts = [
        SentLayout(layout.shape, [part.dims for part in layout.parts], list(layout.holders))
        for layout in numbers
    ]
    tensors = [(spread.name, spread.dtype, numbers[spread.layout]) for spread in spreads]
    return Met(hosts, tensors, layouts)


def _inventories(said: Sequence[bytes], hosts: list[str]) -> Iterator[Inventory]:
    """What each rank holds, one after the other: together they would take much memory."""
    stream = ""
    for rank, data in enumerate(said):
        hello = msgspec.msgpack.decode(unpack(data), type=Hello)
        if hello.fault is not None:
            raise hello.fault.error(rank)
        if stream not in ("", hello.stream):
            raise _other_stream(rank)
        stream = hello.stream
        hosts.append(hello.host)
        yield hello.inventory
