"""What the client tells the ranks, and the notes that the ranks leave.

vLLM's calls carry words one way only: so each rank answers by a small file in the host's folder.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from thinwire.checkpoint.disk import map_file, os_errors
from thinwire.engines.host import FOLDER_NAME
from thinwire.engines.mounts import refuse_network_folder
from thinwire.errors import InvalidArgument, ThinwireError

Do = Literal["meet", "attach", "stage", "apply", "undo", "prove"]
MAX_NOTE_BYTES = 1 << 24
_TOKEN = re.compile(r"[0-9a-f]{8,64}\Z")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank is to do.

    Attributes:
        do: What.
        token: Of the update.
        call: Of this message, for the answer.
        number: Rises from message to message of one client; a rank does nothing that comes late.
        owner: Random for each client. Only the one that attached a rank last may change it.
        folder: The host's copy.
        base: The label that the changes start from; empty: anything may differ.
        label: The label of the version.
        ways: The ways that may be taken; empty: all.
        unfed: Shell patterns of parameters that the checkpoint need not feed.
        scope: What is proved: all words, or those that the update changed.
        is_checkpoint_format: For releases before 0.26, which ask for it; always false.
    """

    do: Do
    token: str
    call: str
    number: int
    owner: str
    folder: str
    base: str = ""
    label: str = ""
    ways: list[str] = []
    unfed: list[str] = []
    scope: Literal["all", "changes"] = "all"
    is_checkpoint_format: bool = False

    def check(self) -> None:
        """Refuse what could name another file.

        Raises:
            InvalidArgument: A token is none, or the folder is no host's copy.
        """
        if not _TOKEN.match(self.token) or not _TOKEN.match(self.call):
            raise InvalidArgument("a token is not made of 8 to 64 hexadecimal digits")
        folder = Path(self.folder)
        if not folder.is_absolute() or not (folder / FOLDER_NAME / "ranks").is_dir():
            raise InvalidArgument(
                f"{self.folder} is no host's copy here",
                hint="The engine must see the driver's folder under the same path: mount it",
            )
        refuse_network_folder(folder)


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has to tell.

    Attributes:
        way: The way of updates.
        reason: Why it is not the map.
        run_count: Runs of the index map.
        map_bytes: What it takes.
        is_cached: Whether it was found in the cache.
        probe_s: Seconds that finding it took.
        dense_s: Seconds of a load of everything.
        refused: Parameters that cannot be placed, with why; at most 20.
        loose: How many tensors go the dense way.
        held: Elements of each tensor that is not held in full.
        unseen: Elements of the model that cannot be compared.
        differing: Words that are not the host's copy's; None: that does not show.
        swap_count: Words that an update exchanges.
        is_active: Whether an update was begun and not ended.
    """

    way: str = ""
    reason: str = ""
    run_count: int = 0
    map_bytes: int = 0
    is_cached: bool = False
    probe_s: float = 0.0
    dense_s: float | None = None
    refused: dict[str, str] = {}
    loose: int = 0
    held: dict[str, int] = {}
    unseen: int = 0
    differing: int | None = None
    swap_count: int = 0
    is_active: bool = False


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer.

    Attributes:
        rank: Its number over all data-parallel replicas.
        boot: Random for each start of its process.
        call: The message that it answers.
        state: What became of it.
        code: That of the error.
        error: What went wrong.
        hint: What to do about it.
        label: The version that it holds, exactly; empty: that is not known.
        seconds: What the message took.
        facts: What there is to tell.
    """

    rank: int
    boot: str
    call: str
    state: Literal["done", "failed", "no-model"]
    code: str = ""
    error: str = ""
    hint: str = ""
    label: str = ""
    seconds: float = 0.0
    facts: RankFacts = RankFacts()


def write_note(folder: Path, note: Note) -> None:
    """Leave a note, as one step.

    Raises:
        StoreError: It cannot be written.
    """
    path = _note_path(folder, note.rank, note.call)
    new = path.with_name(f".{note.rank}-{secrets.token_hex(8)}")
    with os_errors("cannot write", path):
        try:
            # Whoever else may write there must not have us follow a link of theirs.
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(note))
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def read_note(folder: Path, rank: int, call: str) -> Note | None:
    """A rank's answer to a message; None: there is none that can be read."""
    path = _note_path(folder, rank, call)
    with suppress(ThinwireError, msgspec.MsgspecError):
        data = map_file(path, follow_link=False)
        if data.size <= MAX_NOTE_BYTES:
            return msgspec.json.decode(data.tobytes(), type=Note)
    return None


def drop_notes(folder: Path, count: int, call: str) -> None:
    """Remove the answers of ``count`` ranks to a message."""
    for rank in range(count):
        with suppress(OSError):
            _note_path(folder, rank, call).unlink()


def _note_path(folder: Path, rank: int, call: str) -> Path:
    # One file for each message: what comes late must not take the place of a newer answer.
    return folder / FOLDER_NAME / "ranks" / f"{rank}-{call}.json"
