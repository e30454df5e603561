"""Whether a folder that the job writes to has room and takes writes: its logs, its checkpoints.

A folder on a network may not answer at all, so each is checked in a thread of its own (`watch`).
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, ProbeNotes, finding
from unicron_elastic.health.host.files import in_gib

_LOW_SHARE = 0.05
_LOW_BYTES = 20 << 30
_LOW_FILES = 10_000
_BLOCK = b"\0" * 4096

# What a write answers when no write will succeed, in words that follow "/scratch".
_REFUSALS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "is full for this user: the quota is used up",
    errno.EROFS: "has become read-only, as file systems do after an error",
    errno.EIO: "cannot be written: its device reports errors",
    errno.ESTALE: "is gone: its server does not know it any more",
    errno.ENOTCONN: "is gone: what provides the file system has ended",
    errno.ENODEV: "is gone: its device is away",
    errno.ESHUTDOWN: "is gone: its file system was shut down",
}


class DiskProbe:
    """Watches one folder, or what stands above it until it is made.

    Warns when less than `low_bytes` are free (by default 20 GiB, on small file systems a twentieth) or few files can be
    made; critical when it is full or a write is refused. Every `write_every_s` it writes one block into a file that has
    no name, or is removed at once.
    """

    def __init__(
        self,
        folder: str,
        *,
        low_bytes: int | None = None,
        write_every_s: float = 60.0,
        notes: ProbeNotes | None = None,
        statvfs: Callable[[str], os.statvfs_result] | None = None,
    ) -> None:
        self._statvfs = statvfs or os.statvfs
        self._folder = os.path.abspath(folder)
        self._low_bytes = low_bytes
        self._write_every_s = write_every_s
        self._notes = notes or ProbeNotes()
        self._wrote_at: float | None = None
        self._refusal: str | None = None

    @property
    def folder(self) -> str:
        """The folder, as findings name it."""
        return self._folder

    def check(self, now: float) -> list[Finding]:
        """What is wrong at `now` (monotonic seconds). Takes as long as the file system does."""
        folder = self._folder
        try:
            state = _state(folder, self._statvfs)
        except OSError as error:
            if error.errno in _REFUSALS:
                return [self._critical(_REFUSALS[error.errno], now)]
            self._notes.once(f"{folder} cannot be watched: {error.strerror}.")
            return []
        is_root = os.geteuid() == 0  # to whom the reserved blocks are free
        free = (state.f_bfree if is_root else state.f_bavail) * state.f_frsize
        size = state.f_blocks * state.f_frsize
        files = state.f_ffree if is_root else state.f_favail
        if size and free == 0:
            return [self._critical(_REFUSALS[errno.ENOSPC], now)]
        if state.f_files and files == 0:
            return [self._critical("can take no more files: all its inodes are used", now)]
        # A write that was refused is tried again each time, to see when it is over.
        if self._refusal is not None or self._wrote_at is None or now - self._wrote_at >= self._write_every_s:
            self._wrote_at = now
            self._refusal = self._try_to_write()
        if self._refusal is not None:
            return [self._critical(self._refusal, now)]
        if size and free < self._low(size):
            return [self._warning("disk.space", f"Only {in_gib(free)} of {in_gib(size)} are free in {folder}.", now)]
        if state.f_files and files < min(_LOW_FILES, _LOW_SHARE * state.f_files):
            return [self._warning("disk.files", f"Only {files} more files can be made in {folder}.", now)]
        return []

    def _low(self, size: int) -> float:
        return min(_LOW_BYTES, _LOW_SHARE * size) if self._low_bytes is None else self._low_bytes

    def _try_to_write(self) -> str | None:
        """Why a write is refused, if it is; closes the file too, for some file systems tell only then."""
        if not os.path.isdir(self._folder):
            return None
        try:
            descriptor = _open_nameless(self._folder)
            try:
                os.write(descriptor, _BLOCK)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno in _REFUSALS:
                return _REFUSALS[error.errno]
            self._notes.once(f"Whether {self._folder} takes writes is not watched: {error.strerror}.")
        return None

    def _critical(self, words: str, now: float) -> Finding:
        folder = self._folder
        return finding("disk.write", Level.CRITICAL, Status.STORAGE_ERROR, folder, f"{folder} {words}.", at=now)

    def _warning(self, probe: str, reason: str, now: float) -> Finding:
        return finding(probe, Level.WARN, Status.STORAGE_ERROR, self._folder, reason, at=now)


def _state(folder: str, statvfs: Callable[[str], os.statvfs_result]) -> os.statvfs_result:
    """Ask the file system of `folder`, or of the nearest above it that exists."""
    while True:
        try:
            return statvfs(folder)
        except FileNotFoundError:
            if folder == os.path.dirname(folder):
                raise
            folder = os.path.dirname(folder)


def _open_nameless(folder: str) -> int:
    """A new file that nobody sees and that goes when it is closed."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _REFUSALS or error.errno in (errno.EACCES, errno.EPERM):
            raise
    descriptor, path = tempfile.mkstemp(prefix=".unicron-write-test-", dir=folder)  # NFS has no nameless files
    os.unlink(path)
    return descriptor
