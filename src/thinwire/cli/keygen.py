"""``thinwire keygen``: a signing key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.failures import reported
from thinwire.cli.options import Json
from thinwire.cli.output import print_json


def keygen(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The file for the private key; not there yet.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT. What it held is lost.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make an Ed25519 key to sign a stream with, and print its public key.

    The publisher and the maintainer sign with --key OUT; followers pin the public key with
    --trust. Only the owner can read OUT.
    """
    with reported(as_json):
        from thinwire.follow.key_files import write_signing_key
        from thinwire.stream.signing import SigningKey

        key = SigningKey.generate()
        write_signing_key(out, key, overwrite=force)
        if as_json:
            print_json({"out": str(out), "public_key": key.public})
        else:
            print(key.public)
