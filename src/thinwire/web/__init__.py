"""What everything that listens shares: sockets with deadlines and limits, TLS, tokens with roles.

Needs starlette and uvicorn.
"""

from thinwire.web.exposure import check_exposure, is_local_host, is_loopback
from thinwire.web.listener import Limits, Listener, Tls
from thinwire.web.tokens import Grant, NotAllowed, Role, Tokens, read_token

__all__ = [
    "Grant",
    "Limits",
    "Listener",
    "NotAllowed",
    "Role",
    "Tls",
    "Tokens",
    "check_exposure",
    "is_local_host",
    "is_loopback",
    "read_token",
]
