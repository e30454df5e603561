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

from unicron_elastic.launcher.agent.process.sweeping import kill_carriers
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.config.forwarded import for_scripts
from unicron_elastic.worker.channel import Channel, ChannelClosed, Message
from unicron_elastic.worker.linux import MARK, ignored_signals, mark_of

ANSWER_DEADLINE_S = 30.0
END_DEADLINE_S = 10.0
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


class KeeperLost(Exception):
    """The keeper process died; everything it had started died with it."""


class Processes:
    """Every process the agent starts goes through here."""

    def __init__(self, loop: Loop, on_exit: Callable[[Exit], None]) -> None:
        self._loop = loop
        self._on_exit = on_exit
        self._channel: Channel | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, Message] = {}
        self._numbers = 0
        self._sweeps: set[int] = set()  # requests that have not been answered
        self._alive: set[int] = set()
        self.keeper_pid = 0
        self.ignored_here: set[int] = set()  # by this process, and not by workers
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
        self._loop.on_readable(ours, self._read)

    def remember(
        self, *, token: str | None = None, paths: Sequence[str] | None = None, farewell: str | None = None
    ) -> None:
        """Tells the keeper what to clear away when the agent is gone.

        Carriers of ``token``, temporary ``paths``, and what ``farewell``, written to stderr, undoes on the terminal.
        """
        message: Message = {"do": "remember"}
        if token is not None:
            message["token"] = token
        if paths is not None:
            message["paths"] = list(paths)
        if farewell is not None:
            message["farewell"] = farewell
        self._send(message)

    def request_start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Mapping[int, int]) -> int:
        """Asks for ``argv`` in a session of its own, with ``fds`` {number in the child: ours}.

        Returns the number under which ``wait_for_pid`` knows the answer. Raises KeeperLost.
        """
        number = self.next_number()
        message: Message = {
            "do": "start",
            "id": number,
            "argv": list(argv),
            "env": {**env, MARK: mark_of(self.token, number)},
            "cwd": cwd,
            "fds": list(fds),
            "ignored_signals": self.ignored_by_workers(),
        }
        self._send(message, list(fds.values()))
        return number

    def ignored_by_workers(self) -> list[int]:
        """The signals that a worker finds ignored when it starts now."""
        return [number for number in ignored_signals() if number not in self.ignored_here]

    def next_number(self) -> int:
        """A number for a request that ``answered`` and ``wait_for_pid`` will know it by."""
        self._numbers += 1
        return self._numbers

    def answered(self, message: Message) -> None:
        """Books the answer to a start request; the warm process's answers come through here as well."""
        self._answers[int(message["id"])] = message
        if not message.get("errno"):
            self._alive.add(int(message.get("started") or message.get("forked") or 0))

    def give_up(self, numbers: Iterable[int]) -> None:
        """Nobody is left to answer these requests: ``wait_for_pid`` raises ChannelClosed for each."""
        for number in numbers:
            self._answers.setdefault(number, {"id": number, "given_up": True})

    def wait_for_pid(self, number: int, program: str) -> int:
        """Waits for the answer to a start request.

        Raises OSError with the system's errno if ``program`` could not be started, ChannelClosed if the request was
        given up, KeeperLost or TimeoutError.
        """
        done = self._loop.run_until(
            lambda: number in self._answers or not self.is_up, time.monotonic() + ANSWER_DEADLINE_S
        )
        answer = self._answers.pop(number, None)
        if answer is None:
            if not done:
                raise TimeoutError(f"starting {program} was not answered within {ANSWER_DEADLINE_S:g} s")
            raise KeeperLost("the keeper process died while a worker was being started")
        if answer.get("given_up"):
            raise ChannelClosed(f"whoever was to start {program} is gone")
        if answer.get("errno"):
            errno = int(answer["errno"])
            raise OSError(errno, os.strerror(errno), program)
        return int(answer.get("started") or answer["forked"])

    def sweep(self, keep: Sequence[int]) -> None:
        """Kills every process that workers left behind; ``keep`` stay. Raises KeeperLost if that is noticed now."""
        if self.is_up:
            self.wait_for_sweep(self._request_sweep({"do": "sweep", "keep": list(keep)}))

    def request_clearing(self, pid: int, number: int) -> int:
        """Asks for the end of all that a worker has left, which was request ``number`` and had this pid.

        Returns the number under which ``wait_for_sweep`` knows the answer. Raises KeeperLost.
        """
        return self._request_sweep({"do": "clear", "worker": pid, "mark": mark_of(self.token, number)})

    def wait_for_sweep(self, number: int) -> None:
        """Waits until all is gone that was to be cleared away, but for what cannot be killed within some seconds."""
        deadline = time.monotonic() + ANSWER_DEADLINE_S
        self._loop.run_until(lambda: number not in self._sweeps or not self.is_up, deadline)

    def _request_sweep(self, message: Message) -> int:
        number = self.next_number()
        self._send({**message, "id": number})
        self._sweeps.add(number)
        return number

    def end(self) -> None:
        """Ends the keeper, which kills all that is left, and waits until it is gone."""
        if self._channel is not None:
            with contextlib.suppress(KeeperLost):
                # We were not killed: what carries the mark and still runs is not ours to end.
                self.remember(token="", farewell="")
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
            self._channel = None
        if self._keeper is not None:
            try:
                self._keeper.wait(END_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None

    def _send(self, message: Message, fds: Sequence[int] = ()) -> None:
        if self._channel is None:
            raise KeeperLost("the keeper process is not running")
        try:
            self._channel.send(message, fds)
        except ChannelClosed:
            self._lost()
            raise KeeperLost("the keeper process died") from None

    def _read(self) -> None:
        assert self._channel is not None
        try:
            message, _ = self._channel.receive()
        except ChannelClosed:
            self._lost()
            return
        if "exited" in message:
            self._alive.discard(int(message["exited"]))
            exit_code = int(message["exit_code"])
            self._on_exit(Exit(pid=int(message["exited"]), exit_code=exit_code, at=message["at_ns"] / 1e9))
        elif "started" in message:
            self.answered(message)
        elif "swept" in message:
            self._sweeps.discard(int(message["swept"]))

    def _lost(self) -> None:
        """The keeper died: each worker dies with it by the kernel's hand, and a new keeper may be begun."""
        if self._channel is None:
            return
        if self._keeper is not None:
            self._keeper.wait()
        self._loop.forget(self._channel)
        self._channel.close()
        self._channel = None
        now = time.monotonic()
        alive, self._alive = self._alive, set()
        self._sweeps.clear()
        kill_carriers(self.token)  # what the workers had started
        for pid in alive:
            self._on_exit(Exit(pid=pid, exit_code=-int(signal.SIGKILL), at=now))
