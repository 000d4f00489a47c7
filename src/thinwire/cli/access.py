"""Options of what listens to other machines: who may ask, and TLS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.errors import InvalidArgument

if TYPE_CHECKING:
    from thinwire.web import Tls, Tokens

TokensFile = Annotated[
    Path | None,
    typer.Option(
        "--tokens",
        show_default=False,
        help="A file of bearer tokens, one a line: read, follow or publish, and the token; then a "
        "name if you like, and after follow for whom it may speak at a hub, such as replica=eu-* "
        "or replica=eu-* region=eu.",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option("--tls-cert", show_default=False, help="A PEM file with the certificate."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", show_default=False, help="A PEM file with its key.")
]


def known_tokens(path: Path | None, host: str) -> Tokens:
    """Who may ask what listens at an address; without a file everybody on this machine.

    Raises:
        InvalidArgument: The file is none, or there is none and other machines reach the address.
        StoreError: It cannot be read.
    """
    from thinwire.web import Tokens, check_exposure

    check_exposure(host, path is not None, option="--tokens")
    return Tokens() if path is None else Tokens.read(path)


def tls_of(certificate: Path | None, key: Path | None) -> Tls | None:
    """What TLS is spoken with; None: plain HTTP.

    Raises:
        InvalidArgument: One of both is missing.
    """
    from thinwire.web import Tls

    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InvalidArgument("--tls-cert and --tls-key belong together", hint="Give both, or none")
    return Tls(certificate=certificate, key=key)
