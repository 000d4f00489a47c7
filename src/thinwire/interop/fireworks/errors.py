"""The exceptions of Fireworks' package by its own names, as part of thinwire's tree.

The package raises plain ``ValueError``, and for a tensor that is not there ``KeyError``; its
functions that read a delta file wrap that into ``RuntimeError``. These are all of them, so code
that catches either goes on working.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


class DeltaKeyMismatchError(TensorMismatch, ValueError, RuntimeError, KeyError):
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


@contextmanager
def runtime_errors() -> Iterator[None]:
    """Raise whatever thinwire raises inside as a ``RuntimeError`` too, of the same class else."""
    try:
        yield
    except ThinwireError as error:
        if isinstance(error, RuntimeError):
            raise
        raise _as_runtime(type(error), error.message, error.hint, error.context) from error


def _as_runtime(
    cls: type[ThinwireError], message: str, hint: str, context: dict[str, Any]
) -> ThinwireError:
    """An error of a class that is ``cls`` and ``RuntimeError``; made anew from these by pickle."""

    def reduce(error: ThinwireError) -> tuple[Any, ...]:
        return _as_runtime, (cls, error.message, error.hint, error.context)

    both = type(cls.__name__, (cls, RuntimeError), {"__doc__": cls.__doc__, "__reduce__": reduce})
    error: ThinwireError = both(message, hint=hint, **context)
    return error


def _renamed(cls: type[ThinwireError], error: ThinwireError) -> ThinwireError:
    return cls(error.message, hint=error.hint, **error.context)
