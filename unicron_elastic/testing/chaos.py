"""Fault injection into a worker: ``install`` takes a plan and waits for its moments in a script that knows nothing.

A worker that has nothing to do by its plan gets no hooks at all.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Iterator

from unicron_elastic.testing import chaos_faults
from unicron_elastic.testing.chaos_hooks import REDUCTIONS, PhaseWatch, Reductions
from unicron_elastic.testing.chaos_plan import PROCESS_WIDE, ChaosFault, ChaosKind, ChaosPhase, ChaosPlan
from unicron_elastic.testing.explain_chaos import deed
from unicron_elastic.testing.parse_chaos import parse
from unicron_elastic.worker.process.after_import import after_import
from unicron_elastic.worker.step_count import count_steps

VARIABLE = "UNICRON_CHAOS"


def install_from_environment() -> None:
    """Installs the plan in UNICRON_CHAOS for the worker that torchrun's variables describe. Raises ValueError."""
    environ = os.environ
    if environ.get(VARIABLE):
        install(
            environ[VARIABLE],
            int(environ.get("RANK", "0")),
            int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            world_size=int(environ.get("WORLD_SIZE", "1")),
        )


def install(plan: str, rank: int, restart_count: int, *, world_size: int) -> None:
    """Do in this process from now on what ``plan`` has for ``rank``. Raises ValueError if it cannot be parsed."""
    parsed = parse(plan)
    if rank == 0:
        for missing in parsed.missing_ranks(world_size):
            chaos_faults.say(f"the plan names rank {missing}, but this job has ranks 0 to {world_size - 1}")
    injector = _Injector(parsed, rank, restart_count, world_size)
    if injector.needs_steps:
        after_import("torch.optim.optimizer", lambda _module: injector.begin())
        count_steps(injector, lambda _step: None)
    injector.start_clock()


class _Injector:
    """What one worker has to do by the plan."""

    def __init__(self, plan: ChaosPlan, rank: int, restart: int, world_size: int) -> None:
        self._rank = rank
        self._pid = os.getpid()
        own = plan.faults_of(rank, restart)
        self._waiting = [fault for fault in own if fault.after is None]
        self._timed = [fault for fault in own if fault.after is not None]
        self._drawn = [random.draw(world_size, restart) for random in plan.random]
        kinds = {kind for random in plan.random for kind in random.kinds} | {fault.kind for fault in self._timed}
        self.needs_steps = bool(self._waiting) or not kinds <= PROCESS_WIDE
        self._needs_reductions = ChaosKind.SKIP in kinds or any(map(_is_of_reduction, self._waiting))
        self._reductions = Reductions()
        self._overdue: list[ChaosFault] = []  # their time has come, and they wait for the main thread
        self._skips: list[ChaosFault] = []
        self._lasting: list[chaos_faults.SlowSteps | chaos_faults.Leak] = []
        self._step = 1
        self._watch: PhaseWatch | None = None

    def begin(self) -> None:
        """torch is there, and the first step may come."""
        if self._needs_reductions:
            self._reductions.install()
        self._begin_step()

    def beat(self, step: int) -> None:
        """Optimizer step number ``step`` of this process has just ended; called in the main thread."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = self._reductions.watch = None
        self._lasting = [each for each in self._lasting if each.after_step()]
        for fault in [fault for fault in self._waiting if fault.step <= step]:
            self._strike(fault, f"step {fault.step} had no {_ordinal(fault.nth)}{fault.phase.value} phase: at its end")
        for fault in self._overdue[:]:
            self._overdue.remove(fault)
            self._start(fault, f"after {fault.after:g} s and step {step}")
        self._step = step + 1
        self._begin_step()

    def start_clock(self) -> None:
        """Begins to wait for the faults that have a time."""
        if self._timed or self._drawn:
            threading.Thread(target=self._wait_for_times, args=(time.monotonic(),), name="chaos", daemon=True).start()

    def _wait_for_times(self, started_at: float) -> None:
        for fault in heapq.merge(sorted(self._timed, key=_after), *map(self._of_this_rank, self._drawn), key=_after):
            time.sleep(max(0.0, min(started_at + _after(fault) - time.monotonic(), threading.TIMEOUT_MAX)))
            if fault.kind in PROCESS_WIDE:
                self._strike(fault, f"{fault.after:g} s after the start")
            else:
                self._overdue.append(fault)

    def _of_this_rank(self, faults: Iterator[ChaosFault]) -> Iterator[ChaosFault]:
        return (fault for fault in faults if fault.rank == self._rank)

    def _begin_step(self) -> None:
        due = [fault for fault in self._waiting if fault.step == self._step]
        for fault in due:
            if fault.kind in (ChaosKind.SLOW, ChaosKind.LEAK, ChaosKind.SKIP):
                self._start(
                    fault, f"from step {fault.step} on" if fault.kind is not ChaosKind.SKIP else f"step {fault.step}"
                )
        watched = [fault for fault in due if fault in self._waiting]
        if watched or self._skips:
            self._watch = PhaseWatch(self._expects, self._arrive, self._skips_next)
            with_reductions = bool(self._skips) or any(map(_is_of_reduction, watched))
            self._watch.install(with_reductions=with_reductions)
            self._reductions.watch = self._watch if with_reductions else None

    def _start(self, fault: ChaosFault, when: str) -> None:
        """Starts what is no matter of a phase; what strikes once strikes now."""
        if fault.kind in (ChaosKind.SLOW, ChaosKind.LEAK):
            self._announce(fault, when)
            self._lasting.append(
                chaos_faults.SlowSteps(fault) if fault.kind is ChaosKind.SLOW else chaos_faults.Leak(fault)
            )
        elif fault.kind is ChaosKind.SKIP:
            self._skips.append(fault)
        else:
            self._strike(fault, when)
        if fault in self._waiting:
            self._waiting.remove(fault)

    def _expects(self, phase: ChaosPhase, nth: int) -> bool:
        return any(self._is_at(fault, phase, nth) for fault in self._waiting)

    def _arrive(self, phase: ChaosPhase, nth: int, details: str) -> None:
        for fault in [fault for fault in self._waiting if self._is_at(fault, phase, nth)]:
            self._strike(fault, f"step {fault.step}, {_ordinal(nth)}{phase.value}{details}")

    def _is_at(self, fault: ChaosFault, phase: ChaosPhase, nth: int) -> bool:
        return (fault.step, fault.phase, fault.nth) == (self._step, phase, nth)

    def _skips_next(self) -> bool:
        if not self._skips or os.getpid() != self._pid:
            return False
        self._announce(self._skips.pop(0), f"step {self._step}")
        return True

    def _strike(self, fault: ChaosFault, when: str) -> None:
        if fault in self._waiting:
            self._waiting.remove(fault)  # before, as the process may survive it
        if os.getpid() == self._pid:  # a process that the script forked is not this worker
            self._announce(fault, when)
            chaos_faults.do(fault)

    def _announce(self, fault: ChaosFault, when: str) -> None:
        chaos_faults.say(f"rank {self._rank} {deed(fault)} ({when})")


def _after(fault: ChaosFault) -> float:
    return fault.after or 0.0


def _is_of_reduction(fault: ChaosFault) -> bool:
    return fault.kind is ChaosKind.SKIP or fault.phase in REDUCTIONS


def _ordinal(nth: int) -> str:
    return "" if nth == 1 else f"{nth}. "
