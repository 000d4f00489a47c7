"""A client of Fireworks' hot-load API: tell a deployment which snapshot of its bucket to serve.

A snapshot is a folder of the deployment's bucket, called by its *identity*: a checkpoint in the
layout of Hugging Face (full), or files of changes to the snapshot that is served now (incremental).
The upload comes first, then ``signal``, then ``wait``. An incremental one is the difference from
what every replica serves; a full one comes first, after each failure, when dtypes or shapes change,
and from time to time. :class:`thinwire.interop.fireworks.FireworksSink` does all of that.

What is asked again: ``status`` and ``wait`` ask whatever failed for a while. ``signal`` is sent
again only where it surely did nothing (no connection, 429). Where its answer was lost, it is asked
whether a replica took it up; it is not sent twice, since a base may be subtracted only once. So an
identity is used for one snapshot, and after a failure the next one is full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from thinwire.checkpoint.file_names import name_fault
from thinwire.errors import Deadline, EngineError, InvalidArgument, LimitExceeded
from thinwire.interop.fireworks.replicas import (
    Replica,
    StatusAnswer,
    progress_of,
    replicas_of,
)
from thinwire.interop.hot_load_calls import (
    ACCEPTED,
    Clock,
    HotLoadCalls,
    Progress,
    check_replica_count,
    is_unknown,
)
from thinwire.interop.snapshot_identity import check_identity

ENDPOINT = "https://api.fireworks.ai"
COMPRESSION_FORMATS = ("arc_v1", "arc_v2", "arc_v3", "xor_one_to_one_zlib", "xor_one_to_one_zstd")
"""What its package writes. Its pages document ``arc_v2`` for buckets of one's own."""

CHECKSUM_FORMAT = "alder32"
"""As the API spells it; the checksum is Adler-32."""

_ROUTE = "/hot_load/v1/models/hot_load"
_HINT_ROUTE = f"{_ROUTE}/hint"
_RESET = "reset_prompt_cache"
_RESOURCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HINTS = {
    400: "Look at what it says; after a failed incremental snapshot, send a full one under a new "
    "identity",
    404: "Look whether the account, model and deployment are right, and hot load is enabled",
    409: "Another change of the deployment runs; wait for it, then send a full snapshot",
    425: "The deployment is swapping weights; wait, then ask again",
    429: "Fewer calls: wait longer between two snapshots",
}
_HINT_REFUSALS = (400, 404, 405, 422, 501)
_SETTLE_S = 15.0


class PromptCache(StrEnum):
    """What becomes of cached prompts after a swap (``reset_prompt_cache``)."""

    ALL = "all"
    NONE = "none"
    NEW_SESSION = "new_session"


class Signalled(NamedTuple):
    """A snapshot that was announced.

    Attributes:
        identity: Its identity, for ``wait``.
        is_reset_dropped: Whether the deployment did not know ``reset_prompt_cache``, and it was
            left out: its own default holds.
    """

    identity: str
    is_reset_dropped: bool = False


class HotLoad:
    """One deployment's hot-load API.

    Attributes:
        model: The model's full name.
        deployment: The deployment's full name.
        clock: What waiting is measured with.

    Args:
        account: The account's id.
        model: The model's id, or its full name (``accounts/A/models/M``) if another account's.
        deployment: The deployment's id, or its full name.
        key: An API key; sent to ``endpoint`` only, never shown.
        endpoint: Where the API listens: https, or this host.
        call_timeout_s: How long one call may take.
        poll_s: The pause between two looks of ``wait``.
        hint_file_field: The field that names the file in a hint. Fireworks' pages name the route
            and not its fields.
        clock: What waiting is measured with.

    Raises:
        InvalidArgument: One of them is not what it should be.
    """

    def __init__(
        self,
        account: str,
        model: str,
        deployment: str,
        *,
        key: str,
        endpoint: str = ENDPOINT,
        call_timeout_s: float = 60.0,
        poll_s: float = 2.0,
        hint_file_field: str = "filename",
        clock: Clock | None = None,
    ) -> None:
        self.model = _resource_name(account, "models", model)
        self.deployment = _resource_name(account, "deployments", deployment)
        self.clock = clock or Clock()
        self._poll_s = poll_s
        self._hint_file_field = hint_file_field
        self._calls = HotLoadCalls(
            endpoint,
            key,
            service="Fireworks",
            headers={"fireworks-model": self.model, "fireworks-deployment": self.deployment},
            hints=_HINTS,
            call_timeout_s=call_timeout_s,
            clock=self.clock,
        )

    def __repr__(self) -> str:
        return f"HotLoad({self.deployment!r}, endpoint={self._calls.endpoint!r})"

    def close(self) -> None:
        """Close what is open towards the API."""
        self._calls.close()

    def signal(
        self,
        identity: str,
        base: str | None = None,
        *,
        compression_format: str = "arc_v2",
        reset_prompt_cache: PromptCache | None = None,
        may_drop_reset: bool = False,
        ignored_config_fields: Sequence[str] = (),
    ) -> Signalled:
        """Have the deployment load a snapshot that is in its bucket, whole.

        Args:
            identity: Which; never used before.
            base: The snapshot that it is the difference from, which is served now; None: it is a
                full one.
            compression_format: How the differences are coded.
            reset_prompt_cache: What becomes of cached prompts; None: as the deployment does it.
            may_drop_reset: Send it again without ``reset_prompt_cache`` where the deployment
                does not know that field. Cached prompts of older weights may then stay.
            ignored_config_fields: Top-level fields of config.json that may differ from the
                deployment's model.

        Raises:
            InvalidArgument: An identity or the format is none.
            EngineError: It was refused. The context's ``status`` says how.
            EngineUnreachable: No answer, and no replica says that it was told.
            Deadline: The same, in the call's time.
        """
        body = self._signal_body(identity, base, compression_format, ignored_config_fields)
        if reset_prompt_cache is None:
            self._post_signal(identity, body)
            return Signalled(identity)
        try:
            self._post_signal(identity, body | {_RESET: PromptCache(reset_prompt_cache).value})
        except EngineError as error:
            if error.context.get("status") != 400 or _RESET not in error.context.get("body", ""):
                raise
            if not may_drop_reset:
                raise EngineError(
                    error.message,
                    hint=f"This deployment takes no {_RESET}, or not this value: allow it to be "
                    "left out (may_drop_reset), or give none",
                    **error.context,
                ) from error
            self._post_signal(identity, body)
            return Signalled(identity, is_reset_dropped=True)
        return Signalled(identity)

    def hint(self, identity: str, file_name: str) -> bool:
        """Tell that a file of a snapshot is uploaded, so that replicas may fetch it already.

        Only a help: ``signal`` is needed all the same.

        Args:
            identity: The snapshot.
            file_name: The file's name in its folder.

        Returns:
            Whether the hint was taken; False: the deployment takes none, or none of this shape.

        Raises:
            InvalidArgument: A name is none.
            ThinwireError: The call failed otherwise.
        """
        check_identity(identity)
        fault = name_fault(file_name)
        if fault is not None:
            raise InvalidArgument(
                f"the file name {file_name[:80]!r} {fault}", hint="Give one plain name"
            )
        body = {"identity": identity, self._hint_file_field: file_name}
        answer = self._calls.post_again(_HINT_ROUTE, body, ok=(*ACCEPTED, 204, *_HINT_REFUSALS))
        return answer.status not in _HINT_REFUSALS

    def status(self) -> tuple[Replica, ...]:
        """Every replica, as it describes itself.

        Raises:
            EngineError: The answer is none.
            LimitExceeded: It lists more than a named limit allows.
            ThinwireError: The call failed, and failed again.
        """
        return self._replicas(self._calls.get(_ROUTE))

    def wait(self, identity: str, timeout_s: float, *, replica_count: int | None = None) -> None:
        """Wait until replicas serve a snapshot.

        Args:
            identity: Which.
            timeout_s: How long; it is looked at least once.
            replica_count: How many must; None: every one that the deployment lists, and at least
                one. Give a number where replicas may be away for a while, or where some are enough.

        Raises:
            Deadline: They did not in time; the message says which are behind, and at what stage.
            EngineError: A replica gave it up.
            ThinwireError: The API refused the question.
        """
        check_identity(identity)
        check_replica_count(replica_count)
        most_listed = 0

        def look() -> Progress:
            nonlocal most_listed
            replicas = self._look()
            most_listed = max(most_listed, len(replicas))
            return progress_of(identity, replicas, replica_count, most_listed)

        doing = f"loading {identity!r} on {self.deployment}"
        self._calls.wait(look, doing=doing, timeout_s=timeout_s, every_s=self._poll_s)

    def _signal_body(
        self,
        identity: str,
        base: str | None,
        compression_format: str,
        ignored_config_fields: Sequence[str],
    ) -> dict[str, Any]:
        check_identity(identity)
        body: dict[str, Any] = {"identity": identity}
        if base is not None:
            check_identity(base)
            if base == identity:
                raise InvalidArgument(
                    f"the snapshot {identity!r} is given as its own base",
                    hint="Give every snapshot a new identity",
                )
            if compression_format not in COMPRESSION_FORMATS:
                raise InvalidArgument(
                    f"the compression format is {compression_format!r}",
                    hint=f"Give one of {', '.join(COMPRESSION_FORMATS)}",
                )
            body["incremental_snapshot_metadata"] = {
                "previous_snapshot_identity": base,
                "compression_format": compression_format,
                "checksum_format": CHECKSUM_FORMAT,
            }
        if ignored_config_fields:
            body["validation"] = {"extra_fields_ignore": list(ignored_config_fields)}
        return body

    def _post_signal(self, identity: str, body: dict[str, Any]) -> None:
        try:
            self._calls.post_once(_ROUTE, body)
        except (EngineError, Deadline) as error:
            if not is_unknown(error) or not self._has_arrived(identity):
                raise

    def _has_arrived(self, identity: str) -> bool:
        """Whether a replica was told of a snapshot whose signal's answer was lost."""

        def look() -> Progress:
            return Progress(any(one.mentions(identity) for one in self._look()), "", {})

        try:
            self._calls.wait(look, doing="", timeout_s=_SETTLE_S, every_s=self._poll_s)
        except (EngineError, Deadline, LimitExceeded):
            return False
        return True

    def _look(self) -> tuple[Replica, ...]:
        return self._replicas(self._calls.once("GET", _ROUTE).data)

    def _replicas(self, data: Any) -> tuple[Replica, ...]:
        answer = self._calls.parsed(data, StatusAnswer, f"GET {_ROUTE}")
        return replicas_of(answer, self.deployment)


def _resource_name(account: str, kind: str, name: str) -> str:
    """``accounts/A/KIND/N``, from an id or from that itself."""
    parts = name.split("/") if name.startswith("accounts/") else ["accounts", account, kind, name]
    is_one = len(parts) == 4 and parts[0] == "accounts" and parts[2] == kind
    if not is_one or not all(_RESOURCE.fullmatch(part) for part in (parts[1], parts[3])):
        raise InvalidArgument(
            f"account {account[:80]!r} and {kind[:-1]} {name[:140]!r} make no name",
            hint=f"Give ids of letters, digits, dots and dashes, or accounts/A/{kind}/N",
        )
    return "/".join(parts)
