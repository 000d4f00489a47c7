"""The exceptions of Fireworks' package by its own names, as part of thinwire's tree.

The package raises plain ``ValueError``; its functions that work on whole files wrap that into
``RuntimeError``. These are both, so code that catches either goes on working.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.errors import (
    BaseMismatch,
    ChecksumMismatch,
    Corrupt,
    FormatError,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
)


class BackendNotFoundError(InvalidArgument):
    """There is no compression format of that name."""


class DeltaKeyMismatchError(TensorMismatch, ValueError, RuntimeError):
    """Base and delta, or source and destination, do not hold tensors of the same names."""


class DeltaSizeMismatchError(TensorMismatch, ValueError, RuntimeError):
    """A tensor differs in dtype, shape or size from what the delta was made for."""


class DeltaChecksumError(ChecksumMismatch, ValueError, RuntimeError):
    """The new bytes are not those that the checksum was made of; often the base is another."""


class DeltaDecompressionError(Corrupt, ValueError, RuntimeError):
    """A payload cannot be read."""


@contextmanager
def package_errors() -> Iterator[None]:
    """Raise what the codec raises inside under the package's names."""
    try:
        yield
    except ValueError:
        raise
    except (BaseMismatch, ChecksumMismatch) as error:
        raise _renamed(DeltaChecksumError, error) from error
    except TensorMismatch as error:
        raise _renamed(DeltaSizeMismatchError, error) from error
    except FormatError as error:
        raise _renamed(DeltaDecompressionError, error) from error


def _renamed(cls: type[ThinwireError], error: ThinwireError) -> ThinwireError:
    return cls(error.message, hint=error.hint, **error.context)
