"""The keeper: a small process between the agent and everything it starts.

It starts processes, tells the agent of every exit, and kills all its descendants when the agent is gone, however the
agent went. It is their subreaper, so a descendant that daemonised is its child too; each worker in turn dies with the
keeper. So no order of deaths leaves a worker, or what a worker started, behind. It imports neither torch nor anything
else that could fail later, and has one thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import sys
import time
from typing import Any

from unicron_elastic.worker.channel import Channel, ChannelClosed, Message, close_all
from unicron_elastic.worker.linux import become_subreaper, die_with_parent, set_thread_name

__all__ = ["kill_carriers", "main", "remove_if_empty"]

START_GRACE_S = 0.1  # a process that is just replacing its program has no command line by which it is known
SWEEP_DEADLINE_S = 5.0  # a process in uninterruptible sleep cannot be waited for longer than this
# These give shared memory and semaphores back and end by themselves; torch's, seconds after its last client.
_TRACKER, _SHM_MANAGER = b"multiprocessing.resource_tracker", b"torch_shm_manager"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU)


class Keeper:
    """State of the keeper process: its channel to the agent and what to clean up after it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._token = ""
        self._paths: list[str] = []
        self._farewell = ""

    def serve(self) -> None:
        """Serves the agent until it is gone, then kills every descendant and removes the paths it was told of."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._channel, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        try:
            self._channel.send({"ready": os.getpid()})
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._report_exits()
                if self._channel in ready:
                    self._answer(*self._channel.receive())
        except ChannelClosed:
            pass
        finally:
            sweep(frozenset(), is_last=True)
            if self._token:
                kill_carriers(self._token)
            for path in self._paths:
                remove_if_empty(path)
            with contextlib.suppress(OSError):  # the terminal is gone too
                os.write(2, self._farewell.encode())

    def _report_exits(self) -> None:
        for pid, status, at_ns in reap():
            self._channel.send({"exited": pid, "exit_code": os.waitstatus_to_exitcode(status), "at_ns": at_ns})

    def _answer(self, message: Message, fds: list[int]) -> None:
        try:
            match message.get("do"):
                case "start":
                    self._start(message, fds)
                case "sweep":
                    left = sweep(frozenset(message["keep"]))
                    self._report_exits()
                    self._channel.send({"swept": left})
                case "remember":
                    self._token = str(message.get("token", self._token))
                    self._paths = [str(path) for path in message.get("paths", self._paths)]
                    self._farewell = str(message.get("farewell", self._farewell))
        finally:
            close_all(fds)

    def _start(self, message: Message, fds: list[int]) -> None:
        """Starts ``argv`` and answers with its pid, or with the errno of what failed."""
        keeper_pid = os.getpid()
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                _become(message, fds, keeper_pid)
            except OSError as error:
                os.write(failed_write, str(error.errno or 0).encode())
            finally:
                os._exit(127)
        os.close(failed_write)
        with open(failed_read, "rb") as pipe:
            failed = pipe.read()
        self._channel.send({"started": pid, "id": message["id"], "errno": int(failed) if failed else 0})


def _become(message: Message, fds: list[int], keeper_pid: int) -> None:
    """In the new process: the descriptors, session and death signal of a worker, then the program itself."""
    os.setsid()
    die_with_parent(keeper_pid)
    signal.set_wakeup_fd(-1)
    for number in (*_IGNORED, signal.SIGCHLD):
        ignored = number in message["ignored_signals"]
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as subprocess.Popen(restore_signals=True) does
        signal.signal(number, signal.SIG_DFL)
    os.chdir(message["cwd"])
    targets = message["fds"]
    safe = [_above(fd, max(targets, default=0)) for fd in fds]
    for fd, target in zip(safe, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
    argv, env = message["argv"], message["env"]
    os.execvpe(argv[0], argv, env)


def _above(fd: int, lowest: int) -> int:
    """A copy of ``fd`` numbered above ``lowest``, so that moving one descriptor never overwrites another."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest + 1)


def reap() -> list[tuple[int, int, int]]:
    """Every child that has ended: (pid, wait status, monotonic nanoseconds)."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, status, time.monotonic_ns()))
    return ended


def sweep(keep: frozenset[int], *, is_last: bool = False) -> list[int]:
    """Kills every descendant of this process outside the trees of ``keep``.

    Repeats until none is left, because a process may start another while it dies. Trackers of shared memory end by
    themselves; the last sweep waits for that, though not for torch's. Returns the pids that outlived the deadline (only
    one in uninterruptible sleep can).
    """
    begun = time.monotonic()
    while True:
        found = {pid for pid in _descendants(keep) if not _runs(pid, _SHM_MANAGER)}
        elapsed_s = time.monotonic() - begun
        is_late = elapsed_s > SWEEP_DEADLINE_S
        spared = set() if is_late else {pid for pid in found if _runs(pid, _TRACKER)}
        nameless = set() if elapsed_s > START_GRACE_S else {pid for pid in found if _is_nameless(pid)}
        victims = found - spared - nameless
        _kill(victims)
        if not keep:
            reap()
        else:
            _reap_only(victims)
        if is_late or not (found if is_last else victims | nameless):
            return sorted(victims)
        time.sleep(0.001)


def _reap_only(pids: set[int]) -> None:
    """Collects just these children, so that the exit of a kept one is still reported."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _descendants(keep: frozenset[int]) -> set[int]:
    found: set[int] = set()
    frontier = _children(os.getpid())
    while frontier:
        pid = frontier.pop()
        if pid not in keep and pid not in found:
            found.add(pid)
            frontier.extend(_children(pid))
    return found


def _children(pid: int) -> list[int]:
    """The children of ``pid``, of whichever of its threads (see proc_pid_task(5)); none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    return found


def kill_carriers(token: str) -> None:
    """Kills whoever was started with ``token`` in its environment, wherever it now hangs in the process tree.

    For what is no descendant of the keeper: function workers, and everything once the keeper itself is gone.
    """
    deadline = time.monotonic() + SWEEP_DEADLINE_S
    while time.monotonic() < deadline:
        victims = _carriers(token.encode())
        if not victims:
            return
        _kill(victims)
        time.sleep(0.001)


def _carriers(token: bytes) -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if token in _read(f"/proc/{name}/environ") and not _runs(int(name), _TRACKER, _SHM_MANAGER):
                    found.add(int(name))
    return found


def _is_nameless(pid: int) -> bool:
    """Whether a process has no command line although it lives: it is in the middle of execve(2), or took it away."""
    with contextlib.suppress(OSError):
        if not _read(f"/proc/{pid}/cmdline"):
            state = _read(f"/proc/{pid}/stat").rpartition(b") ")[2][:1]
            return state not in b"ZX"
    return False


def _runs(pid: int, *programs: bytes) -> bool:
    with contextlib.suppress(OSError):
        command = _read(f"/proc/{pid}/cmdline")
        return any(program in command for program in programs)
    return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def remove_if_empty(folder: str) -> None:
    """Removes a folder tree that holds no file: logs that nobody wrote."""
    if not any(files for _, _, files in os.walk(folder)):
        shutil.rmtree(folder, ignore_errors=True)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def main(fd: int) -> None:
    """Runs the keeper on the inherited socket ``fd``; never returns."""
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    set_thread_name("unicron-keeper")
    _leave_standard_streams()
    channel = Channel.from_fd(fd)
    code: Any = 0
    try:
        Keeper(channel).serve()
    except BaseException as error:
        print(f"unicron keeper: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    os._exit(code)


def _leave_standard_streams() -> None:
    """Lets go of the launcher's stdin and stdout, so that a pipe's reader sees the end when the launcher ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in {0, 1} - {null}:  # it is one of them if that stream is closed
        os.dup2(null, fd, inheritable=False)  # a worker without the stream must not get ours
