"""No loop starts processes without limit, whatever happens, and people hear how often and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from jobs_in_place import InPlace
from scenario import GLOO_CLOSED, KILLED, TERMINATED, Job, none, only

from unicron_elastic.base.world import Member
from unicron_elastic.recovery.commands import (
    AskToLeave,
    Command,
    FailJob,
    LeaveJob,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    Tell,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    Event,
    LeaveAnswered,
    MembershipChanged,
    NodeRecalled,
    NodesDepart,
    NodesSilent,
    OtherNodesLost,
    PeerFailed,
    TakenForLost,
    WorkerReplaced,
    WorkersStarted,
    WorldChanged,
)
from unicron_elastic.recovery.state import Phase
from unicron_elastic.recovery.storms import AT_ONCE, FRUITLESS_MAX, WINDOW_S

ELSEWHERE = Member(name="0.0#z", node="n2#z", local_rank=0)
A_MINUTE_MAX = 12  # starts of one worker, beside restarts of all that count


class Stormy(InPlace):
    """A job whose agent does what it is told at once, and whose time goes on by wake-ups."""

    def __init__(self, workers: int = 2, *, is_alone: bool = False, entered: bool = True, **policy: Any) -> None:
        self.starts: list[tuple[float, int]] = []  # when which worker was started
        self.counted = 0
        elsewhere = () if is_alone else (ELSEWHERE,)
        super().__init__(
            workers, elsewhere=elsewhere, entered=entered, **{"max_restarts": 3, "same_failure_limit": 0, **policy}
        )

    def feed(self, event: Event) -> list[Command]:
        if isinstance(event, WorkersStarted):
            self.starts += [(event.at, worker.local_rank) for worker in event.workers]
        if isinstance(event, WorkerReplaced):
            self.starts.append((event.at, event.worker.local_rank))
        before = self.state.restarts_used
        commands = super().feed(event)
        self.counted += sum(isinstance(c, StartWorkers) and c.restarts_used > before for c in commands)
        return commands

    def begins(self, *, do_enter: bool = True) -> None:
        """All workers are started, if that was asked for."""
        if self.state.phase is Phase.IDLE and self.state.start is None:
            self.start(self.started()[-1].restarts_used, why_stay="")
            for local_rank in range(self.workers if do_enter else 0):
                self.entered(local_rank)

    def most_in_a_minute(self) -> int:
        """Starts of one worker."""
        return max(
            sum(at <= other < at + WINDOW_S for other, who in self.starts if who == local_rank)
            for at, local_rank in self.starts
        )

    def left_out(self) -> list[Command]:
        """The others go on without this node's members."""
        world = self.state.world
        lost = [] if world is None else [each.name for each in world.members if each.node == self.state.node]
        if world is None or not lost or len(lost) == world.size:
            return []
        without = world.after(store="h:2", reason="they are lost", lost=lost)
        return self.feed(WorldChanged(at=self._at(None), world=without, generation=self.state.generation))

    def ends(self) -> None:
        """Those who were told to end do."""
        for worker in self.state.running:
            if worker.told_to_stop_at is not None or worker.is_lost:
                self.exited(worker.local_rank, KILLED if worker.was_killed else TERMINATED)

    def next_wake(self) -> list[Command]:
        """The next of the wake-ups that were asked for comes."""
        wakes = [command.at for command in self.log if isinstance(command, WakeAt) and command.at > self.now]
        return self.time(min(wakes)) if wakes else []

    def fails_on_its_way(self, local_rank: int = 1) -> list[Command]:
        """A process that was started in the place of another is killed."""
        while not only_or_none(self.next_wake(), ReplaceWorker):
            assert self.state.phase is Phase.RUNNING
        return self.exited(local_rank, KILLED)


def only_or_none(commands: Iterable[Command], kind: type) -> bool:
    return any(isinstance(command, kind) for command in commands)


def fails_until_it_is_enough(job: Stormy) -> list[Command]:
    commands = job.exited(1, KILLED)
    for _ in range(FRUITLESS_MAX - 1):
        assert none(commands, StopWorkers, FailJob)
        commands = job.fails_on_its_way()
    return commands


def test_the_first_come_at_once_and_each_further_one_later_than_the_one_before() -> None:
    job = Stormy(is_alone=True, max_restarts=100)
    job.exited(1, KILLED)
    for _ in range(FRUITLESS_MAX - 2):
        job.fails_on_its_way()
    own = [at for at, local_rank in job.starts if local_rank == 1]
    gaps = [round(after - before) for before, after in pairwise(own)]
    assert gaps == [0] * (AT_ONCE - 1) + [1, 2, 4, 8]
    said = [command.reason for command in job.log if isinstance(command, Tell) and "restarts in" in command.reason]
    assert said[0] == f"rank 5 restarts in 1 s, after {AT_ONCE} starts within 60 s."


def test_the_others_of_its_node_train_on_without_it_when_it_is_enough() -> None:
    job = Stormy(is_alone=True, max_restarts=1)
    told = fails_until_it_is_enough(job)
    said = [command.reason for command in told if isinstance(command, Tell)][-1]
    assert said.startswith(f"rank 5 was started {FRUITLESS_MAX} times within ")
    assert "and never made a step. The last time rank 5 was killed by signal 9 (SIGKILL)." in said
    assert said.endswith("1 rank trains on: rank 5 is not replaced any more.")
    assert job.records()[-1].decision == "1 rank trains on: rank 5 is not replaced any more."
    assert job.state.restarts_used == 1
    assert none(job.time(job.now + 3600.0), ReplaceWorker)
    assert none(job.log, StopWorkers, FailJob)


def test_a_node_that_can_be_spared_leaves_and_the_others_go_on_in_place() -> None:
    job = Stormy(max_restarts=20, isolate_after=0)
    asks = only(fails_until_it_is_enough(job), AskToLeave)
    assert asks.is_departure
    assert asks.reason.startswith(f"Node n1 leaves the job: rank 5 was started {FRUITLESS_MAX} times within ")
    job.may_leave()
    assert job.records()[-1].action == "isolate"
    job.left_out()
    assert only(job.terminated(0), LeaveJob).quarantine_s == 3600.0
    assert none(job.log, TellPeers, FailJob)


def test_where_one_that_cannot_be_spared_has_others_that_train_they_do_so_without_it() -> None:
    job = Stormy(max_restarts=20, isolate_after=0)
    fails_until_it_is_enough(job)
    told = job.may_leave("the job needs all 2 of its nodes.")
    assert none(told, StopWorkers, TellPeers)
    assert job.records()[-1].decision == "2 ranks train on: rank 5 is not replaced any more."


def test_one_that_cannot_be_spared_and_where_nobody_trains_begins_again_with_all_others() -> None:
    job = Stormy(1, max_restarts=20, isolate_after=0)
    job.exited(0, KILLED)
    for _ in range(FRUITLESS_MAX - 1):
        job.fails_on_its_way(0)
    told = job.may_leave("the job needs all 2 of its nodes.")
    only(told, TellPeers)
    assert only(told, StartWorkers).restarts_used == 2
    assert [record.number for record in job.records()] == sorted(record.number for record in job.records())


def test_a_step_shows_that_it_was_not_in_vain() -> None:
    job = Stormy(is_alone=True, max_restarts=100)
    job.exited(1, KILLED)
    for _ in range(3 * FRUITLESS_MAX):
        while not only_or_none(job.next_wake(), ReplaceWorker):
            pass
        job.entered(1)
        job.fetched(1)
        job.went_on(1)
        assert none(job.exited(1, KILLED), StopWorkers)
    assert job.most_in_a_minute() <= A_MINUTE_MAX


def test_a_node_that_is_taken_for_lost_again_and_again_leaves() -> None:
    job = Stormy(1)
    for _ in range(FRUITLESS_MAX):
        job.left_out()
        last = job.exited(0, KILLED)
        while job.state.start is not None:
            job.next_wake()
        job.begins()
    assert only(last, LeaveJob).reason.endswith("This node leaves the job.")
    assert job.most_in_a_minute() <= A_MINUTE_MAX
    assert none(job.log, FailJob, TellPeers)


def test_workers_go_on_for_a_while_before_they_begin_again_for_the_next_of_many_nodes() -> None:
    job = Job()
    job.start()
    for _ in range(AT_ONCE - 1):
        only(job.nodes_wait(), StopWorkers)
        job.terminated(0, 1)
        job.start()
    put_off = job.nodes_wait()
    assert (
        only(put_off, Tell).reason
        == f"1 node waits to join: the workers go on for 1 s, after {AT_ONCE} starts within 60 s."
    )
    assert none(put_off, StopWorkers)
    assert only(job.time(only(put_off, WakeAt).at), StopWorkers).local_ranks == (0, 1)


LOCAL = st.integers(0, 2)
HAPPENINGS = st.one_of(
    st.tuples(st.just("exited"), LOCAL, st.sampled_from([0, 1, KILLED, KILLED])),
    st.tuples(st.just("raised"), LOCAL, st.sampled_from(["bad", GLOO_CLOSED])),
    st.tuples(st.sampled_from(["entered", "fetched", "went_on", "parted", "broke", "stepped"]), LOCAL),
    st.tuples(st.sampled_from(["joins", "departs", "lost", "silent", "taken", "may", "may not", "peer", "recalled"])),
    st.tuples(st.sampled_from(["left_out", "left_out", "ends", "ends", "next_wake", "next_wake", "next_wake"])),
)


OF_OTHERS: dict[str, Callable[[float, int], Event]] = {
    "joins": lambda at, of: MembershipChanged(at=at, nodes_waiting=1, generation=of),
    "departs": lambda at, of: NodesDepart(at=at, nodes=("n2",), reason="n2 departs.", generation=of),
    "lost": lambda at, of: OtherNodesLost(at=at, nodes=("n2",), reason="n2 is lost.", generation=of),
    "silent": lambda at, of: NodesSilent(at=at, nodes=("n2",), generation=of),
    "taken": lambda at, of: TakenForLost(at=at, reason="n1 was lost.", generation=of),
    "peer": lambda at, of: PeerFailed(at=at, reason="n2 has failed.", generation=of),
    "recalled": lambda at, _: NodeRecalled(at=at, reason="n1 is recalled.", why_stay="it must."),
    "may": lambda at, _: LeaveAnswered(at=at, why_not=""),
    "may not": lambda at, _: LeaveAnswered(at=at, why_not="it must."),
}


def _happen(job: Stormy, happening: tuple[Any, ...]) -> None:
    name, *more = happening
    if name in OF_OTHERS:
        job.feed(OF_OTHERS[name](job._at(None), job.state.generation))
    elif name == "raised":
        job.raised(*more, kind="RuntimeError", step=3)
    else:
        getattr(job, name)(*more)


@given(st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 4), st.lists(HAPPENINGS, max_size=25))
@example(1, False, True, 3, [("left_out",), ("ends",)])
@example(1, False, True, 3, [("stepped", 0), ("left_out",), ("ends",)])
@example(1, False, False, 3, [("stepped", 0), ("joins",), ("next_wake",), ("ends",)])
@example(2, True, True, 4, [("exited", 1, KILLED), ("next_wake",)])
@example(2, False, True, 4, [("parted", 0), ("exited", 1, KILLED), ("entered", 0), ("next_wake",)])
def test_whatever_comes_again_and_again_few_processes_are_started_in_a_minute(
    workers: int, is_alone: bool, do_enter: bool, max_restarts: int, happenings: list[tuple[Any, ...]]
) -> None:
    """The same happenings, over and over, with nothing but their own time between them."""
    job = Stormy(workers, is_alone=is_alone, entered=do_enter, max_restarts=max_restarts)
    for _ in range(60):
        for happening in happenings:
            job.begins(do_enter=do_enter)
            if job.state.phase is Phase.IDLE:
                job.next_wake()
            elif job.state.phase is not Phase.FINISHED:
                _happen(job, happening)
    assert job.counted <= max_restarts
    assert job.most_in_a_minute() <= A_MINUTE_MAX + max_restarts
    reasons = [command.reason for command in job.log if isinstance(command, Tell | StartWorkers | ReplaceWorker)]
    assert all(reason.endswith(".") for reason in reasons)
