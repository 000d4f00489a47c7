"""Changing how a stream is looked after."""

from __future__ import annotations

import msgspec

from thinwire.errors import InvalidArgument
from thinwire.follow import Stream
from thinwire.stream import keys
from thinwire.stream.encoding import policy_fault, seal
from thinwire.stream.records import Policy, StreamRecord


def set_policy(stream: Stream, policy: Policy) -> StreamRecord:
    """Give a stream another policy. Maintainers heed it in their next round.

    Of two that do this at once, one wins.

    Raises:
        InvalidArgument: The policy is malformed, or the stream is signed and there is no key.
        NotFound: There is no such stream.
    """
    if fault := policy_fault(policy):
        raise InvalidArgument(f"policy: {fault}", hint="See docs/operations.md")
    stream.forget()
    stream.check_key()
    bare = msgspec.structs.replace(stream.record(), policy=policy, signer="", signature="")
    record, data = seal(bare, stream.signing_key)
    stream.store.put(keys.STREAM, data)
    stream.forget()
    return record
