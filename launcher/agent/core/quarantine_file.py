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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from unicron_elastic.base import quarantine
from unicron_elastic.base.ledger import hold_own, state_folder
from unicron_elastic.base.quarantine import LAUNCHER, Quarantined, sentence
from unicron_elastic.launcher.config.forwarded import environment
from unicron_elastic.recovery.commands import AskToLeave, LeaveJob

if TYPE_CHECKING:
    from unicron_elastic.compat.agent import WorkerSpec
    from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous


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


def add(path: Path, entry: Quarantined, say: Callable[[str], None] = lambda _sentence: None) -> Quarantined:
    """Puts a node into quarantine and returns its entry, which may be older or longer: see ``quarantine.add``.

    Waits for others that change the file, at most LOCK_TIMEOUT_S. ``say`` hears of a file system without locks.
    Raises QuarantineFileError.
    """
    with _change(path, say) as file:
        entries = quarantine.add(read(file), entry)
        _write(file, entries)
    return next(each for each in entries if each.node == entry.node)


def lift(path: Path, node: str, say: Callable[[str], None] = lambda _sentence: None) -> bool:
    """Takes a node out of the file; False if it was not there. Waits and raises as ``add`` does."""
    if not _has(read(path), node):
        return False  # neither waits nor creates a lock where there is nothing to do
    with _change(path, say) as file:
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
def _change(path: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Holds the lock, and gives the file itself: a link to it has to stay one. Raises QuarantineFileError."""
    file = Path(os.path.realpath(path))
    try:
        hold_own(path, make=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_name(f"{file.name}.lock"), say):
            yield file
    except OSError as error:
        raise QuarantineFileError(f"{path} cannot be changed: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock on a file that is never removed: who waits for it would get a lock that others do not see."""
    fd = _open_lock(path)
    try:
        try:
            _wait_for_lock(fd, path)
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


def _wait_for_lock(fd: int, path: Path) -> None:
    """Raises TimeoutError if others hold the lock for too long, and other OSErrors if there are no locks here."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                what = f"another process has held the lock {path} for {LOCK_TIMEOUT_S:g} s"
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


def why_stay(handler: JobRendezvous, nodes: int) -> str:
    """Why the job of this rendezvous, of ``nodes`` now, cannot go on without this one; "" if it can.

    It follows "The node stays: ".
    """
    if nodes == 1:
        return "it is the only node of the job."
    return handler.why_stay(nodes)


def why_not_now(handler: JobRendezvous, nodes: int, command: AskToLeave) -> str:
    """Answer as ``why_stay``; but of nodes that would leave at one moment only as many may as the job can spare."""
    if why := why_stay(handler, nodes):
        return why
    if not command.is_departure:
        return handler.take_leave(nodes)
    return handler.depart(nodes, command.reason, command.have_state)


def offer_job(handler: JobRendezvous, spec: WorkerSpec, argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Lets spare nodes of the cluster know what this job runs, where its rendezvous can tell them."""
    if not argv or os.environ.get("UNICRON_PLANNED_JOB"):
        return  # a planned job gets its nodes by the plan
    try:
        handler.offer_job(argv, os.getcwd(), environment(), spec.local_world_size)
    except ValueError as error:
        say(f"Spare nodes of the cluster cannot run this job: {error}.")


def leave(handler: JobRendezvous, node: str, command: LeaveJob, say: Callable[[str], None]) -> None:
    """Takes the node out of the rendezvous and puts it on the list; what cannot be done is said."""
    now = time.time()
    until = None if command.quarantine_s is None else now + command.quarantine_s
    entry = Quarantined(node=node, reason=command.reason, since=now, until=until, by=LAUNCHER, is_broken=True)
    why_not = handler.keep_out(entry) if handler.is_of_cluster else ""
    if why_not:
        say(f"This node could not be put into the cluster's quarantine: {why_not}")
    handler.leave()
    if handler.is_of_cluster and not why_not:
        say(f"This node is in the cluster's quarantine now: `unicron undrain {node}` ends that.")
        return
    path = default_path()
    try:
        add(path, entry)
    except QuarantineFileError as error:
        say(f"This node could not be put into quarantine: {error}")
    else:
        say(f"This node is in quarantine now: `unicron quarantine lift {node}` ends that.")


def why_kept_out(node: str, say: Callable[[str], None]) -> str:
    """Why this node should not join a job, as a sentence; "" if nothing speaks against it.

    A list that cannot be read is told to ``say`` and keeps nobody out: it must not stop every job of a cluster.
    """
    now = time.time()
    try:
        entry = find(default_path(), node, now)
    except QuarantineFileError as error:
        say(f"it is not known whether this node is in quarantine: {error}.")
        return ""
    return "" if entry is None else sentence(entry, now, lambda seconds: datetime.fromtimestamp(seconds).astimezone())
