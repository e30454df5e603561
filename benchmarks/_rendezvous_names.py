"""Keeping the name server out of what is measured.

torch's TCPStore looks up a name for the address of each connection that it opens. Many at once are more than some name
servers answer, and glibc then waits 5 s: that would be measured instead of the rendezvous, of whichever back end.
"""

from __future__ import annotations

import functools
import shutil
import subprocess

# A file of its own in memory: what is mounted over must be a file, and leaves no trace when its namespace ends.
_SCRIPT = (
    "mount -t tmpfs tmpfs /mnt && "
    "sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf > /mnt/nsswitch.conf && "
    "mount --bind /mnt/nsswitch.conf /etc/nsswitch.conf && "
    "umount -l /mnt && "
    'exec "$@"'
)


@functools.cache
def without_name_server() -> tuple[str, ...]:
    """The words that start a program which knows only the names of /etc/hosts; none where that cannot be done."""
    if shutil.which("unshare") is None:
        return ()
    for options in (("--mount",), ("--mount", "--user", "--map-root-user")):
        prefix = ("unshare", *options, "sh", "-c", _SCRIPT, "sh")
        if subprocess.run([*prefix, "true"], capture_output=True, timeout=10.0, check=False).returncode == 0:
            return prefix
    return ()
