"""Who can reach what listens."""

from __future__ import annotations

import ipaddress

from thinwire.errors import InvalidArgument


def check_exposure(host: str, has_tokens: bool, *, option: str = "--token-file") -> None:
    """Refuse to be open to other machines without a token.

    Args:
        host: Where it listens.
        has_tokens: Whether requests must bring one.
        option: What gives the tokens, for the message.

    Raises:
        InvalidArgument: It would be.
    """
    if has_tokens or is_loopback(host):
        return
    raise InvalidArgument(
        f"{host} is open to other machines, and nothing would keep them out",
        hint=f"Give {option} with a secret that requests must bring, or listen on 127.0.0.1",
    )


def is_local_host(header: str) -> bool:
    """Whether a request's Host header names this machine as only this machine does.

    What listens on loopback without tokens asks this: a web page may have the browser send
    requests here under its own name (DNS rebinding), and read what is answered. No browser leaves
    the header out.

    Args:
        header: Its value; empty: there is none.
    """
    if not header:
        return True
    name = header.rpartition("]")[0].lstrip("[") if header[:1] == "[" else header.partition(":")[0]
    return is_loopback(name.rstrip(".").lower())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
