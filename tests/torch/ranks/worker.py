"""One rank of a job: joins its process group, runs its program, writes down what happens."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# For what the jobs themselves do; the publisher's own deadline is another one.
_JOB_TIMEOUT = timedelta(seconds=60)


class Rank:
    """What a program knows of the rank that it runs on.

    Attributes:
        rank: Its number.
        size: How many there are.
        folder: The job's folder, shared by all.
        options: What the test asks for.
    """

    def __init__(self, rank: int, size: int, folder: Path, options: dict[str, Any]) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self.options = options
        self._journal = os.open(folder / f"journal.{rank}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    @property
    def scratch(self) -> Path:
        """The publisher's folder: of its own on every rank."""
        return Path(self.options.get("scratch", self.folder)) / f"scratch.{self.rank}"

    def say(self, what: str, **facts: Any) -> None:
        """Tell the test; what was told survives a kill."""
        entry = {"what": what, "at_s": time.monotonic(), **facts}
        os.write(self._journal, json.dumps(entry).encode() + b"\n")

    def await_leave(self, step: int) -> None:
        """Wait until the test lets the job do that step."""
        path = self.folder / "leave"
        while True:
            with suppress(FileNotFoundError, ValueError):
                if int(path.read_text()) >= step:
                    return
            time.sleep(0.01)

    def await_release(self) -> None:
        """Wait until the test releases what it holds back."""
        while not (self.folder / "release").exists():
            time.sleep(0.01)


def main(start: dict[str, Any], programs: Mapping[str, Callable[[Rank], None]]) -> NoReturn:
    """Run a program in this process, which was just forked, and end the process."""
    code = 1
    try:
        log = os.open(start["log"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # A rank that hangs says where, and ends.
        faulthandler.dump_traceback_later(start["limit_s"], exit=True)
        os.environ.update(start["env"])
        torch.set_num_threads(1)
        seed = int(start["options"].get("seed", 0))
        random.seed(seed)
        torch.manual_seed(seed)
        rank = Rank(
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            Path(start["folder"]),
            start["options"],
        )
        _join(rank)
        rank.say("join")
        programs[start["program"]](rank)
        rank.say("end")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not the interpreter's own way out: threads of a broken job may never end.
        os._exit(code)


def _join(rank: Rank) -> None:
    if rank.size == 1:
        return
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if port:
        store = dist.TCPStore(address, port, None, False, timeout=_JOB_TIMEOUT)
    else:
        store = _store_of_rank_0(rank, address)
    dist.init_process_group(
        "gloo", store=store, rank=rank.rank, world_size=rank.size, timeout=_JOB_TIMEOUT
    )


def _store_of_rank_0(rank: Rank, address: str) -> Any:
    """Rank 0 runs the server, as with torchrun's default and a script's own launcher."""
    path = rank.folder / "port"
    if rank.rank == 0:
        store = dist.TCPStore(address, 0, None, True, wait_for_workers=False, timeout=_JOB_TIMEOUT)
        path.with_suffix(".part").write_text(str(store.port))
        path.with_suffix(".part").rename(path)
        return store
    while not path.exists():
        time.sleep(0.005)
    return dist.TCPStore(address, int(path.read_text()), None, False, timeout=_JOB_TIMEOUT)
