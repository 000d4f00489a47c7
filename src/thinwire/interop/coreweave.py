"""A client of CoreWeave's hot-load API (RL Rollouts, a preview), and its snapshot's fields.

As at Fireworks a snapshot is a folder of the deployment's bucket, called by its identity, and is
full or the difference from the one that is served. Here an operation of its own loads it, with an
id that the caller may choose. It is made from deployment and identity: to send the same request
twice is then harmless, and it can be waited for after a restart with nothing remembered. So an
identity is for one snapshot and one try.

A deployment runs one hot-load at a time, and a chain has at most :data:`MAX_CHAIN_DELTAS`
differences after a full snapshot.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from thinwire.errors import EngineError, InvalidArgument, LimitExceeded
from thinwire.interop.coreweave_answers import (
    INCREMENTAL,
    CoreWeaveReplica,
    HotLoadAnswer,
    HotLoadOperation,
    ReplicaFields,
    ReplicaPage,
    operation_of,
    progress_of,
    raise_if_over,
    replicas_of,
)
from thinwire.interop.hot_load_calls import (
    MAX_REPLICAS,
    Clock,
    HotLoadCalls,
    Progress,
    check_replica_count,
    shown,
)
from thinwire.interop.snapshot_identity import check_identity

ENDPOINT = "https://api.coreweave.com"
MAX_CHAIN_DELTAS = 128
"""The most incremental snapshots after a full one."""

FULL = "SNAPSHOT_TYPE_FULL"
COMPRESSION_FORMAT = "COMPRESSION_FORMAT_ZSTD"
CHECKSUM_FORMAT = "CHECKSUM_FORMAT_ADLER32"

_ROUTE = "/v1alpha1/inference/hotLoads"
_PAGE_REPLICAS = 1000
_MAX_PAGES = 1024
_IDS = uuid.UUID("6f1d8f2e-5a5b-4a1e-9a53-0b6e3f1c7d42")
_REFUSED = (
    "Look at what it says: a deployment runs one hot-load at a time, an incremental snapshot needs "
    f"the one that is served as its base, and a chain holds at most {MAX_CHAIN_DELTAS} of them"
)
_HINTS = {
    400: _REFUSED,
    404: "Look whether the deployment is right, hot-load is enabled, and the snapshot signalled",
    409: _REFUSED,
    412: _REFUSED,
    429: "Fewer calls: wait longer between two snapshots",
}


class PromptCachePolicy(StrEnum):
    """What becomes of cached prompts after a swap (``promptCachePolicy``)."""

    PRESERVE = "PROMPT_CACHE_POLICY_PRESERVE"
    RESET_ALL = "PROMPT_CACHE_POLICY_RESET_ALL"


class CoreWeaveHotLoad:
    """One deployment's hot-load API.

    Args:
        deployment_id: The deployment's id, a UUID.
        key: An API access token; sent to ``endpoint`` only, never shown.
        endpoint: Where the API listens: https, or this host.
        call_timeout_s: How long one call may take.
        poll_s: The pause between two looks of ``wait``.
        clock: What waiting is measured with.

    Raises:
        InvalidArgument: One of them is not what it should be.
    """

    def __init__(
        self,
        deployment_id: str,
        *,
        key: str,
        endpoint: str = ENDPOINT,
        call_timeout_s: float = 60.0,
        poll_s: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        try:
            self.deployment_id = str(uuid.UUID(deployment_id))
        except ValueError as error:
            raise InvalidArgument(
                f"the deployment's id {deployment_id[:80]!r} is no UUID",
                hint="Give the id, not the name",
            ) from error
        self._poll_s = poll_s
        self._calls = HotLoadCalls(
            endpoint,
            key,
            service="CoreWeave",
            headers={},
            hints=_HINTS,
            call_timeout_s=call_timeout_s,
            clock=clock or Clock(),
        )

    def __repr__(self) -> str:
        return f"CoreWeaveHotLoad({self.deployment_id!r}, endpoint={self._calls.endpoint!r})"

    def close(self) -> None:
        """Close what is open towards the API."""
        self._calls.close()

    def signal(
        self,
        identity: str,
        base: str | None = None,
        *,
        prompt_cache_policy: PromptCachePolicy | None = None,
    ) -> HotLoadOperation:
        """Have the deployment load a snapshot that is in its bucket, whole.

        The same call again finds the operation that runs already.

        Args:
            identity: Which; never used before.
            base: The snapshot that it is the difference from, which is served now; None: it is a
                full one.
            prompt_cache_policy: What becomes of cached prompts; None: they stay, as the service
                has it.

        Raises:
            InvalidArgument: An identity is none.
            EngineError: It was refused, or this identity's load is over and failed, or was of
                another base.
            ThinwireError: The call failed, and failed again.
        """
        body = request_body(
            self.deployment_id, identity, base, prompt_cache_policy=prompt_cache_policy
        )
        try:
            answer = self._calls.post_again(_ROUTE, body)
        except EngineError as error:
            if error.context.get("status") not in {400, 409, 412}:
                raise
            found = self._found(identity)
            if found is None:
                raise
            return self._checked(found, identity, base)
        return self._checked(self._operation(answer.data, "POST"), identity, base)

    def status(self, identity: str) -> HotLoadOperation:
        """How far the loading of a signalled snapshot is.

        Raises:
            ThinwireError: There is none, or the call failed, and failed again.
        """
        return self._operation(self._calls.get(self._path(identity)), "GET")

    def replicas(self, identity: str) -> tuple[CoreWeaveReplica, ...]:
        """Every replica of a signalled snapshot's hot-load.

        Raises:
            LimitExceeded: There are more than a named limit allows.
            ThinwireError: There is no such hot-load, or the call failed, and failed again.
        """
        return self._listed(identity, self._calls.get)

    def wait(self, identity: str, timeout_s: float, *, replica_count: int | None = None) -> None:
        """Wait until replicas serve a signalled snapshot.

        Args:
            identity: Which.
            timeout_s: How long; it is looked at least once.
            replica_count: How many must; None: the operation must be complete, and every replica
                that it lists, at least one.

        Raises:
            Deadline: They did not in time; the message says which are behind, and in what state.
            EngineError: The operation failed, or was cancelled.
            ThinwireError: The API refused the question.
        """
        check_identity(identity)
        check_replica_count(replica_count)

        def get_once(path: str, params: Mapping[str, str | int] | None = None) -> Any:
            return self._calls.once("GET", path, params=params).data

        def look() -> Progress:
            operation = self._operation(get_once(self._path(identity)), "GET")
            raise_if_over(operation)
            return progress_of(operation, self._listed(identity, get_once), replica_count)

        doing = f"loading {identity!r} on {self.deployment_id}"
        self._calls.wait(look, doing=doing, timeout_s=timeout_s, every_s=self._poll_s)

    def _path(self, identity: str) -> str:
        return f"{_ROUTE}/{hot_load_id(self.deployment_id, identity)}"

    def _found(self, identity: str) -> HotLoadOperation | None:
        try:
            return self.status(identity)
        except EngineError as error:
            if error.context.get("status") == 404:
                return None
            raise

    def _operation(self, data: Any, method: str) -> HotLoadOperation:
        return operation_of(self._calls.parsed(data, HotLoadAnswer, f"{method} {_ROUTE}"))

    def _checked(
        self, operation: HotLoadOperation, identity: str, base: str | None
    ) -> HotLoadOperation:
        """An operation that is the one asked for, and may still come to a good end."""
        wanted = (hot_load_id(self.deployment_id, identity), self.deployment_id, identity, base)
        found = (operation.id, operation.deployment_id, operation.identity, operation.base)
        if found != wanted:
            raise EngineError(
                f"the hot-load {operation.id[:80]!r} is of {shown(found[1:])}, not {wanted[1:]}",
                hint="An identity is for one snapshot: send a full one under a new identity",
                identity=identity,
            )
        raise_if_over(operation)
        return operation

    def _listed(self, identity: str, get: Callable[..., Any]) -> tuple[CoreWeaveReplica, ...]:
        path = f"{self._path(identity)}/replicas"
        found: list[ReplicaFields] = []
        params: dict[str, str | int] = {"maxPageSize": _PAGE_REPLICAS}
        for _ in range(_MAX_PAGES):
            page = self._calls.parsed(get(path, params), ReplicaPage, f"GET {_ROUTE}/ID/replicas")
            found += page.replicas or []
            if len(found) > MAX_REPLICAS:
                break
            if not page.next_page_token:
                return replicas_of(found)
            params["pageToken"] = page.next_page_token
        raise LimitExceeded(
            f"{self.deployment_id} lists more than {MAX_REPLICAS} replicas, or {_MAX_PAGES} pages",
            hint="Look whether the endpoint is CoreWeave's",
        )


def request_body(
    deployment_id: str,
    identity: str,
    base: str | None = None,
    *,
    prompt_cache_policy: PromptCachePolicy | None = None,
) -> dict[str, Any]:
    """The fields that announce a snapshot to CoreWeave.

    Args:
        deployment_id: The deployment's id.
        identity: The snapshot's.
        base: The snapshot that it is the difference from; None: it is full.
        prompt_cache_policy: What becomes of cached prompts; None: not said.

    Raises:
        InvalidArgument: An identity is no path segment, or both are the same.
    """
    check_identity(identity)
    body: dict[str, Any] = {
        "deploymentId": deployment_id,
        "identity": identity,
        "type": FULL if base is None else INCREMENTAL,
        "hotLoadId": hot_load_id(deployment_id, identity),
    }
    if prompt_cache_policy is not None:
        body["promptCachePolicy"] = PromptCachePolicy(prompt_cache_policy).value
    if base is not None:
        check_identity(base)
        if base == identity:
            raise InvalidArgument(
                f"the snapshot {identity!r} is given as its own base",
                hint="Give every snapshot a new identity",
            )
        body["incrementalSnapshotMetadata"] = {
            "previousSnapshotIdentity": base,
            "compressionFormat": COMPRESSION_FORMAT,
            "checksumFormat": CHECKSUM_FORMAT,
        }
    return body


def hot_load_id(deployment_id: str, identity: str) -> str:
    """The id of the operation that loads a snapshot: always the same."""
    check_identity(identity)
    return str(uuid.uuid5(_IDS, f"{deployment_id}/{identity}"))
