"""Which file systems a host's copy may lie on."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.errors import InvalidArgument

# Another host's mapping of a file there shows what was written here only after a while.
_NETWORK = re.compile(
    r"(nfs4?|cifs|smb3?|ceph|lustre|glusterfs|gpfs|beegfs|afs"
    r"|fuse\.(sshfs|s3fs|gcsfuse|juicefs|goofys|rclone|mount-s3|ceph-fuse|glusterfs))\Z"
)


def refuse_network_folder(folder: Path) -> None:
    """Refuse a folder whose mapped files may be out of date on another host.

    Raises:
        InvalidArgument: It lies on a network file system.
    """
    kind = file_system_of(folder)
    if kind is not None and _NETWORK.match(kind):
        raise InvalidArgument(
            f"{folder} lies on a network file system ({kind})",
            hint="Give a folder on a local disk or in memory: the engine's ranks map its files",
            path=str(folder),
        )


def file_system_of(folder: Path) -> str | None:
    """The kind of file system that a folder lies on, as Linux calls it; None: it cannot be told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
        resolved = folder.resolve()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        mount = Path(fields[4].encode().decode("unicode_escape"))
        # Of two mounts at one place, the later one is seen.
        if (mount == resolved or mount in resolved.parents) and (
            found is None or len(mount.parts) >= found[0]
        ):
            found = (len(mount.parts), after.split()[0])
    return None if found is None else found[1]
