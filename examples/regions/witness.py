"""`thinwire serve` or `thinwire attach`, with a witness beside it that writes down what is served.

    python witness.py RECORD.jsonl serve --follow ...
    python witness.py RECORD.jsonl attach --engine vllm ...

After each update, in the thread that made it, so that no other comes between, the witness takes a
BLAKE3 digest of the weights where they are sampled from: the module's parameters, or vLLM's own,
put back under the checkpoint's names by `canonical.py` inside vLLM. thinwire has no part in that.
The events of the stream are written down beside it: what was fetched, applied, refused.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import httpx

sys.path.append(str(Path(__file__).resolve().parents[1]))

from digests import digest_of

from thinwire.stream.events import (
    Applied,
    EngineFailed,
    EngineUpdated,
    Event,
    Fetched,
    Observers,
    Refused,
)

ENGINE_TIMEOUT_S = 120.0
TOLD = (Fetched, Applied, Refused, EngineUpdated, EngineFailed)


class Record:
    """Lines of JSON, each with the time."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line."""
        with self._lock:
            print(json.dumps({"at_s": time.time(), "kind": kind, **facts}), file=self._file)
            self._file.flush()


class Witness:
    """An observer of events.

    Args:
        record: What it writes.
        updates: The event after which something else is served. Where `thinwire attach` has brought
            the host's copy to a version, that serves nobody yet.

    Attributes:
        look: Says what is served now: a version, its digest.
    """

    def __init__(self, record: Record, updates: type[Event]) -> None:
        self._record = record
        self.updates = updates
        self.look: Callable[[], dict[str, Any] | None] | None = None

    def on_event(self, event: Event) -> None:
        """Write it down; after an update also what is served."""
        if isinstance(event, TOLD):
            facts = asdict(event)
            # A line's own kind is that of the event.
            facts["what"] = facts.pop("kind", "")
            self._record.write(type(event).__name__, **facts)
        if isinstance(event, self.updates):
            self.note()

    def note(self) -> None:
        """Write down what is served."""
        found = None if self.look is None else self.look()
        if found is not None:
            self._record.write("Served", **found)


def watch_serve(witness: Witness) -> None:
    """Look into the module that `thinwire serve` samples from."""
    import thinwire.cli.serve as command
    from thinwire.engines.transformers import serving
    from thinwire.torch import TorchSink

    class Watched(TorchSink):
        """Shown to the witness as soon as it holds a version."""

        def __init__(self, module: Any, **options: Any) -> None:
            super().__init__(module, **options)

            def look() -> dict[str, Any] | None:
                if self.version is None:
                    return None
                with self.reading() as version:
                    digest = digest_of(module.named_parameters())
                    times = self.last_update
                    pause_s = None if times is None else times.wait_s + times.pause_s
                    return {"version": version.version, "digest": digest, "pause_s": pause_s}

            witness.look = look
            threading.Thread(target=self._first, daemon=True).start()

        def _first(self) -> None:
            # What its folder held is served without an event.
            while self.version is None:
                time.sleep(0.02)
            witness.note()

    serving.TorchSink = Watched  # type: ignore[attr-defined]
    observe_too(command, witness)


def watch_attach(witness: Witness, endpoint: str) -> None:
    """Ask vLLM's worker for the digest of its own parameters."""
    import thinwire.cli.attach as command

    def look() -> dict[str, Any]:
        with httpx.Client(trust_env=False, timeout=ENGINE_TIMEOUT_S) as client:
            label = client.get(f"{endpoint}/weight_info").json()["weight_version"]
            asked = {"method": "canonical_digest"}
            answer = client.post(f"{endpoint}/collective_rpc", json=asked).raise_for_status()
            version = int(str(label).partition("-")[0])
            return {"version": version, **answer.json()["results"][0]}

    witness.look = look
    observe_too(command, witness)


def observe_too(command: Any, witness: Witness) -> None:
    """Have the command's observer and the witness told of every event."""
    observing = command.observing

    @contextmanager
    def both(*arguments: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
        with observing(*arguments, **options) as (logger, observer):
            yield logger, Observers(observer, witness)

    command.observing = both


def main(record_path: Path, arguments: list[str]) -> None:
    """Run the command."""
    from thinwire.cli import main as run

    with record_path.open("a", encoding="utf-8") as file:
        witness = Witness(Record(file), Applied if arguments[0] == "serve" else EngineUpdated)
        if arguments[0] == "serve":
            import torch

            torch.set_num_threads(1)
            watch_serve(witness)
        else:
            watch_attach(witness, os.environ["REGIONS_ENGINE"])
        sys.argv = ["thinwire", *arguments]
        run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
