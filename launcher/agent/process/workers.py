"""The worker processes of one generation: started warm or plainly, heard over their control channels, ended.

Builds on torch's SubprocessContext (torch.distributed.elastic.multiprocessing), which owns log files, tees and the
``RunProcsResult`` that torch's agent reads; only how a process is started and waited for is ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from unicron_elastic.compat.workers import (
    SubprocessContext,
    bound_to_numa,
    handles_usual_signals,
    terminate_handler,
)
from unicron_elastic.detection.arrivals import Arrivals
from unicron_elastic.launcher.agent.process.activity import is_ending, maps_file
from unicron_elastic.launcher.agent.process.processes import Exit, KeeperLost
from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.agent.process.warm import WarmProcess, injected
from unicron_elastic.launcher.agent.process.whereabouts import Whereabouts, arrivals_of, groups_of
from unicron_elastic.launcher.common.open_streams import open_streams
from unicron_elastic.launcher.config.forwarded import for_scripts
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.instructions import (
    AskCollectives,
    AskImported,
    AskPosition,
    ExpectBreaks,
    FreeToStop,
    Instruction,
)
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.notices import (
    NOTICES,
    Broke,
    Ending,
    FirstStep,
    Imported,
    LatestCollectives,
    Notice,
    Position,
    Raised,
)
from unicron_elastic.worker.pulse import PAGE_PATH, PulsePage, PulseReading, page_name
from unicron_elastic.worker.start import bootstrap

UNREAD_MAX = 1000  # messages; a socket holds some hundred, and who writes on and on must not keep us


class WorkerProcess:
    """One worker, in the shape in which torch's context wants it: ``proc`` and ``close``."""

    def __init__(self, runtime: Runtime, local_rank: int) -> None:
        self._runtime = runtime
        self.local_rank = local_rank
        self.pid = 0
        self.returncode: int | None = None
        self.control: Channel | None = None
        self.page: PulsePage | None = None
        self.is_warm = False
        self.number = 0  # of the request that started it
        self._clearing: int | None = None  # the request that ends what it has left
        self.whereabouts = Whereabouts()
        self.arrivals: Arrivals | None = None  # as answered last
        self.owes_arrivals = False
        self.phase_limits_s: dict[str, float] = {}  # by phase, as the script says
        self.flops_per_step: float | None = None  # of the whole job, as the script says
        self.is_leaving = False  # its interpreter shuts down
        self.stack_fd: int | None = None  # the number, in the worker, of the file for its stacks

    @property
    def proc(self) -> WorkerProcess:
        """torch's SubprocessHandler keeps its Popen here; this is both."""
        return self

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Runs the loop until the worker ends. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._runtime.loop.run_until(lambda: self.returncode is not None, deadline):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"worker {self.local_rank}", timeout)
        assert self.returncode is not None
        return self.returncode

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signals the worker and everything in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)

    def reading(self) -> PulseReading | None:
        """What its pulse page says; None if it has none or the script overwrote it."""
        return self.page.read() if self.page is not None else None

    def tell(self, instruction: Instruction) -> bool:
        """Tells it; whether that could be done: it may have ended, or read nothing."""
        if self.control is None:
            return False
        try:
            self.control.send(instruction)
        except (ChannelClosed, OSError):
            return False
        return True

    def expect_breaks(self) -> None:
        """Tells it that its connections may break, as a node departs: nobody need see a traceback of that."""
        self.tell(ExpectBreaks())

    def clear(self) -> None:
        """End all that it started, now that it has ended itself; ``wait_until_clear`` waits for that."""
        if self._clearing is None:
            with contextlib.suppress(KeeperLost):  # then nothing of it is left
                self._clearing = self._runtime.processes.request_clearing(self.pid, self.number)

    def wait_until_clear(self) -> None:
        """Waits until nothing that it started lives."""
        self.clear()
        if self._clearing is not None:
            self._runtime.processes.wait_for_sweep(self._clearing)

    def ask_whereabouts(self) -> None:
        """Asks how far it has come in its collectives, unless it still owes an answer."""
        if self.whereabouts.asked_at is not None:
            return
        if self.tell(AskPosition(question=self.whereabouts.questions + 1)):
            self.whereabouts = self.whereabouts.asked(time.monotonic())

    def answered(self, said: Position) -> None:
        """Takes its answer, if it is the one to the latest question."""
        if said.question == self.whereabouts.questions:
            self.whereabouts = self.whereabouts.answered(
                groups_of(said), uses_gpu=said.uses_gpu, is_at_prompt=said.is_at_prompt
            )

    def ask_arrivals(self) -> None:
        """Asks when it has begun its latest collectives; until it answers that is not known."""
        self.arrivals = None
        self.owes_arrivals |= self.tell(AskCollectives())

    def answered_arrivals(self, said: LatestCollectives) -> None:
        """Takes its answer."""
        self.owes_arrivals = False
        self.arrivals = arrivals_of(said)

    def runs_another_program(self) -> bool:
        """Whether it was told apart from its page without a word, while it lives: only exec does that."""
        if self.page is None or self.is_leaving or self.returncode is not None:
            return False
        return maps_file(self.pid, PAGE_PATH) is False and not is_ending(self.pid)

    def forget_parts(self) -> None:
        """Leaves alone what there was of our parts in it: what its page says is of the program before."""
        self.release()
        self.stack_fd = None

    def hang_up(self) -> None:
        """Closes the control channel."""
        if self.control is not None:
            self._runtime.loop.forget(self.control)
            self.control.close()
            self.control = None

    def release(self) -> None:
        """Gives back the channel and the page."""
        self.hang_up()
        if self.page is not None:
            self.page.close()
            self.page = None


def staying_ignored(runtime: Runtime) -> frozenset[int]:
    """The signals that were ignored when the launcher started, if nobody has named those to handle."""
    is_named = runtime.signals_are_named or not handles_usual_signals()
    return frozenset() if is_named else runtime.ignored_at_start


def ignore_again(runtime: Runtime) -> None:
    """Ignores those which torch has begun to handle with the workers that it has started itself."""
    for number in staying_ignored(runtime):
        if signal.getsignal(number) is terminate_handler:
            signal.signal(number, signal.SIG_IGN)


class WorkersContext(SubprocessContext):  # type: ignore[misc]
    """All workers of this node in one generation."""

    def __init__(
        self,
        runtime: Runtime,
        on_exit: Callable[[WorkerProcess, Exit], None],
        on_message: Callable[[WorkerProcess, Notice | Odd], None],
        on_ending: Callable[[WorkerProcess], None],
        on_replaced: Callable[[WorkerProcess], None],
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._runtime = runtime
        self._on_worker_exit = on_exit
        self._on_message = on_message
        self._on_ending = on_ending
        self._on_replaced = on_replaced  # by another program, in the same process
        self._early_exits: dict[int, Exit] = {}
        self._is_released = False
        self._appends: set[int] = set()  # whose log files have what an earlier process wrote
        runtime.on_exit = self._exited

    @property
    def workers(self) -> dict[int, WorkerProcess]:
        """The workers by local rank."""
        found: dict[int, WorkerProcess] = self.subprocess_handlers
        return found

    def stop(self, local_ranks: Iterable[int], why_free: str | None) -> None:
        """Asks those of these workers that still run to end, and to leave their collectives if there is a reason.

        All are asked to end before the first of them leaves: its peers' collectives break, and their scripts must know.
        """
        running = self._running(local_ranks)
        for worker in running:
            worker.close(signal.SIGTERM)
        if why_free is not None:
            for worker in running:
                worker.tell(FreeToStop(reason=why_free))

    def expect_breaks(self) -> None:
        """Tells all workers that run that connections may break, which is no fault."""
        for worker in self._running(self.workers):
            worker.expect_breaks()

    def kill(self, local_ranks: Iterable[int]) -> None:
        """Ends those of these workers that still run."""
        for worker in self._running(local_ranks):
            worker.close(signal.SIGKILL)

    def replace(self, local_rank: int, env: Mapping[str, str]) -> WorkerProcess:
        """Starts another process in the place of a worker that has ended, with ``env`` on top of that one's.

        It goes on in the same log files, when nothing that the other had started lives. Raises OSError if it cannot be
        started.
        """
        self.workers[local_rank].wait_until_clear()
        self.workers[local_rank].release()
        self._early_exits.clear()  # of orphans: the process that starts now may get the pid of one
        self.envs[local_rank].update(env)
        self._appends.add(local_rank)
        warm = self._runtime.ready_warm() if self._numa_options is None else None
        if warm is None:
            worker = self._start_one(local_rank, self._request_start)
        else:
            try:
                worker = self._start_one(local_rank, partial(self._request_fork, warm))
            except ChannelClosed:
                self._runtime.warm_failed(warm)
                worker = self._start_one(local_rank, self._request_start)
        self.workers[local_rank] = worker
        self._listen(worker)
        return worker

    def _start_one(self, local_rank: int, request: Callable[[WorkerProcess], int]) -> WorkerProcess:
        worker = WorkerProcess(self._runtime, local_rank)
        try:
            worker.number = request(worker)
            worker.pid = self._runtime.processes.wait_for_pid(worker.number, self.entrypoint)
        except BaseException:
            worker.release()
            if worker.number:
                self._runtime.processes.take_back([worker.number])
                worker.wait_until_clear()  # it may have been forked by one that could not say so
            raise
        return worker

    def _running(self, local_ranks: Iterable[int]) -> list[WorkerProcess]:
        workers = [self.workers[local_rank] for local_rank in local_ranks]
        return [worker for worker in workers if worker.returncode is None]

    def release(self) -> None:
        """After the last worker's end: kills what they left behind, gives back channels, pages and log files."""
        if self.subprocess_handlers and not self._is_released:
            self._is_released = True
            self._runtime.sweep()
        for worker in self.workers.values():
            worker.release()

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        super()._close(death_sig, timeout)
        self.release()

    def start(self) -> None:
        """Starts all workers, as torch does; what stays ignored is never handled meanwhile."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, staying_ignored(self._runtime))
        try:
            super().start()  # handles all signals of its list, then calls _start
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _start(self) -> None:
        if self.subprocess_handlers:
            raise ValueError("the workers of this generation are started already")
        self._raise_between_events()
        with self._runtime.loop.signals_held():  # a worker that runs is asked to end, and may save, not just killed
            self._start_anyhow()

    def _start_anyhow(self) -> None:
        warm = self._runtime.ready_warm() if self._numa_options is None else None
        try:
            if warm is not None:
                try:
                    self._start_all(partial(self._request_fork, warm))
                    return
                except ChannelClosed:
                    self._runtime.warm_failed(warm)
            self._start_all(self._request_start)
        except KeeperLost:
            self._runtime.begin(None, os.environ)
            self._start_all(self._request_start)

    def _raise_between_events(self) -> None:
        """torch's handlers, installed just before this, raise wherever they strike; let them strike between events.

        What was ignored at the start (nohup's SIGHUP) and nobody has named is ignored again, here and not in workers:
        torchrun's workers have the system's default of what torchrun handles.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        stays_ignored = staying_ignored(self._runtime)
        patient = self._runtime.loop.between_callbacks(terminate_handler)
        for number in signal.valid_signals():
            if signal.getsignal(number) is terminate_handler:
                signal.signal(number, signal.SIG_IGN if number in stays_ignored else patient)
                self._runtime.processes.ignored_here.update(stays_ignored & {number})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stays_ignored)

    def _start_all(self, request: Callable[[WorkerProcess], int]) -> None:
        workers = {local_rank: WorkerProcess(self._runtime, local_rank) for local_rank in range(self.nprocs)}
        try:
            for worker in workers.values():
                worker.number = request(worker)
            self.subprocess_handlers = workers
            for worker in workers.values():
                worker.pid = self._runtime.processes.wait_for_pid(worker.number, self.entrypoint)
                self._listen(worker)
        except BaseException:
            for worker in workers.values():
                worker.release()
            self.subprocess_handlers = {}
            self._runtime.processes.take_back(worker.number for worker in workers.values() if worker.number)
            self._runtime.sweep()
            raise

    def _request_fork(self, warm: WarmProcess, worker: WorkerProcess) -> int:
        theirs, page = self._equip(worker)
        with self._outputs(worker.local_rank) as outputs:
            fds = [theirs.fileno(), page.fd, *outputs.values()]
            number = warm.request_fork(self._argv(worker), self._env(worker), os.getcwd(), fds, list(outputs))
        theirs.close()
        worker.is_warm = True
        return number

    def _request_start(self, worker: WorkerProcess) -> int:
        argv, env = self._argv(worker), self._env(worker)
        with self._outputs(worker.local_rank) as outputs:
            fds = dict(outputs)
            theirs = None
            if self._runtime.options.in_band and self._runs_our_python():
                theirs, page = self._equip(worker)
                env = injected(env)
                env[bootstrap.CONTROL_FD], env[bootstrap.PULSE_FD] = "3", "4"
                fds |= {3: theirs.fileno(), 4: page.fd}
            number = self._runtime.processes.request_start(argv, env, os.getcwd(), fds)
            if theirs is not None:
                theirs.close()
        return number

    def _equip(self, worker: WorkerProcess) -> tuple[Channel, PulsePage]:
        """Makes the worker's control channel and pulse page; returns the worker's end and the page."""
        worker.control, theirs = Channel.pair()
        worker.control.settimeout(0)
        env = self.envs[worker.local_rank]
        worker.page = PulsePage(page_name(int(env["RANK"]), worker.local_rank, env.get("TORCHELASTIC_RUN_ID", "")))
        return theirs, worker.page

    def _listen(self, worker: WorkerProcess) -> None:
        """Hears a worker from when its pid is known: what was said of it without would be of nobody."""
        early = self._early_exits.pop(worker.pid, None)
        if early is not None:
            self._exited(early)
        elif worker.control is not None:
            self._runtime.loop.on_readable(worker.control, lambda: self._hear(worker))

    def _runs_our_python(self) -> bool:
        import sys

        return bool(self.entrypoint == sys.executable)

    def _argv(self, worker: WorkerProcess) -> list[str]:
        argv = (self.entrypoint, *map(str, self.args[worker.local_rank]))
        return bound_to_numa(argv, worker.local_rank, self._numa_options)

    def _env(self, worker: WorkerProcess) -> dict[str, str]:
        return {**for_scripts(os.environ), **self.envs[worker.local_rank]}

    @contextlib.contextmanager
    def _outputs(self, local_rank: int) -> Any:
        """{number in the worker: descriptor here} of its standard streams, log files opened as torch opens them."""
        with contextlib.ExitStack() as files:
            outputs = {fd: fd for fd in open_streams()}
            for fd, path in ((1, self.stdouts[local_rank]), (2, self.stderrs[local_rank])):
                if path:
                    mode = "a" if local_rank in self._appends else "w"
                    outputs[fd] = files.enter_context(open(path, mode)).fileno()
            yield outputs

    def _exited(self, ended: Exit) -> None:
        for worker in self.workers.values():
            if worker.pid == ended.pid and worker.returncode is None:
                self._drain_control(worker)
                worker.returncode = ended.exit_code
                if ended.exit_code != 0:
                    worker.clear()
                self._on_worker_exit(worker, ended)
                return
        if len(self._early_exits) < 4096:  # an orphan's exit, or a worker's before its pid was known
            self._early_exits[ended.pid] = ended

    def _hear(self, worker: WorkerProcess) -> None:
        self._read_control(worker)

    def _look_at_mute(self, worker: WorkerProcess) -> None:
        if worker.runs_another_program():
            worker.forget_parts()
            self._on_replaced(worker)

    def _drain_control(self, worker: WorkerProcess) -> None:
        """Reads what the worker said before it ended, so that its exception is known before its exit."""
        for _ in range(UNREAD_MAX):
            if worker.control is None or not self._read_control(worker):
                return

    def _tell_who_ends(self, but: WorkerProcess) -> None:
        """Before an exception or a break is told: it may be about another worker, whose exit is not known yet."""
        for worker in self.workers.values():
            if worker is not but and worker.returncode is None and is_ending(worker.pid):
                self._on_ending(worker)

    def _read_control(self, worker: WorkerProcess) -> bool:
        """Reads one message; false when there is none."""
        assert worker.control is not None
        try:
            said = worker.control.hear(NOTICES)
        except (BlockingIOError, TimeoutError):
            return False
        except (ChannelClosed, OSError):
            worker.hang_up()
            self._look_at_mute(worker)
            return False
        if isinstance(said, Ending):
            worker.is_leaving = True
            self._on_ending(worker)
            return True
        if isinstance(said, Imported):
            self._runtime.learn(said, self._env(worker), self.envs[worker.local_rank])
            return True
        if isinstance(said, FirstStep) and worker.is_warm and self._runtime.may_learn():
            worker.tell(AskImported())
        if isinstance(said, Raised | Broke):
            self._tell_who_ends(but=worker)
        self._on_message(worker, said)
        return True
