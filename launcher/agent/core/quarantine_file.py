"""The file that says which nodes are in quarantine: the one thing about a node that outlives its jobs.

Sites share it between their nodes by keeping it on a file system that all of them see, which UNICRON_QUARANTINE
names; without that each user has one in the state folder. Whoever may write in its folder may change it.

Readers take no lock: the file is replaced as a whole, so they find it as it was before a change or after it.
Changes are made under a lock on a file beside it. It is written by people too, so what cannot be understood is
never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from unicron_elastic.base import quarantine
from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.base.state_folder import hold_own, state_folder

VARIABLE = "UNICRON_QUARANTINE"
FILE_NAME = "quarantine.json"
LOCK_TIMEOUT_S = 5.0
_LOCK_RETRY_S = 0.01
_MODE = 0o644


class QuarantineFileError(ValueError):
    """The file cannot be read, understood or changed; the text names it and says what is wrong, without a full stop."""


def default_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the file is: what UNICRON_QUARANTINE names, else in the user's state folder."""
    named = environ.get(VARIABLE, "")
    return Path(named) if named else state_folder() / FILE_NAME


def read(path: Path) -> tuple[Quarantined, ...]:
    """All entries, also those whose time is over; none if there is no file. Raises QuarantineFileError."""
    try:
        content = _content(path)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise QuarantineFileError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return quarantine.from_document(json.loads(content))
    except (ValueError, RecursionError) as error:  # RecursionError: absurdly nested JSON
        raise QuarantineFileError(f"{path} is not a list of nodes in quarantine: {error}") from error


def find(path: Path, node: str, now: float) -> Quarantined | None:
    """What keeps ``node`` out at ``now`` (unix seconds); None if nothing does. Raises QuarantineFileError."""
    return quarantine.find(read(path), node, now)


def add(
    path: Path,
    entry: Quarantined,
    say: Callable[[str], None] = lambda _sentence: None,
    *,
    wait_s: float = LOCK_TIMEOUT_S,
) -> Quarantined:
    """Puts a node into quarantine and returns its entry, which may be older or longer: see ``quarantine.add``.

    Waits for others that change the file, at most ``wait_s``. ``say`` hears of a file system without locks.
    Raises QuarantineFileError.
    """
    with _change(path, say, wait_s) as file:
        entries = quarantine.add(read(file), entry)
        _write(file, entries)
    return next(each for each in entries if each.node == entry.node)


def lift(
    path: Path,
    node: str,
    say: Callable[[str], None] = lambda _sentence: None,
    *,
    wait_s: float = LOCK_TIMEOUT_S,
) -> bool:
    """Takes a node out of the file; False if it was not there. Waits and raises as ``add`` does."""
    if not _has(read(path), node):
        return False  # neither waits nor creates a lock where there is nothing to do
    with _change(path, say, wait_s) as file:
        entries = read(file)
        if not _has(entries, node):
            return False
        _write(file, quarantine.lift(entries, node))
    return True


def _has(entries: Iterable[Quarantined], node: str) -> bool:
    return any(entry.node == node for entry in entries)


def _content(path: Path) -> bytes:
    """Raises OSError; also for what is no regular file, as a pipe would block and a device must not be replaced."""
    hold_own(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


@contextlib.contextmanager
def _change(path: Path, say: Callable[[str], None], wait_s: float) -> Iterator[Path]:
    """Holds the lock, and gives the file itself: a link to it has to stay one. Raises QuarantineFileError."""
    file = Path(os.path.realpath(path))
    try:
        hold_own(path, make=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_name(f"{file.name}.lock"), say, wait_s):
            yield file
    except OSError as error:
        raise QuarantineFileError(f"{path} cannot be changed: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None], wait_s: float) -> Iterator[None]:
    """Holds a lock on a file that is never removed: who waits for it would get a lock that others do not see."""
    fd = _open_lock(path)
    try:
        try:
            _wait_for_lock(fd, path, wait_s)
        except TimeoutError:
            raise
        except OSError as error:  # such as NFS without locks: what is replaced is whole all the same
            say(f"{path} cannot be locked: {error.strerror or error}. Changes of the same moment may be lost.")
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if this process was forked meanwhile
        os.close(fd)


def _open_lock(path: Path) -> int:
    """Opened for writing, without which NFS gives no lock, if that is possible. Raises OSError."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # made by another user


def _wait_for_lock(fd: int, path: Path, wait_s: float) -> None:
    """Raises TimeoutError if others hold the lock for too long, and other OSErrors if there are no locks here."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                what = f"another process has held the lock {path} for {wait_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, what) from None
        time.sleep(_LOCK_RETRY_S)


def _write(path: Path, entries: Iterable[Quarantined]) -> None:
    """Replaces the file in one step that a crash at any moment does not tear. Raises OSError."""
    content = json.dumps(quarantine.to_document(entries), indent=2).encode() + b"\n"
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, _MODE)
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the new name last as well; not every file system can, and the change is made in any case."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
