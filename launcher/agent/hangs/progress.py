"""Looks at the workers' progress as often as the statistics ask for, and passes on what they conclude.

The decisions are ``unicron_elastic.detection``'s; this is where its samples come from: the pulse pages, the CPU clocks
and, for workers that are late, /proc and the workers' own word on the collectives they have begun.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from unicron_elastic.detection.arrivals import Beats
from unicron_elastic.detection.sample import RankSample, RemoteRank, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Verdict
from unicron_elastic.detection.watch import (
    arrivals_since,
    forget,
    needs_arrivals,
    needs_evidence,
    needs_remote_ranks,
    next_look_at,
    observe,
)
from unicron_elastic.launcher.agent.hangs.remote_ranks import RemoteRanks
from unicron_elastic.launcher.agent.process.activity import Activity, activity, cpu_time_s, state
from unicron_elastic.launcher.agent.process.kernel_lines import reads_terminal
from unicron_elastic.launcher.agent.process.whereabouts import ANSWER_DEADLINE_S
from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.worker.pulse import PulseReading

_ARRIVALS_PAUSE_S = 0.5  # an answer costs a worker several milliseconds
_CLOCK_STEP_S = 0.001  # more is no drift between two clocks that are disciplined alike
_ANSWERS_S = ANSWER_DEADLINE_S + 0.005  # after which it is known who does not answer


@dataclass(frozen=True, slots=True)
class HostSight:
    """`HostSight` is what is looked at beside the workers' own words: the clocks, and what /proc says of a process."""

    monotonic: Callable[[], float] = time.monotonic
    realtime: Callable[[], float] = time.time
    activity: Callable[[int], Activity | None] = activity
    cpu_time_s: Callable[[int], float | None] = cpu_time_s
    state: Callable[[int], str] = state

    def realtime_ahead(self) -> tuple[float, float]:
        """(seconds, how long it took to read both clocks, which is what that may be wrong by)."""
        begin = self.monotonic()
        now = self.realtime()
        end = self.monotonic()
        return now - (begin + end) / 2, end - begin


HOST_SIGHT = HostSight()


class ProgressWatch:
    """One job's progress on this node. What is usual stays known from one generation to the next."""

    def __init__(self, loop: Loop, on_verdict: Callable[[Verdict], None], sight: HostSight = HOST_SIGHT) -> None:
        self._loop = loop
        self._sight = sight
        self._on_verdict = on_verdict
        self._state = PaceState()
        self._workers: dict[int, WorkerProcess] = {}
        self._remote_ranks: RemoteRanks | None = None
        self._is_first_world = True
        self._round = 0  # timers of earlier generations are not for this one...
        self._starts = 0  # ... nor are questions
        self._may_ask_arrivals_at = 0.0
        self._arrivals_since: float | None = None  # of the latest question
        self._ahead_s: float | None = None

    def start(
        self,
        workers: Mapping[int, WorkerProcess],
        *,
        whole_job: bool,
        remote_ranks: RemoteRanks | None = None,
        is_first_world: bool = True,
    ) -> None:
        """Watches ``workers``, by global rank; ``whole_job`` if no rank is elsewhere, where others can be asked.

        In the first world, or where there are none, who is stopped before its first step may be on purpose, as for a
        debugger.
        """
        self.stop()
        self._is_first_world = is_first_world
        self._workers = {rank: worker for rank, worker in workers.items() if worker.page is not None}
        if len(self._workers) == len(workers):  # who cannot be seen would be taken to stand still
            self._remote_ranks = remote_ranks
            if remote_ranks is not None:
                remote_ranks.on_question = partial(self._asked, self._starts)
            self._state = replace(forget(self._state), whole_job=whole_job, asks_remote_ranks=remote_ranks is not None)
            self._ahead_s = min((self._sight.realtime_ahead() for _ in range(3)), key=lambda each: each[1])[0]
            self._look_at(self._sight.monotonic())

    def look_now(self) -> None:
        """Looks once more, before something is done about what was seen; the next looks follow from that."""
        if self._workers:
            self._round += 1
            self._look(has_heard=True)

    def stop(self) -> None:
        """Looks no more."""
        self._round += 1
        self._starts += 1
        self._workers = {}
        self._remote_ranks = None

    def _look_at(self, at: float) -> None:
        this_round = self._round
        self._loop.call_at(at, lambda: self._look() if this_round == self._round else None)

    def _look_once_heard(self) -> None:
        this_round = self._round
        self._loop.call_soon(lambda: self._look(has_heard=True) if this_round == self._round else None)

    def _look(self, *, has_heard: bool = False) -> None:
        was_late = needs_evidence(self._state)
        if was_late and not has_heard and any(map(_is_unread, self._workers.values())):
            self._look_once_heard()  # on a loaded host an answer may be there that this process did not come to read
            return
        seen = self._seen(is_late=was_late)
        if not seen:
            return  # all have ended, or a script overwrote its page: there is nothing left to go by
        remote_ranks: tuple[RemoteRank, ...] = ()
        if self._remote_ranks is not None and needs_remote_ranks(self._state):
            remote_ranks = self._remote_ranks.ranks(seen, self._state.policy)
        self._state, verdicts = observe(
            self._state, Sample(at=self._sight.monotonic(), ranks=seen, remote_ranks=remote_ranks)
        )
        if needs_evidence(self._state):
            self._ask_workers(was_late=was_late)
        if self._remote_ranks is not None and needs_remote_ranks(self._state):
            self._remote_ranks.wish()
        self._ask_arrivals()
        self._look_at(next_look_at(self._state))
        for verdict in verdicts:
            self._on_verdict(verdict)

    def _seen(self, *, is_late: bool) -> tuple[RankSample, ...]:
        """Those who have not ended; nothing if one of them cannot be seen."""
        living = {rank: worker for rank, worker in self._workers.items() if worker.returncode is None}
        ranks = [self._sample(rank, worker, is_late=is_late) for rank, worker in living.items()]
        if needs_arrivals(self._state):
            ahead_s = self._realtime_ahead_s()
            ranks = [rank and _with_arrivals(rank, living[rank.rank], ahead_s) for rank in ranks]
        return () if None in ranks else tuple(rank for rank in ranks if rank is not None)

    def _sample(self, rank: int, worker: WorkerProcess, *, is_late: bool) -> RankSample | None:
        """Return what is seen of a rank; of one that is long without a step also whether it is stopped, late or not.

        In the first world it may take as long as it likes for the first step.
        """
        reading = worker.reading()
        if reading is None:
            return None
        now = self._sight.monotonic()
        since = max(reading.at or (now if self._is_first_world else 0.0), reading.phase_since or 0.0)
        is_unlikely = not is_late and now - since >= self._state.policy.stopped_s
        seen = RankSample(
            rank=rank,
            step=reading.step,
            step_at=reading.at,
            step_time_s=reading.step_time_s,
            phase=reading.phase,
            phase_since=reading.phase_since,
            phase_limit_s=worker.phase_limits_s.get(reading.phase),
            cpu_time_s=self._sight.cpu_time_s(worker.pid),
            stopped=is_unlikely and self._sight.state(worker.pid) == "T",
        )
        doing = self._sight.activity(worker.pid) if is_late else None
        if doing is None:
            return seen
        where = worker.whereabouts
        owes = is_silent(worker, reading, now)
        answers = owes and (doing.answering or _is_unread(worker))  # on a loaded host, where that waits for a CPU
        return replace(
            seen,
            stopped=doing.stopped,
            runnable=doing.runnable or answers,
            in_io=doing.in_io,
            silent=owes and not answers,
            person=_person(worker),
            collective=where.begun(now),
            waiting=where.is_waiting(now),
            uses_gpu=where.uses_gpu,
            groups=() if where.is_silent(now) else where.groups,
        )

    def _realtime_ahead_s(self) -> float | None:
        """How far CLOCK_REALTIME, by which torch dates collectives, is ahead of ours; None once it was set anew."""
        found = min((self._sight.realtime_ahead() for _ in range(3)), key=lambda each: each[1])[0]
        if self._ahead_s is None or abs(found - self._ahead_s) > _CLOCK_STEP_S:
            return None
        return self._ahead_s

    def _ask_workers(self, *, was_late: bool) -> None:
        for worker in self._workers.values():
            if not was_late:
                worker.whereabouts = worker.whereabouts.forgotten()
            worker.ask_whereabouts()

    def _ask_arrivals(self) -> None:
        now, since = self._sight.monotonic(), arrivals_since(self._state)
        if since is not None and (since != self._arrivals_since or now >= self._may_ask_arrivals_at):
            self._may_ask_arrivals_at = now + _ARRIVALS_PAUSE_S
            for worker in self._workers.values():
                worker.ask_arrivals()
        self._arrivals_since = since

    def _asked(self, starts: int, question: int) -> None:
        """Another agent, or this one, asks all where their workers are; called from another thread."""

        def ask() -> None:
            if starts == self._starts:
                self._ask_workers(was_late=needs_evidence(self._state))
                self._loop.call_at(self._sight.monotonic() + _ANSWERS_S, heard)

        def heard() -> None:
            self._loop.call_soon(answer)  # what has come by now is read first

        def answer() -> None:
            if starts == self._starts and self._remote_ranks is not None and (seen := self._seen(is_late=True)):
                self._remote_ranks.answer(question, seen)

        self._loop.call_soon(ask)


def is_silent(worker: WorkerProcess, reading: PulseReading, at: float) -> bool:
    """Whether a worker should have answered by now: it does from its first step on, unless it closed the channel."""
    # One thread of it answers, and when it has begun its collectives takes longer to say.
    can_answer = reading.step > 0 and worker.control is not None and not worker.owes_arrivals
    return can_answer and worker.whereabouts.is_silent(at)


def _person(worker: WorkerProcess) -> str:
    """At what of the worker's a person is; "" if it waits for nobody who types."""
    if worker.whereabouts.is_at_prompt:
        return "debugger"
    return "terminal" if reads_terminal(worker.pid) else ""


def _is_unread(worker: WorkerProcess) -> bool:
    """Whether it has said something that was not read yet."""
    if worker.control is None:
        return False
    waiting = select.poll()
    waiting.register(worker.control.fileno(), select.POLLIN)
    return bool(waiting.poll(0))


def _with_arrivals(rank: RankSample, worker: WorkerProcess, ahead_s: float | None) -> RankSample:
    beats = None
    if worker.page is not None and worker.arrivals is not None and ahead_s is not None:
        first, at_s = worker.page.beats()
        beats = Beats(first=first, at_s=tuple(at + ahead_s for at in at_s))
    return replace(rank, arrivals=worker.arrivals, beats=beats)
