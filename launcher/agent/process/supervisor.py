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

from unicron_elastic.launcher.agent.process.sweeping import PAUSE_S, Sweep, descendants, kill_carriers, left_by
from unicron_elastic.worker.channel import Channel, ChannelClosed, close_all
from unicron_elastic.worker.helper_tasks import (
    KEEPER_TASKS,
    ClearAfter,
    HelperReady,
    HelperTask,
    Hold,
    ProcessEnded,
    ProcessStarted,
    Remember,
    StartProcess,
    SweepAll,
    Swept,
    TakeStderr,
)
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.process.ignored_signals import inherit
from unicron_elastic.worker.process.prctl import become_subreaper, die_with_parent, set_thread_name

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTOU)


class Supervisor:
    """State of the keeper process: its channel to the agent and what to clean up after it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._remembered = Remember()
        self._sweeps: dict[int, Sweep] = {}  # by the number of the request
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serves the agent until it is gone, then kills every descendant and removes the paths it was told of."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(wake_read, selectors.EVENT_READ)
        try:
            self._channel.send(HelperReady())
            while True:
                ready = {key.fileobj for key, _ in self._selector.select(PAUSE_S if self._sweeps else None)}
                if wake_read in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                    self._report_exits()
                if self._channel in ready:
                    self._answer(self._channel.hear(KEEPER_TASKS))
                self._sweep_on()
        except ChannelClosed:
            pass
        finally:
            Sweep(lambda: descendants(frozenset()), awaits_trackers=True).run(collect=reap)
            if self._remembered.token:
                kill_carriers(self._remembered.token)
            self._remove_paths()
            with contextlib.suppress(OSError):  # the terminal is gone too
                os.write(2, self._remembered.farewell.encode())

    def _report_exits(self) -> None:
        for pid, status, at_ns in reap():
            ended = ProcessEnded(pid=pid, exit_code=os.waitstatus_to_exitcode(status), at_ns=at_ns)
            self._channel.send(ended)

    def _sweep_on(self) -> None:
        """Takes a step of each sweep; meanwhile exits are told as ever."""
        for number, sweep in list(self._sweeps.items()):
            if sweep.step():
                del self._sweeps[number]
                self._report_exits()
                self._channel.send(Swept(number=number))

    def _answer(self, task: HelperTask | Odd) -> None:
        try:
            match task:
                case StartProcess():
                    self._start(task)
                case SweepAll(number=number, keep=keep):
                    self._sweeps[number] = Sweep(lambda: descendants(frozenset(keep)))
                case ClearAfter(number=number, worker=worker, mark=mark):
                    self._sweeps[number] = Sweep(lambda: left_by(worker, mark))
                case Remember():
                    self._remembered = task
                case Hold():
                    self._hold(task)
                case TakeStderr():
                    os.dup2(task.fds[0], 2)
                case Odd(why=why):
                    print(f"unicron keeper: what the agent asks is left out: {why}.", file=sys.stderr)
        finally:
            close_all(task.fds)

    def _remove_paths(self) -> None:
        for path in self._remembered.paths:
            remove_if_empty(path)

    def _hold(self, task: Hold) -> None:
        """Serves the next agent from now on. Raises ChannelClosed if none has come."""
        from unicron_elastic.launcher.agent.held.hold import hold

        self._selector.unregister(self._channel)
        self._remove_paths()
        self._remembered = Remember()
        self._sweeps.clear()
        channel = hold(task, self._channel)
        if channel is None:
            raise ChannelClosed("no agent has come")
        self._channel = channel
        reap()  # of what ended meanwhile the next agent knows nothing
        self._selector.register(self._channel, selectors.EVENT_READ)

    def _start(self, task: StartProcess) -> None:
        """Starts the program and answers with its pid, or with the errno of what failed."""
        keeper_pid = os.getpid()
        failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                _become(task, keeper_pid)
            except OSError as error:
                os.write(failed_write, str(error.errno or 0).encode())
            finally:
                os._exit(127)
        os.close(failed_write)
        with open(failed_read, "rb") as pipe:
            failed = pipe.read()
        started = ProcessStarted(number=task.number, pid=pid, errno=int(failed) if failed else 0)
        self._channel.send(started)


def _become(task: StartProcess, keeper_pid: int) -> None:
    """Set up the new process: the descriptors, session and death signal of a worker, then the program itself."""
    os.setsid()
    die_with_parent(keeper_pid)
    signal.set_wakeup_fd(-1)
    inherit(task.ignored_signals)
    os.chdir(task.cwd)
    safe = [_above(fd, max(task.targets, default=0)) for fd in task.fds]
    for fd, target in zip(safe, task.targets, strict=True):
        os.dup2(fd, target, inheritable=True)
    os.execvpe(task.argv[0], list(task.argv), task.env)  # a list: debuggers that change it expect one


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


def remove_if_empty(folder: str) -> None:
    """Removes a folder tree that holds no file: logs that nobody wrote."""
    if not any(files for _, _, files in os.walk(folder)):
        shutil.rmtree(folder, ignore_errors=True)


def main(fd: int) -> None:
    """Runs the keeper on the inherited socket ``fd``; never returns."""
    os.setsid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    set_thread_name("unicron-keeper")
    _keep_standard_streams()
    channel = Channel.from_fd(fd)
    code: Any = 0
    try:
        Supervisor(channel).serve()
    except BaseException as error:
        print(f"unicron keeper: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    os._exit(code)


def _keep_standard_streams() -> None:
    """Keep ours from workers that are without a standard stream: only stderr is the launcher's own."""
    os.open(os.devnull, os.O_RDWR)  # takes stderr's number if that is closed, unless a library has it already
    for fd in (0, 1) if sys.__stderr__ else (0, 1, 2):
        os.set_inheritable(fd, False)
