"""A reader in a region: fetches objects from the bucket over the link, as a follower would.

    python reader.py HOST PORT KEY...

The time begins when a line comes on standard input, so that readers begin together. Prints a line
of JSON for each key: its size and its BLAKE3 digest; and one more: the seconds that all took.
"""

from __future__ import annotations

import json
import sys
import time

import bucket
from blake3 import blake3


def main(host: str, port: int, keys: list[str]) -> None:
    """Fetch them one after the other: there is one version after the other."""
    store = bucket.client(host, port)
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    start_s = time.monotonic()
    for key in keys:
        digest, size_bytes = blake3(), 0
        for chunk in store.get(key):
            digest.update(chunk)
            size_bytes += len(chunk)
        print(json.dumps([key, size_bytes, digest.hexdigest()]), flush=True)
    print(json.dumps(time.monotonic() - start_s), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
