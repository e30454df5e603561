"""What an agent process owns beside torch's objects: its loop, its keeper, its warm process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from unicron_elastic.base.state_folder import open_own_folder
from unicron_elastic.launcher.agent.held.take_up import Declined, code_stamp, take_up
from unicron_elastic.launcher.agent.process.early_variables import source_files
from unicron_elastic.launcher.agent.process.helper import HelperPatience
from unicron_elastic.launcher.agent.process.processes import KEEPER_PATIENCE, Exit, KeeperLost, Processes
from unicron_elastic.launcher.agent.process.warm import WARM_PATIENCE, WarmProcess, launch_of, sets_of, why_not
from unicron_elastic.launcher.common.kept_snapshots import NodeShelf
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.common.needs_torch import needs_torch
from unicron_elastic.launcher.common.open_streams import open_streams
from unicron_elastic.launcher.config.forwarded import for_scripts
from unicron_elastic.launcher.config.options import PRELOAD_DEFAULT, Options
from unicron_elastic.launcher.export.metrics.link import Teller
from unicron_elastic.worker.helper_tasks import Hold, TakeUp
from unicron_elastic.worker.notices import Imported
from unicron_elastic.worker.process.ignored_signals import ignored_signals
from unicron_elastic.worker.process.mark import mark_of


class Runtime:
    """Begun before torch is imported, so that the warm process imports it at the same time as the agent."""

    workers_began = False  # of any in this process: from then on a job does not begin again under another agent

    def __init__(
        self,
        options: Options,
        warm_patience: HelperPatience = WARM_PATIENCE,
        keeper_patience: HelperPatience = KEEPER_PATIENCE,
    ) -> None:
        self.options = options
        self._warm_patience = warm_patience
        self.loop = Loop()
        self.on_exit: Callable[[Exit], None] = lambda _exit: None
        on_exit = lambda ended: self.on_exit(ended)  # noqa: E731, PLW0108 - on_exit changes
        self.processes = Processes(self.loop, on_exit, keeper_patience)
        self.warm: WarmProcess | None = None
        self.shared_arguments: tuple[str, ...] = ()  # of unicron-run, as a spare node would need them
        self.is_alone = False  # whether this process is unicron-run's own, so that nobody else forks from it
        self.is_planned = False  # whether all nodes of the job speak in one place, where it was submitted
        self.why_drained = ""  # and so left the job, which goes on
        self.ignored_at_start = frozenset(ignored_signals())
        self.signals_are_named = False  # those that end the job, by the user
        self.metrics_teller: Teller | None = None  # to the agent of the cluster that started this process
        self.shelf: NodeShelf | None = None  # likewise
        self.why_plain: str | None = None  # why workers start plainly, once that is known
        self.on_word: Callable[[str], None] = lambda _sentence: None  # of the warm process, for people
        self.word_of_held = ""  # of what was held for this launch, for people
        self._code = ""  # what the files of ours are, once that was asked
        self._runtime_dir = ""
        self._is_unfit = False  # a warm process refused to serve, as the next one would

    def begin(self, command: Sequence[str] | None, env: Mapping[str, str]) -> None:
        """Starts the keeper, and a warm process for ``command`` where that is possible and wanted."""
        if not self.processes.is_up:
            looks = self._holds and not self._code  # once
            if looks and command is not None and self._may_begin(command) and self._take_up(command, env):
                return
            self.processes.begin()
        if command is not None and self._may_begin(command):
            self.warm = self._new_warm()
            self.warm.begin(command, for_scripts(env), os.getcwd(), open_streams())

    def _may_begin(self, command: Sequence[str]) -> bool:
        """Whether a warm process for ``command`` is possible and wanted; ``why_plain`` says why not."""
        if not self.options.warm or not self.options.in_band or self._is_unfit:
            return False
        if self.warm is not None and not self.warm.is_gone:
            return False
        if self.options.preload == PRELOAD_DEFAULT and not needs_torch(source_files(command)):
            return False  # its imports would take longer than the script
        self.why_plain = why_not(command) if len(open_streams()) == 3 else "a standard stream is closed"
        return self.why_plain is None

    def _new_warm(self) -> WarmProcess:
        warm = WarmProcess(self.loop, self.processes, self.options.preload, self._warm_patience)
        warm.on_word = lambda sentence: self.on_word(sentence)  # noqa: PLW0108 - on_word changes
        warm.may_be_held = self._holds and bool(self._code)
        return warm

    # -- from one launch to the next ---------------------------------------------------------------------------------

    @property
    def _holds(self) -> bool:
        """Whether what the job before has left is looked for, and this one leaves it to the next."""
        return self.options.warm_for_next > 0 and self.is_alone and not self.is_planned

    def _take_up(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether this launch goes on with what is held; ``word_of_held`` says so, or why not."""
        number = self.processes.next_number()
        try:
            launch = launch_of(command, for_scripts(env), self.options.preload)
            asked = TakeUp(launch=launch, sets=sets_of(command), mark=mark_of(self.processes.token, number))
            self._code, self._runtime_dir = code_stamp(), env.get("XDG_RUNTIME_DIR", "")
            with open_own_folder(self._runtime_dir) as folder:
                taken = take_up(folder, asked, self._code)
            if taken is not None:
                self.processes.take_over(taken, number)
        except (Declined, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            since = f" since {_time_of(error.since)}" if isinstance(error, Declined) and error.since else ""
            self.word_of_held = f"The warm process that is held{since} is not used: {why}."
            return False
        if taken is None:
            return False
        self.warm = self._new_warm()
        self.warm.take_over(taken, number, command, for_scripts(env))
        self.word_of_held = f"The workers start from a warm process that is held since {_time_of(taken.since)}."
        return True

    def _hold(self, warm: WarmProcess) -> None:
        """Leaves the keeper and the warm process to the next launch, where that can be."""
        fd = warm.held_fd
        if fd is None or warm.pid is None or not self._code or not self.processes.is_up:
            return
        self.sweep()
        with contextlib.suppress(KeeperLost, OSError), open_own_folder(self._runtime_dir) as folder:
            task = Hold(
                for_s=self.options.warm_for_next,
                warm=warm.pid,
                code=self._code,
                has_learned=warm.has_learned,
                fds=(folder, fd),
            )
            self.processes.hold(task)

    def ready_warm(self) -> WarmProcess | None:
        """The warm process once it can be forked from; None if workers start plainly, and ``why_plain`` says why."""
        if self.warm is None:
            return None
        if not self.warm.wait_ready():
            self.why_plain = f"the warm process cannot serve: {self.warm.refusal}"
            self._is_unfit = not self.warm.is_gone
            self.warm = None
        return self.warm

    def warm_failed(self, warm: WarmProcess) -> None:
        """A worker starts plainly, as ``warm`` died, or did not answer, while it was asked for one."""
        self.why_plain = f"the warm process cannot serve: {warm.refusal or 'it died'}"

    def may_learn(self) -> bool:
        """Whether the warm process wants to know what workers import."""
        return self.options.learn and self.warm is not None and self.warm.may_learn

    def learn(self, imported: Imported, env: Mapping[str, str], of_worker: Iterable[str]) -> None:
        """A worker has told what it has imported; ``env`` is its own, ``of_worker`` names what varies."""
        if self.warm is not None and self.may_learn():
            self.warm.learn(imported, env, of_worker)

    def stay_plain(self, why: str) -> None:
        """Lets a warm process go, and begins none."""
        self._is_unfit, self.why_plain = True, self.why_plain or why
        if self.warm is not None:
            self.warm.end()
            self.warm = None

    def sweep(self) -> None:
        """Kills what the workers of the last generation left behind."""
        keep = [self.warm.pid] if self.warm is not None and self.warm.pid is not None else []
        with contextlib.suppress(KeeperLost):
            self.processes.sweep(keep)

    def end(self) -> None:
        """Ends whatever still runs, and the warm process and the keeper with it, unless they are held."""
        if self.warm is not None:
            if self._holds:
                self._hold(self.warm)
            self.warm.end()
            self.warm = None
        self.processes.end()
        self.loop.close()


def _time_of(since: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(since))
