"""The agent's side of the keeper: starts processes, hears of their exits, clears away what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unicron_elastic.launcher.agent.held.take_up import Taken
from unicron_elastic.launcher.agent.held.taken_keeper import TakenKeeper
from unicron_elastic.launcher.agent.process.activity import exit_code
from unicron_elastic.launcher.agent.process.helper import Helper, HelperPatience
from unicron_elastic.launcher.agent.process.sweeping import SWEEP_DEADLINE_S, kill_carriers
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.config.forwarded import for_scripts
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.helper_tasks import (
    KEEPER_ANSWERS,
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
)
from unicron_elastic.worker.process.ignored_signals import ignored_signals
from unicron_elastic.worker.process.mark import MARK, mark_of

# A keeper that is given up takes the workers along. It is silent while it starts, and while a disk gives a program.
KEEPER_PATIENCE = HelperPatience(given_up_s=30.0)
END_DEADLINE_S = 10.0
HELD_WITHIN_S = 2.0
UNTOLD_S = 0.5  # since the kernel has said that a process ended; the keeper tells it within milliseconds
# -c keeps the interpreter's ordinary start; the empty path entry, where there is one, goes so that a file in the
# current folder cannot stand in for a module of the standard library.
_KEEPER = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from unicron_elastic.launcher.agent.process.supervisor import main; main({fd})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process ended: ``exit_code`` is negative for a signal, ``at`` monotonic seconds at which the kernel said so."""

    pid: int
    exit_code: int
    at: float


@dataclass(slots=True)
class _Running:
    """A process that runs as far as we know, and the kernel's descriptor of it, if there is one to be had."""

    pid: int
    pidfd: int | None
    number: int  # of the request that started it

    def fileno(self) -> int:
        assert self.pidfd is not None
        return self.pidfd


class KeeperLost(Exception):
    """The keeper process died; everything it had started died with it."""


class Processes:
    """Every process the agent starts goes through here."""

    def __init__(
        self, loop: Loop, on_exit: Callable[[Exit], None], keeper_patience: HelperPatience = KEEPER_PATIENCE
    ) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._keeper_patience = keeper_patience
        self._channel: Channel | None = None
        self._keeper: subprocess.Popen[bytes] | TakenKeeper | None = None
        self._answers: dict[int, ProcessStarted | None] = {}  # None: nobody is left to give it
        self._numbers = 0
        self._asked: dict[int, Helper] = {}  # who owes the answer to a request
        self._sweeps: set[int] = set()  # requests that have not been answered
        self._alive: dict[int, _Running] = {}
        self._untold: set[int] = set()  # whose end the kernel has said, and the keeper has yet to collect
        self._remembered = Remember()
        self.keeper_pid = 0
        self.ignored_here: set[int] = set()  # by this process, and not by workers
        self._helper = self._new_helper()
        self.token = f"unicron-{uuid.uuid4().hex}"  # marks all that is started; see sweeping

    @property
    def is_up(self) -> bool:
        """Whether the keeper runs."""
        return self._channel is not None

    def begin(self) -> None:
        """Starts the keeper without waiting for it."""
        ours, theirs = Channel.pair()
        fd = theirs.fileno()
        code = _KEEPER.format(fd=fd)
        env = {name: value for name, value in for_scripts(os.environ).items() if name != "PYTHONINSPECT"}
        null = subprocess.DEVNULL  # a pipe's reader sees the end when the launcher ends
        self._keeper = subprocess.Popen([sys.executable, "-c", code], pass_fds=[fd], env=env, stdin=null, stdout=null)
        theirs.close()
        self._channel = ours
        self.keeper_pid = self._keeper.pid
        self._helper = self._new_helper()
        self._loop.on_readable(ours, self._read)
        if self._remembered != Remember():  # by the last one
            self._send(self._remembered)

    def take_over(self, taken: Taken, number: int) -> None:
        """Goes on with the keeper of another launcher; its warm process has started by the request of this number.

        Raises OSError if the keeper has ended.
        """
        self._keeper = TakenKeeper(taken.keeper_pid)
        self._channel = taken.keeper
        self.keeper_pid = taken.keeper_pid
        self._helper = self._new_helper()
        self._loop.on_readable(taken.keeper, self._read)
        self.answered(ProcessStarted(number=number, pid=taken.warm_pid))

    def hold(self, task: Hold) -> None:
        """Leaves the keeper to the next launch; what it does not do within a limit, ``end`` ends. Raises KeeperLost."""
        self._send(task)
        assert self._channel is not None
        self._channel.settimeout(HELD_WITHIN_S)
        with contextlib.suppress(ChannelClosed, TimeoutError):
            while not isinstance(self._channel.hear(KEEPER_ANSWERS), HelperReady):
                pass
            self._close_channel()
            if self._keeper is not None:
                self._keeper.returncode = 0  # it goes on, and is nobody's to wait for
            self._keeper = None

    def remember(
        self, *, token: str | None = None, paths: Sequence[str] | None = None, farewell: str | None = None
    ) -> None:
        """Tells the keeper what to clear away when the agent is gone.

        Carriers of ``token``, temporary ``paths``, and what ``farewell``, written to stderr, undoes on the terminal.
        """
        before = self._remembered
        self._remembered = Remember(
            token=before.token if token is None else token,
            paths=before.paths if paths is None else tuple(paths),
            farewell=before.farewell if farewell is None else farewell,
        )
        self._send(self._remembered)

    def request_start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Mapping[int, int]) -> int:
        """Asks for ``argv`` in a session of its own, with ``fds`` {number in the child: ours}.

        Returns the number under which ``wait_for_pid`` knows the answer. Raises KeeperLost.
        """
        number = self.next_number()
        task = StartProcess(
            number=number,
            argv=tuple(argv),
            env={**env, MARK: mark_of(self.token, number)},
            cwd=cwd,
            targets=tuple(fds),
            ignored_signals=self.ignored_by_workers(),
            fds=tuple(fds.values()),
        )
        self._send(task)
        return number

    def ignored_by_workers(self) -> tuple[int, ...]:
        """The signals that a worker finds ignored when it starts now."""
        return tuple(number for number in ignored_signals() if number not in self.ignored_here)

    def next_number(self, helper: Helper | None = None) -> int:
        """A number for a request to ``helper`` or the keeper, by which ``answered`` and ``wait_for_pid`` know it."""
        self._numbers += 1
        self._asked[self._numbers] = helper or self._helper
        return self._numbers

    def answered(self, answer: ProcessStarted) -> None:
        """Books the answer to a start request; the warm process's answers come through here as well."""
        self._answers[answer.number] = answer
        if not answer.errno:
            self._watch(answer.pid, answer.number)

    def send_signal(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to a process that runs; to nobody else, should its pid be another's by now."""
        running = self._alive.get(pid)
        if running is not None and running.pidfd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(running.pidfd, number)

    def wake_keeper(self) -> None:
        """Lets the keeper go on if somebody has stopped it."""
        if self._keeper is not None and self._keeper.returncode is None:
            self._keeper.send_signal(signal.SIGCONT)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Nobody is left to answer these requests: ``wait_for_pid`` raises ChannelClosed for each."""
        for number in numbers:
            self._answers.setdefault(number, None)

    def wait_for_pid(self, number: int, program: str) -> int:
        """Waits for the answer to a start request; whoever owes it and stays silent is given up.

        Raises OSError with the system's errno if ``program`` could not be started, ChannelClosed if the request was
        given up, or KeeperLost.
        """
        helper = self._asked.pop(number, self._helper)
        if not helper.wait(lambda: number in self._answers or not self.is_up):
            helper.give_up()
        if number not in self._answers:
            raise KeeperLost(f"the keeper process died, or did not answer, while {program} was being started")
        answer = self._answers.pop(number)
        if answer is None:
            raise ChannelClosed(f"what was to start {program} is gone")
        if answer.errno:
            raise OSError(answer.errno, os.strerror(answer.errno), program)
        return answer.pid

    def take_back(self, numbers: Iterable[int]) -> None:
        """Kills what these requests have started, or start yet, and waits until the keeper has collected it.

        Who was asked for a fork may not have got to that; and until its parent has gone no sweep finds a fork, which is
        below one that stays.
        """
        taken = frozenset(numbers)
        for number in taken & self._asked.keys():
            with contextlib.suppress(OSError, ChannelClosed, KeeperLost):
                self.wait_for_pid(number, "what is not wanted any more")
        # Of who has no descriptor the end may have been told before the start.
        pids = {each.pid for each in self._alive.values() if each.number in taken and each.pidfd is not None}
        for pid in pids:
            self.send_signal(pid, signal.SIGKILL)
        self._loop.run_until(
            lambda: pids.isdisjoint(self._alive) or not self.is_up, time.monotonic() + SWEEP_DEADLINE_S
        )

    def sweep(self, keep: Sequence[int]) -> None:
        """Kills every process that workers left behind; ``keep`` stay. Raises KeeperLost if that is noticed now."""
        if self.is_up:
            self.wait_for_sweep(self._request_sweep(lambda number: SweepAll(number=number, keep=tuple(keep))))

    def request_clearing(self, pid: int, number: int) -> int:
        """Asks for the end of all that a worker has left, which was request ``number`` and had this pid.

        Returns the number under which ``wait_for_sweep`` knows the answer. Raises KeeperLost.
        """
        mark = mark_of(self.token, number)
        return self._request_sweep(lambda sweep: ClearAfter(number=sweep, worker=pid, mark=mark))

    def wait_for_sweep(self, number: int) -> None:
        """Waits until all is gone that was to be cleared away, but for what cannot be killed within some seconds."""
        self._helper.wait(lambda: number not in self._sweeps or not self.is_up)

    def _request_sweep(self, task: Callable[[int], HelperTask]) -> int:
        self._numbers += 1
        number = self._numbers
        self._send(task(number))
        self._sweeps.add(number)
        return number

    def end(self) -> None:
        """Ends the keeper, which kills all that is left, and waits until it is gone."""
        if self._channel is not None:
            with contextlib.suppress(KeeperLost):
                # We were not killed: what carries the mark and still runs is not ours to end.
                self.remember(token="", farewell="")
        self._remembered = Remember()
        self.wake_keeper()
        self._close_channel()
        if not self._has_ended():
            self._kill_keeper()
            self._has_ended()
            kill_carriers(self.token)
        self._forget_running()
        self._keeper = None

    def _new_helper(self) -> Helper:
        return Helper(
            self._loop, self.keeper_pid, self._keeper_patience, wake=self.wake_keeper, give_up=self._give_up_keeper
        )

    def _send(self, task: HelperTask) -> None:
        if self._channel is None:
            raise KeeperLost("the keeper process is not running")
        try:
            self._helper.send(self._channel, task)
        except ChannelClosed:
            self._lost()
            raise KeeperLost("the keeper process died") from None
        except TimeoutError:
            self._give_up_keeper()
            raise KeeperLost("the keeper process does not read what it is asked") from None

    def _read(self) -> None:
        assert self._channel is not None
        try:
            answer = self._channel.hear(KEEPER_ANSWERS)
        except ChannelClosed:
            self._lost()
            return
        self._helper.heard()
        match answer:
            case ProcessEnded(pid=pid, exit_code=code, at_ns=at_ns):
                self._keeper_collected(pid, code, at_ns / 1e9)
            case ProcessStarted():
                self.answered(answer)
            case Swept(number=number):
                self._sweeps.discard(number)

    # -- ends of processes: the keeper collects them, and the kernel says them to us as well -------------------------

    def _watch(self, pid: int, number: int) -> None:
        try:
            pidfd: int | None = os.pidfd_open(pid)
        except OSError:  # it has ended already and was collected; or there are no more descriptors
            pidfd = None
        running = self._alive[pid] = _Running(pid, pidfd, number)
        if pidfd is not None:
            self._loop.on_readable(running, lambda: self._has_ended_by(running, time.monotonic()))

    def _has_ended_by(self, running: _Running, at: float) -> None:
        self._loop.forget(running)
        self._loop.call_at(at + UNTOLD_S, lambda: self._look_at(running, at))

    def _look_at(self, running: _Running, at: float) -> None:
        """The keeper may be stopped: it is woken, and what it has not collected yet can be read from the kernel."""
        if self._alive.get(running.pid) is not running:
            return
        self.wake_keeper()
        code = exit_code(running.pid)
        if code is None:  # the keeper has collected it, and is about to say so
            self._loop.call_at(time.monotonic() + UNTOLD_S, lambda: self._look_at(running, at))
            return
        self._untold.add(running.pid)
        self._forget(running.pid)
        self._on_exit(Exit(pid=running.pid, exit_code=code, at=at))

    def _keeper_collected(self, pid: int, code: int, at: float) -> None:
        self._forget(pid)
        if pid in self._untold:
            self._untold.discard(pid)
        else:
            self._on_exit(Exit(pid=pid, exit_code=code, at=at))

    def _forget(self, pid: int) -> None:
        running = self._alive.pop(pid, None)
        if running is not None and running.pidfd is not None:
            self._loop.forget(running)
            os.close(running.pidfd)

    def _forget_running(self) -> list[int]:
        pids = list(self._alive)
        for pid in pids:
            self._forget(pid)
        self._untold.clear()
        return pids

    # -- the keeper's own end ----------------------------------------------------------------------------------------

    def _give_up_keeper(self) -> None:
        self._kill_keeper()
        self._lost()

    def _kill_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.kill()

    def _has_ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._keeper is not None:
                self._keeper.wait(END_DEADLINE_S)
            return True
        return False

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
            self._channel = None

    def _lost(self) -> None:
        """The keeper died: each worker dies with it by the kernel's hand, and a new keeper may be begun."""
        if self._channel is None:
            return
        self._close_channel()
        if not self._has_ended():
            self._kill_keeper()
        for pid in self._alive:  # should the kernel not be done with the keeper
            self.send_signal(pid, signal.SIGKILL)
        now = time.monotonic()
        alive = self._forget_running()
        self._sweeps.clear()
        kill_carriers(self.token)  # what the workers had started
        for pid in alive:
            self._on_exit(Exit(pid=pid, exit_code=-int(signal.SIGKILL), at=now))
