"""The agent's side of the warm process: starts it early, asks it for forks, and says why when it cannot serve."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

from unicron_elastic.launcher.agent.held.take_up import Taken
from unicron_elastic.launcher.agent.process.early_variables import (
    early_variable,
    program_of,
    set_variables,
    source_files,
)
from unicron_elastic.launcher.agent.process.helper import Helper, HelperPatience
from unicron_elastic.launcher.agent.process.processes import KeeperLost, Processes
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.worker import inject as inject_package
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.helper_tasks import (
    WARM_ANSWERS,
    Forgotten,
    ForkWorker,
    HelperReady,
    Launch,
    Learn,
    Learned,
    ProcessStarted,
    Unfit,
    WarmUp,
)
from unicron_elastic.worker.notices import Imported
from unicron_elastic.worker.process.mark import MARK, mark_of
from unicron_elastic.worker.process.standing import kind_of_stream, standing
from unicron_elastic.worker.start import bootstrap, warm

WARM_PATIENCE = HelperPatience()
LEARNED_AT_LEAST = 30  # modules: to import fewer takes a worker no time
TOLD_MAX = 3  # modules that are left out, in one sentence
# What code in C, of packages that may be learned, reads of the environment as it is loaded.
_READ_BY_C = re.compile(r"(ARROW|JE_ARROW|MIMALLOC|MALLOC|JEMALLOC|GRPC|HDF5|TF|XLA|RAYON|NUMEXPR|BLIS|TBB)_[A-Z0-9_]*")
WHILE_IT_IMPORTS = HelperPatience(given_up_s=120.0)  # torch, from a cold network file system


def injected(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with the folder on PYTHONPATH whose ``sitecustomize`` attaches the in-band parts."""
    changed = dict(env)
    before = env.get("PYTHONPATH")
    folder = str(Path(inject_package.__file__).parent)
    if before is not None:
        changed["UNICRON_PYTHONPATH"] = before
    changed["PYTHONPATH"] = folder + (os.pathsep + before if before else "")
    return changed


def why_not(argv: Sequence[str]) -> str | None:
    """Why this command cannot start warm, as a sentence; None if it can."""
    if not argv or argv[0] != sys.executable:
        return "the workers do not run this Python interpreter, so that nobody keeps snapshots of a Run in them"
    if any(Template(word).safe_substitute(local_rank="0") != word for word in program_of(argv)):
        return "each local rank has a script of its own"
    for path in source_files(argv):
        variable = early_variable(path)
        if variable is not None:
            return f"{path} sets {variable}, which libraries read when they are imported"
    return None


def sentence_of(said: Learned) -> str:
    """What users read of it."""
    left_out = [f"{each.module}: {each.why}" for each in said.left_out[:TOLD_MAX]]
    if len(said.left_out) > TOLD_MAX:
        left_out.append(f"{len(said.left_out) - TOLD_MAX} more")
    rest = f" Left to each worker: {'; '.join(left_out)}." if left_out else ""
    count = f"{said.modules} more modules" if said.modules != 1 else "one more module"
    return f"The next start finds {count} imported, in {said.grown_bytes / 1e6:.0f} MB that all workers share.{rest}"


def launch_of(argv: Sequence[str], env: Mapping[str, str], preload: str, *, may_be_held: bool = True) -> Launch:
    """What a warm process is begun for here and now.

    Raises OSError where the kernel does not tell what there is to know of one that may be held.
    """
    kinds = tuple(map(kind_of_stream, (0, 1, 2))) if may_be_held else ()
    stands = standing() if may_be_held else {}
    return Launch(argv=tuple(argv), env=dict(env), preload=preload, streams=kinds, standing=stands)


def sets_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The variables that the script of this command seems to set."""
    return tuple(name for path in source_files(argv) for name in set_variables(path))


class WarmProcess:
    """A process that has imported torch and waits before the script; workers are forked from it."""

    def __init__(
        self, loop: Loop, processes: Processes, preload: str, patience: HelperPatience = WARM_PATIENCE
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._preload = preload
        self._channel: Channel | None = None
        self._is_ready = False
        self._number = 0
        self._asked: set[int] = set()  # requests that it has not answered
        self._patience = patience
        self._helper: Helper | None = None  # once its pid is known
        self.pid: int | None = None
        self.refusal: str | None = None  # why it cannot serve
        self.is_gone = False  # it died; another may be begun
        self.learned_at_least = LEARNED_AT_LEAST
        self.on_word: Callable[[str], None] = lambda _sentence: None  # of what it has learned
        self.may_be_held = False
        self._is_learning = False
        self._has_learned = False
        self._env: Mapping[str, str] = {}
        self._sets: tuple[str, ...] = ()  # variables that the script seems to set

    def take_over(self, taken: Taken, number: int, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Goes on with that of another launch, which is known by the request of this number."""
        self._channel = taken.warm
        self._number = number
        self._is_ready = True
        self._has_learned = taken.has_learned
        self._env = dict(env)
        self._sets = sets_of(argv)
        self._loop.on_readable(taken.warm, self._read)

    @property
    def held_fd(self) -> int | None:
        """The channel of one that may be held for the next launch, as it serves and owes nothing."""
        is_idle = self._is_ready and not self._asked and self.pid is not None and self.may_be_held
        return self._channel.fileno() if is_idle and self._channel is not None else None

    def begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[int]) -> None:
        """Starts it with the command of the workers; it imports while the agent goes on. Raises KeeperLost."""
        ours, theirs = Channel.pair()
        lowest = max(streams) + 1
        full = injected(env)
        full[bootstrap.WARM_FD] = str(lowest)
        full[warm.PRELOAD] = self._preload
        self._env = dict(env)
        self._sets = sets_of(argv)
        launch = launch_of(argv, env, self._preload, may_be_held=self.may_be_held)
        ours.send(WarmUp(launch=launch, sets=self._sets, may_be_held=self.may_be_held))
        fds = {**{stream: stream for stream in streams}, lowest: theirs.fileno()}
        try:
            self._number = self._processes.request_start(argv, full, cwd, fds)
        finally:
            theirs.close()
        self._channel = ours
        self._loop.on_readable(ours, self._read)

    def wait_ready(self) -> bool:
        """Waits until it can be forked from; false if it cannot serve, and ``refusal`` says why."""
        if self.pid is None and self.refusal is None:
            try:
                self.pid = self._processes.wait_for_pid(self._number, "the warm process")
            except (OSError, KeeperLost) as error:
                self.is_gone = isinstance(error, KeeperLost)
                self._refuse(str(error))
        if not self._expect(WHILE_IT_IMPORTS).wait(self._is_settled):
            self._kill()
            self._refuse(f"it was not ready within {WHILE_IT_IMPORTS.given_up_s:g} s, or was stopped")
        return self.refusal is None

    def request_fork(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, fds: Sequence[int], streams: Sequence[int]
    ) -> int:
        """Asks for a worker; returns the number under which ``Processes.wait_for_pid`` knows the answer.

        ``fds`` are the control socket, the pulse page, then one descriptor for each of ``streams``. Raises
        ChannelClosed if the warm process is gone.
        """
        if self._channel is None:
            raise ChannelClosed("the warm process is gone")
        helper = self._expect(self._patience)
        self._is_learning = False  # it stops that
        number = self._processes.next_number(helper)
        task = ForkWorker(
            number=number,
            argv=tuple(argv),
            env={**env, MARK: mark_of(self._processes.token, number)},
            cwd=cwd,
            streams=tuple(streams),
            ignored_signals=self._processes.ignored_by_workers(),
            keeper=self._processes.keeper_pid,
            fds=tuple(fds),
        )
        try:
            helper.send(self._channel, task)
        except TimeoutError:
            self._give_up()
            raise ChannelClosed(self.refusal) from None
        self._asked.add(number)
        return number

    @property
    def has_learned(self) -> bool:
        """Whether it has been told what workers import, and is done with it."""
        return self._has_learned

    @property
    def may_learn(self) -> bool:
        """Whether it can be told what workers import, and has not been."""
        return self._is_ready and not self._is_learning and not self._has_learned

    def learn(self, imported: Imported, env: Mapping[str, str], of_worker: Iterable[str]) -> None:
        """Tells it what a worker has imported; it has that imported while the job trains, for the next start.

        ``env`` is that worker's, ``of_worker`` are the variables that each worker has of its own.
        """
        if self._channel is None or not self.may_learn or len(imported.modules) < self.learned_at_least:
            return
        by_c = next(filter(_READ_BY_C.fullmatch, (*imported.changed, *imported.changed_since, *self._sets)), None)
        if set_by_script := by_c or ("torch's default type" if imported.has_other_type else None):
            self._has_learned = True
            said = f"The next start finds no more modules imported than this one: the script sets {set_by_script}."
            self.on_word(said)
            return
        own = {name for name in of_worker if env.get(name) != self._env.get(name)}
        task = Learn(
            modules=imported.modules,
            env=dict(env),
            varying=tuple(sorted({*own, *self._sets, MARK})),
            changed=imported.changed,
            seeded_before=imported.seeded_before,
            after_group=imported.after_group,
            changed_since=imported.changed_since,
        )
        with contextlib.suppress(ChannelClosed, TimeoutError, ValueError):  # as many names do not fit
            self._expect(self._patience).send(self._channel, task)
            self._is_learning = True

    def _learned(self, said: Learned) -> None:
        self._is_learning, self._has_learned = False, True
        self.on_word(sentence_of(said))

    def _forgotten(self, why: str) -> None:
        self._is_learning = self._has_learned = False
        self.on_word(f"What was imported for the next start is not used: {why}.")

    def _give_up(self) -> None:
        """Kills it, as it does not answer; another may be begun."""
        self._kill()
        self._has_gone("it did not answer")

    def end(self) -> None:
        """Lets it go: it ends by itself when its channel closes."""
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.close()
            self._channel = None
        self.pid = None

    def _is_settled(self) -> bool:
        return self._is_ready or self.refusal is not None

    def _read(self) -> None:
        assert self._channel is not None
        try:
            answer = self._channel.hear(WARM_ANSWERS)
        except ChannelClosed:
            self._has_gone("it died")
            return
        if self._helper is not None:
            self._helper.heard()
        match answer:
            case HelperReady():
                self._is_ready = True
            case Unfit(reason=reason):
                self._refuse(reason)
            case Learned():
                self._learned(answer)
            case Forgotten(why=why):
                self._forgotten(why)
            case ProcessStarted():
                self._asked.discard(answer.number)
                self._processes.answered(answer)

    def _expect(self, patience: HelperPatience) -> Helper:
        """The helper that it is while as much is expected of it."""
        pid = self.pid or 0
        if self._helper is None or self._helper.patience != patience:
            self._helper = Helper(self._loop, pid, patience, wake=self._wake, give_up=self._give_up)
        return self._helper

    def _wake(self) -> None:
        if self.pid is not None:
            self._processes.send_signal(self.pid, signal.SIGCONT)

    def _kill(self) -> None:
        if self.pid is not None:
            self._processes.send_signal(self.pid, signal.SIGKILL)

    def _has_gone(self, reason: str) -> None:
        """Ends with it what it was about to fork, which may be no worker yet: then it carries the mark of this one."""
        self.is_gone = True
        self._processes.give_up(self._asked)
        if self.pid is not None:
            with contextlib.suppress(KeeperLost):
                self._processes.request_clearing(self.pid, self._number)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._is_ready = False
        self.end()
