"""What the client tells the ranks, and the notes that the ranks leave.

vLLM's calls carry words one way only: so each rank answers by a small file in the host's folder.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from thinwire.checkpoint.disk import os_errors
from thinwire.engines.host import FOLDER_NAME
from thinwire.errors import InvalidArgument

Do = Literal["attach", "stage", "apply", "undo", "prove"]
MAX_NOTE_BYTES = 1 << 24
_TOKEN = re.compile(r"[0-9a-f]{8,64}\Z")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank is to do.

    Attributes:
        do: What.
        token: Of the update.
        call: Of this message, for the answer.
        folder: The host's copy.
        base: The label that the changes start from; empty: anything may differ.
        label: The label of the version.
        ways: The ways that may be taken; empty: all.
        is_checkpoint_format: For releases before 0.26, which ask for it; always false.
    """

    do: Do
    token: str
    call: str
    folder: str
    base: str = ""
    label: str = ""
    ways: list[str] = []
    is_checkpoint_format: bool = False

    def check(self) -> None:
        """Refuse what could name another file.

        Raises:
            InvalidArgument: A token is none, or the folder is no host's copy.
        """
        if not _TOKEN.match(self.token) or not _TOKEN.match(self.call):
            raise InvalidArgument("a token is not made of 8 to 64 hexadecimal digits")
        if not (Path(self.folder) / FOLDER_NAME).is_dir():
            raise InvalidArgument(
                f"{self.folder} is no host's copy here",
                hint="The engine must see the driver's folder under the same path: mount it",
            )


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's answer.

    Attributes:
        rank: Its number over all data-parallel replicas.
        boot: Random for each start of its process.
        call: The message that it answers.
        state: What became of it.
        error: What went wrong.
        label: The version that it holds, exactly; empty: that is not known.
        seconds: What the message took.
        facts: What there is to tell.
    """

    rank: int
    boot: str
    call: str
    state: Literal["done", "failed", "no-model"]
    error: str = ""
    hint: str = ""
    label: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = {}


def write_note(folder: Path, note: Note) -> None:
    """Leave a note; the one before is replaced as one step.

    Raises:
        StoreError: It cannot be written.
    """
    path = folder / FOLDER_NAME / "ranks" / f"{note.rank}.json"
    new = path.with_suffix(".new")
    with os_errors("cannot write", path):
        new.write_bytes(msgspec.json.encode(note))
        new.replace(path)


def read_note(folder: Path, rank: int) -> Note | None:
    """A rank's last note; None: there is none that can be read."""
    path = folder / FOLDER_NAME / "ranks" / f"{rank}.json"
    with suppress(OSError, msgspec.MsgspecError):
        with path.open("rb") as file:
            data = file.read(MAX_NOTE_BYTES + 1)
        if len(data) <= MAX_NOTE_BYTES:
            return msgspec.json.decode(data, type=Note)
    return None
