"""Ed25519 keys and signatures over canonical bytes."""

from __future__ import annotations

import re
from collections.abc import Collection

from cryptography.exceptions import InternalError, InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from thinwire.errors import InvalidArgument, SignatureInvalid

_PUBLIC = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


class SigningKey:
    """A private key; its text never appears in messages."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private

    @classmethod
    def generate(cls) -> SigningKey:
        """A new random key."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> SigningKey:
        """Read an unencrypted PKCS 8 key.

        Raises:
            InvalidArgument: It is not an Ed25519 key in that form.
        """
        try:
            private = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            private = None
        if not isinstance(private, Ed25519PrivateKey):
            raise InvalidArgument(
                "the signing key is not an unencrypted Ed25519 key in PEM",
                hint="Make one with `thinwire keygen`",
            )
        return cls(private)

    def to_pem(self) -> bytes:
        """The private key as PEM (PKCS 8, unencrypted)."""
        return self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    @property
    def public(self) -> str:
        """The public key: 64 hexadecimal characters, to be pinned by followers."""
        return self._private.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> str:
        """The signature in hexadecimal."""
        return self._private.sign(data).hex()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public!r})"


def check_public(key: str) -> str:
    """The key itself, if it is a public key as ``thinwire keygen`` prints it.

    Raises:
        InvalidArgument: It is not.
    """
    if not _PUBLIC.fullmatch(key):
        raise InvalidArgument(
            f"{key[:80]!r} is not a public key",
            hint="A public key has 64 hexadecimal characters; `thinwire keygen` prints it",
        )
    return key


def check_signature(
    data: bytes, signer: str, signature: str, trusted: Collection[str], what: str
) -> None:
    """Raise unless ``signer`` signed ``data``, and is trusted where anybody is pinned.

    Where nobody is pinned, an unsigned record passes, and a wrong signature still does not.

    Raises:
        SignatureInvalid: As said.
    """
    if not signer and not signature:
        if trusted:
            raise SignatureInvalid(
                f"{what} is not signed",
                hint="Someone wrote it without the publisher's key; or nobody signs this stream: "
                "then pin no key, or begin a signed stream at another URL",
            )
        return
    if trusted and signer not in trusted:
        raise SignatureInvalid(
            f"{what} is signed by {signer[:64]!r}, which is not a pinned key",
            hint="If it is the publisher's, pin it too, or sign with the key that the stream began"
            " with; otherwise someone else wrote it",
            signer=signer[:64],
        )
    try:
        # One spelling only: another would be another manifest with the same signature.
        if not _PUBLIC.fullmatch(signer) or not _SIGNATURE.fullmatch(signature):
            raise ValueError("malformed")  # noqa: TRY301 - all faults are one
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
        public.verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        raise SignatureInvalid(
            f"{what}: the signature does not belong to its content",
            hint="Someone changed it; `thinwire fsck` shows what else",
        ) from None
