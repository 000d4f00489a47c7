"""Waiting for a fleet: whether enough replicas are fresh enough, as a hub sees it."""

from __future__ import annotations

import logging
import threading
import time
from urllib.parse import quote, urlencode

import msgspec

from thinwire.errors import AccessDenied, InvalidArgument, NotFound, StoreError
from thinwire.report.beating import refusal_of
from thinwire.report.http import Address, Channel, HubFault
from thinwire.report.naming import check_name

_LOG = logging.getLogger("thinwire")
_AGAIN_S = 0.5
# A hub that is started again is there by then.
_AWAY_S = 5.0
_TIMEOUT_S = 5.0
_REFUSALS: dict[int, type[StoreError]] = {401: AccessDenied, 403: AccessDenied, 404: NotFound}


class _Verdict(msgspec.Struct, frozen=True):
    is_ready: bool
    reason: str = ""


_VERDICTS = msgspec.json.Decoder(_Verdict)


def wait_until_ready(
    url: str,
    stream: str,
    *,
    token: str = "",
    published: int = 0,
    max_staleness_steps: int | None = None,
    share: float = 1.0,
    region: str = "",
    within_s: float = 60.0,
    without_hub: bool = True,
) -> bool:
    """Wait until enough replicas serve what is fresh enough: bounded staleness for a trainer.

    A hub that is away, hangs or breaks off, for five seconds, is no reason to stop: that is logged,
    and the answer is ``without_hub``. Each answer of a sampler says itself which version it is of.

    Args:
        url: The hub: ``http://`` or ``https://``.
        stream: What the stream is called there.
        token: The bearer token, of the role "read", "follow" or "publish"; empty: none.
        published: The version that was published last: what replicas are behind counts from there.
        max_staleness_steps: How far behind one may be; None: the hub's own rule.
        share: How many of all must be so, from 0 to 1.
        region: Only replicas of this region; empty: all.
        within_s: How long to ask again; an answer may take five seconds more.
        without_hub: What to return where the hub does not say.

    Returns:
        Whether they are; False: not in time, and the log says why.

    Raises:
        InvalidArgument: An argument is malformed, or the hub says so.
        AccessDenied: It does not accept the token.
        NotFound: It does not know the stream.
    """
    check_name("the stream's name at the hub", stream)
    asked: dict[str, str | int] = {"published": published, "share": f"{share:.9f}"}
    if max_staleness_steps is not None:
        asked["max_staleness_steps"] = max_staleness_steps
    if region:
        asked["region"] = check_name("the region", region)
    route = f"/v1/streams/{quote(stream, safe='')}/ready?{urlencode(asked)}"
    channel = Channel(Address.of(url, token), threading.Event())
    end_s = time.monotonic() + within_s
    away_end_s: float | None = None
    try:
        while True:
            try:
                verdict = _ask(channel, route, stream)
            except HubFault as fault:
                away_end_s = away_end_s or min(end_s, time.monotonic() + _AWAY_S)
                if time.monotonic() + _AGAIN_S >= away_end_s:
                    _LOG.warning("the hub %s: readiness: %s; going on without", url, fault)
                    return without_hub
            else:
                away_end_s = None
                if verdict.is_ready:
                    return True
                if time.monotonic() + _AGAIN_S >= end_s:
                    _LOG.warning("the hub %s: not ready in time: %.300r", url, verdict.reason)
                    return False
            time.sleep(_AGAIN_S)
    finally:
        channel.close()


def _ask(channel: Channel, route: str, stream: str) -> _Verdict:
    """What the hub says.

    Raises:
        HubFault: It does not answer as a hub does.
    """
    status, data = channel.ask("GET", route, timeout_s=_TIMEOUT_S)
    if status in _REFUSALS:
        raise _REFUSALS[status](
            f"the hub does not say who is ready: {refusal_of(status, stream, 'read')}",
            hint="See `GET /v1/streams` and the hub's file of tokens",
        )
    if status in (400, 421, 422):
        raise InvalidArgument(
            f"the hub does not take the question: {refusal_of(status, stream)}",
            hint="Its own answer says why: curl the same URL",
        )
    if status not in (200, 503):
        raise HubFault(refusal_of(status, stream), status)
    try:
        return _VERDICTS.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise HubFault("its answer is no verdict", status) from None
