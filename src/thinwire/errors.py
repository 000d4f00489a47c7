"""Every exception that thinwire raises on purpose.

::

    ThinwireError
    |- InvalidArgument (ValueError)      the call itself is wrong; nothing was done
    |- FormatError                       the bytes of a delta or checkpoint are wrong
    |  |- Truncated (EOFError)           they end too early: fetch or write them again
    |  |- Corrupt                        they contradict themselves
    |  |- ChecksumMismatch               they are not what their digest says
    |  |- Unsupported                    a version, flag, method or dtype this release does not know
    |  `- LimitExceeded                  a count or size beyond a named limit
    |- ApplyError                        the delta is sound but does not fit the base
    |  |- BaseMismatch                   the base holds other weights than the delta was made from
    |  |- TensorMismatch                 a tensor is missing, or differs in dtype or shape
    |  `- BaseUnusable                   the base cannot be trusted or written now
    |- StoreError (OSError)              reading or writing files or objects failed
    |  |- NotFound (FileNotFoundError)
    |  |- AlreadyExists (FileExistsError)
    |  |- AccessDenied (PermissionError)
    |  |- Unavailable                    no space, no answer, or the device failed
    |  `- UnsafeStore                    the store does not honour put-if-absent
    |- StreamError                       the stream does not allow what was asked
    |  |- CommitConflict                 another publisher committed this version
    |  |- Fenced                         this publisher was superseded
    |  |- VersionGap                     a version, or a link to the one before, is missing
    |  |- HistoryPruned                  what is needed to get there was pruned
    |  |- LineageChanged                 the stream went on in a new lineage, or back
    |  |- Deadline (TimeoutError)        it did not happen in time
    |  `- SignatureInvalid               unsigned, or not by a pinned key
    `- EngineError                       an inference engine did not do what was asked
       |- EngineUnreachable              it does not answer
       |- EngineDetached                 it was started again, or holds something else: attach it
       `- EngineNotReady                 what it holds is not known: it must not serve

A message says what and where; ``hint`` says what to do next; ``context`` holds the same facts for
programs. ``retryable`` is true where the same call may succeed later without a change.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar


class ThinwireError(Exception):
    """The root: catches everything that thinwire raises on purpose.

    Attributes:
        message: What went wrong and where, one sentence.
        hint: What to do next; may be empty.
        context: The facts of the message by name.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", **context: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.context)


def _rebuild(
    cls: type[ThinwireError], message: str, hint: str, context: dict[str, Any]
) -> ThinwireError:
    return cls(message, hint=hint, **context)


class InvalidArgument(ThinwireError, ValueError):
    """The call itself is wrong; nothing was done."""

    code = "invalid-argument"
    exit_code = 2


class FormatError(ThinwireError):
    """The bytes of a delta or a checkpoint are wrong; nothing was changed."""

    code = "format"
    exit_code = 3


class Truncated(FormatError, EOFError):
    """The bytes end too early."""

    code = "truncated"


class Corrupt(FormatError):
    """The bytes contradict themselves."""

    code = "corrupt"


class ChecksumMismatch(FormatError):
    """The bytes are not what their digest says."""

    code = "checksum-mismatch"


class Unsupported(FormatError):
    """A version, flag, method or dtype that this release does not know."""

    code = "unsupported"


class LimitExceeded(FormatError):
    """A count or a size beyond a named limit, refused before memory is taken."""

    code = "limit-exceeded"


class ApplyError(ThinwireError):
    """The delta is sound but does not fit the base; the base is untouched."""

    code = "apply"
    exit_code = 4


class BaseMismatch(ApplyError):
    """The base holds other weights than the delta was made from."""

    code = "base-mismatch"


class TensorMismatch(ApplyError):
    """A tensor is missing, or differs in dtype or shape."""

    code = "tensor-mismatch"


class BaseUnusable(ApplyError):
    """The base cannot be trusted or cannot be written now."""

    code = "base-unusable"


class StoreError(ThinwireError, OSError):
    """Reading or writing files or objects failed."""

    code = "store"
    exit_code = 5


class NotFound(StoreError, FileNotFoundError):
    """A file, folder or object is missing."""

    code = "not-found"


class AlreadyExists(StoreError, FileExistsError):
    """The target exists and was not to be replaced."""

    code = "already-exists"


class AccessDenied(StoreError, PermissionError):
    """The operating system or the store refused access."""

    code = "access-denied"


class Unavailable(StoreError):
    """No space left, no answer, or the device failed; the target is as it was."""

    code = "unavailable"
    retryable = True


class UnsafeStore(StoreError):
    """The store does not honour put-if-absent, on which commits rest; nothing was committed."""

    code = "unsafe-store"


class StreamError(ThinwireError):
    """The stream does not allow what was asked; the follower's sink is at the version it was at."""

    code = "stream"
    exit_code = 6


class CommitConflict(StreamError):
    """Another publisher committed this version first; the stream is as that one left it."""

    code = "commit-conflict"


class Fenced(StreamError):
    """This publisher was superseded and may not publish any more."""

    code = "fenced"


class VersionGap(StreamError):
    """A version, or the link to the one before it, is missing or does not fit."""

    code = "version-gap"


class HistoryPruned(StreamError):
    """What is needed to reach the version was pruned, or never was in the stream."""

    code = "history-pruned"


class LineageChanged(StreamError):
    """The stream went on in a new lineage, or back to an older state, and that was not allowed."""

    code = "lineage-changed"


class Deadline(StreamError, TimeoutError):
    """It did not happen in time; the same call may go on."""

    code = "deadline"
    retryable = True


class SignatureInvalid(StreamError):
    """A manifest is unsigned, or not signed by a pinned key."""

    code = "signature-invalid"


class EngineError(ThinwireError):
    """An inference engine refused or failed; the message says what it serves now."""

    code = "engine"
    exit_code = 7


class EngineUnreachable(EngineError):
    """The engine does not answer; what it serves, if it runs, is as it was."""

    code = "engine-unreachable"
    retryable = True


class EngineDetached(EngineError):
    """The engine was started again, or holds other weights than was thought: it must be attached.

    Nothing was changed.
    """

    code = "engine-detached"


class EngineNotReady(EngineError):
    """What the engine holds is not known to be one version: it is paused and must not serve."""

    code = "engine-not-ready"


# What space or another device would mend: the same call may succeed later.
_UNAVAILABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_OS_HINTS = {
    errno.EISDIR: "This is a folder; give a file",
    errno.ENOTDIR: "A part of the path is a file, not a folder; check the path",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.ELOOP: "A symbolic link is not followed here; give the file itself",
    errno.EMFILE: "Too many files are open; raise the limit (ulimit -n)",
    errno.EROFS: "Use a path on a writable file system",
}


def from_os_error(error: OSError, doing: str, path: object) -> StoreError:
    """The ``StoreError`` for an ``OSError`` met while ``doing`` something to ``path``."""
    reason = error.strerror or str(error)
    cls: type[StoreError] = StoreError
    hint = _OS_HINTS.get(error.errno or 0, "Check the path and the file system it lies on")
    if isinstance(error, FileNotFoundError):
        cls, hint = NotFound, "Check the path"
    elif isinstance(error, FileExistsError):
        cls, hint = AlreadyExists, "Choose another path or remove it first"
    elif isinstance(error, PermissionError):
        cls, hint = AccessDenied, "Check the owner and mode of the path"
    elif error.errno == errno.EROFS:
        cls = AccessDenied
    elif error.errno in _UNAVAILABLE:
        cls = Unavailable
        hint = "Free some space or check the device, then run the same command again"
    return cls(f"{doing} {path}: {reason}", hint=hint, path=str(path), errno=error.errno)
