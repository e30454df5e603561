"""A replica of several processes of a node is in each world whole, or not there at all."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jobs_in_place import ELSEWHERE, InPlace, LateNode
from scenario import CRASHED, GLOO_CLOSED, KILLED, none, only

from unicron_elastic.base.world import World
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    KillWorkers,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    Tell,
    WakeAt,
)
from unicron_elastic.recovery.events import Event, StartedWorker, TimePassed, WorkerReplaced
from unicron_elastic.recovery.replica_mates import CAUSE_GRACE_S
from unicron_elastic.recovery.state import Part, Phase
from unicron_elastic.recovery.storms import FRUITLESS_MAX
from unicron_elastic.recovery.worker_loss import BREAK_GRACE_S, REPLACE_AFTER_S

LOCAL = st.integers(0, 5)
HAPPENINGS = st.one_of(
    st.tuples(st.just("exited"), LOCAL, st.sampled_from([0, 1, KILLED, KILLED, CRASHED])),
    st.tuples(st.just("raised"), LOCAL, st.sampled_from(["bad", GLOO_CLOSED])),
    st.tuples(
        st.sampled_from(
            ["entered", "entered", "fetched", "fetched", "went_on", "left", "parted", "broke", "hung", "evidence"]
        ),
        LOCAL,
    ),
    st.tuples(st.just("parted"), LOCAL, st.just(1)),
    st.tuples(st.just("later"), st.sampled_from([0.0, BREAK_GRACE_S, REPLACE_AFTER_S, 6.0, 400.0])),
    st.tuples(st.just("all enter"), st.just(0)),
    st.tuples(st.just("all fetch"), st.just(0)),
    st.tuples(st.just("written"), st.just(0)),
    st.tuples(st.just("departs"), st.just("n2")),
    st.tuples(st.just("loses"), st.just("n2")),
)


class Whole(InPlace):
    """`Whole` is a job that looks after each event whether replicas are whole in its worlds, and in what it wants."""

    def feed(self, event: Event) -> list[Command]:
        commands = super().feed(event)
        for command in commands:
            if isinstance(command, ChangeWorld):
                self._check_joined(command)
        self._check(self.state.world)
        return commands

    def _check(self, world: World | None) -> None:
        members = [] if world is None else [each for each in world.members if each.node == self.state.node]
        of_replica = Counter(self.replica(each.local_rank) for each in members)
        # Who has left may still be there when it comes again, as no world is without anybody.
        assert all(count % self.replica_size == 0 for count in of_replica.values()), world

    def _check_joined(self, command: ChangeWorld) -> None:
        local_ranks = sorted(each.local_rank for each in command.joined if each.node == self.state.node)
        assert len({self.replica(each) for each in local_ranks}) * self.replica_size == len(local_ranks), command

    def replica(self, local_rank: int) -> int:
        return local_rank // self.replica_size

    def happen(self, happening: tuple[Any, ...]) -> None:
        if self.state.phase is Phase.IDLE:
            if not self.started():
                return
            if self.state.start is not None:  # it is put off, as there were many
                self.later(60.0)
            self.start(self.started()[-1].restarts_used)
            self.wanted = []
            self.all("entered")
        name, first, *more = happening
        if name == "left" and self.state.world is None:
            return  # nobody leaves what is not there
        if name == "raised":
            self.raised(first % self.workers, *more, kind="RuntimeError", step=3)
        elif name.startswith("all "):
            self.all({"all enter": "entered", "all fetch": "fetched"}[name])
        elif name == "written":
            if self.wanted and self.state.phase is Phase.RUNNING:
                self.written()
        elif isinstance(first, int) and name != "later":
            getattr(self, name)(first % self.workers, *more)
        else:
            getattr(self, name)(first, *more)

    def all(self, name: str) -> None:
        for local_rank in range(self.workers):
            getattr(self, name)(local_rank)

    def _change(self, command: ChangeWorld) -> list[Command]:
        """Do as an agent does: no world is without anybody, and what another has done is not done again."""
        world = self.state.world
        names = set() if world is None else {member.name for member in world.members}
        if names and not command.joined and names <= set(command.lost):
            return []
        return super()._change(command)


SIZES = st.sampled_from([(4, 2), (6, 3), (6, 2), (2, 2)])


@given(SIZES, st.booleans(), st.booleans(), st.lists(HAPPENINGS, max_size=40))
def test_whatever_happens_replicas_are_whole_in_each_world(
    sizes: tuple[int, int], is_alone: bool, holds: bool, happenings: list[tuple[Any, ...]]
) -> None:
    workers, size = sizes
    elsewhere = () if is_alone else ELSEWHERE
    job = Whole(workers, replica_size=size, elsewhere=elsewhere, max_restarts=50, same_failure_limit=0)
    job.holds = holds
    for happening in happenings:
        job.happen(happening)


@given(SIZES, st.booleans(), st.lists(HAPPENINGS, max_size=40))
def test_whatever_happens_on_a_late_node_replicas_are_whole_in_each_world(
    sizes: tuple[int, int], is_known: bool, happenings: list[tuple[Any, ...]]
) -> None:
    workers, size = sizes
    job = Whole(workers, replica_size=size, entered=False, holds=True, do_others_train=is_known, max_restarts=50)
    job.begun_elsewhere()
    for happening in happenings:
        job.happen(happening)


@given(SIZES, st.lists(HAPPENINGS, max_size=40))
@example((4, 2), [("raised", 0, GLOO_CLOSED), ("exited", 0, 0)])
def test_whoever_is_lost_is_replaced_with_all_of_its_replica(
    sizes: tuple[int, int], happenings: list[tuple[Any, ...]]
) -> None:
    workers, size = sizes
    job = Whole(workers, replica_size=size, max_restarts=50, same_failure_limit=0)
    for happening in happenings:
        job.happen(happening)
    # Nothing but the ends of those that were killed and the wake-ups that were asked for comes any more.
    for _ in range(3):
        for at in sorted({command.at for command in job.log if isinstance(command, WakeAt)}):
            job.now = max(job.now, at)
            job.feed(TimePassed(at=job.now))
        for worker in job.state.running:
            if worker.was_killed:
                job.exited(worker.local_rank, KILLED)
    state = job.state
    is_over = any(worker.part is Part.PARTED for worker in state.workers)
    if state.phase is Phase.RUNNING and any(worker.part is Part.MEMBER for worker in state.running) and not is_over:
        lost = [each for each in state.workers if each.part in (Part.LOST, Part.REPLACING) and not each.is_given_up]
        assert not lost


def with_newcomers() -> Whole:
    """A job of two replicas of two, of which one was lost and is started again."""
    job = Whole(4, replica_size=2)
    job.exited(3, KILLED)
    job.exited(2, KILLED)
    job.later(REPLACE_AFTER_S)
    return job


def test_a_loss_costs_one_restart_and_one_world() -> None:
    job = Whole(4, replica_size=2)
    commands = job.exited(3, KILLED)
    assert only(commands, ChangeWorld).lost == ("6.0#here", "7.0#here")
    assert only(commands, KillWorkers).local_ranks == (2,)
    assert none(job.exited(2, KILLED), ChangeWorld, RecordIncident, KillWorkers)
    assert job.state.restarts_used == 1
    assert len(job.state.attempts) == 1


def test_replicas_of_all_processes_of_a_node_leave_nobody_here() -> None:
    job = Whole(2, replica_size=2)
    job.exited(1, KILLED)
    assert job.state.phase is Phase.STOPPING  # all begin again
    assert job.state.restarts_used == 0
    assert only(job.terminated(0), StartWorkers).restarts_used == 1


def test_all_begin_again_as_of_one_process_each_until_they_say_more() -> None:
    job = Whole(4, replica_size=2)
    assert job.state.replica_size == 2
    job.peer_failed()
    job.terminated(0, 1, 2, 3)
    job.start(1)
    assert job.state.replica_size == 1


def test_members_of_a_world_that_another_node_has_made_stay_of_one_replica() -> None:
    job = Whole(4, replica_size=2, elsewhere=ELSEWHERE)
    job.others_agree(lost="0.0#z", joined="1.0#z")
    assert job.state.replica_size == 2
    assert only(job.exited(0, KILLED), ChangeWorld).lost == ("4.0#here", "5.0#here")


@pytest.mark.parametrize("loses", [True, False])
def test_nodes_that_go_take_whole_replicas_with_them(loses: bool) -> None:
    job = Whole(4, replica_size=2, elsewhere=ELSEWHERE)
    commands = job.loses("n2") if loses else job.departs("n2")
    assert only(commands, ChangeWorld).lost == ("0.0#z",)
    assert job.names() == ["4.0", "5.0", "6.0", "7.0"]
    assert none(commands, KillWorkers)


def test_a_late_node_is_taken_in_at_once() -> None:
    job = LateNode(4, replica_size=2)
    job.begun_elsewhere()
    assert [each.local_rank for each in only(job.entered(2), ChangeWorld).joined] == [0, 1, 2, 3]


def test_newcomers_are_lost_together_whatever_they_wait_for() -> None:
    for events in ([], ["entered"], ["entered", "fetched"]):
        job = with_newcomers()
        for event in events:
            getattr(job, event)(2)
        used = job.state.restarts_used
        assert only(job.exited(3, CRASHED), KillWorkers).local_ranks == (2,)
        assert none(job.later(REPLACE_AFTER_S), ReplaceWorker)  # one of them has not ended yet
        started = [each.local_rank for each in job.exited(2, KILLED) if isinstance(each, ReplaceWorker)]
        assert started == [2, 3]
        assert job.state.restarts_used == used


def test_who_is_ready_is_not_so_any_more_when_it_asks_again() -> None:
    job = with_newcomers()
    job.all("entered")
    job.fetched(2)
    job.entered(2)
    assert none(job.fetched(3), ChangeWorld)
    assert len(only(job.fetched(2), ChangeWorld).joined) == 2


def test_a_mate_that_is_lost_while_another_is_being_started_has_that_one_end() -> None:
    job = with_newcomers()
    job.exited(3, KILLED)
    job.exited(2, KILLED)
    pids = iter((1, 2))
    job._replace = lambda _command: []  # type: ignore[method-assign]
    job.later(REPLACE_AFTER_S)
    assert [job.part(2), job.part(3)] == [Part.REPLACING, Part.REPLACING]

    def replaced(local_rank: int) -> list[Command]:
        started = StartedWorker(local_rank=local_rank, rank=4 + local_rank, pid=next(pids))
        return job.feed(WorkerReplaced(at=job._at(None), worker=started, restarts_used=1, generation=1))

    replaced(2)
    job.exited(2, CRASHED)
    kills = only(replaced(3), KillWorkers)
    assert (kills.local_ranks, kills.reason) == ((3,), "rank 7 ends with rank 6, as a replica is all of its ranks.")
    commands = [*job.exited(3, KILLED), *job.later(REPLACE_AFTER_S)]
    assert [each.local_rank for each in commands if isinstance(each, ReplaceWorker)] == [2, 3]


def test_a_replica_that_never_comes_to_train_is_given_up_as_one() -> None:
    job = Whole(4, replica_size=2, isolate_after=0)
    for _ in range(FRUITLESS_MAX + 1):
        job.exited(3, KILLED)
        job.exited(2, KILLED)
        job.later(60.0)
    assert [worker.is_given_up for worker in job.state.workers] == [False, False, True, True]
    given_up = [each for each in job.log if isinstance(each, Tell) and "not replaced any more" in each.reason]
    assert len(given_up) == 1
    assert "ranks 6, 7 are not replaced any more." in given_up[0].reason


def test_what_mates_raise_is_told_below_the_death_that_explains_it() -> None:
    job = Whole(6, replica_size=3)
    for mate in (3, 4):
        assert none(job.raised(mate, GLOO_CLOSED, kind="RuntimeError"), ChangeWorld, RecordIncident)
    commands = job.exited(5, KILLED)
    incident = only(commands, RecordIncident).incident
    assert incident.reason == "rank 9 was killed by signal 9 (SIGKILL)."
    assert len(incident.consequences) == 2
    assert only(commands, KillWorkers).local_ranks == (3, 4)
    assert none(job.later(CAUSE_GRACE_S), KillWorkers, RecordIncident)
    assert job.state.restarts_used == 1


def test_where_others_cannot_go_on_nothing_is_waited_for() -> None:
    job = Whole(2, replica_size=2)
    job.raised(0, GLOO_CLOSED, kind="RuntimeError")
    assert job.state.phase is Phase.STOPPING


def test_a_mate_that_still_makes_its_last_step_is_not_asked_for_more_of_them() -> None:
    job = Whole(4, replica_size=2, elsewhere=ELSEWHERE)
    job.parted(3)
    job.others_agree(lost="0.0#z", joined="1.0#z")
    assert job.names() == ["4.0", "5.0", "1.0"]
    assert job.part(2) is Part.PARTED
    job.parted(2)
    assert none(job.exited(2), KillWorkers, RecordIncident)


def test_whose_mate_has_made_the_last_step_of_all_is_no_newcomer() -> None:
    job = with_newcomers()
    job.all("entered")
    job.fetched(2)
    job.fetched(3)
    job.parted(0, 2)  # before these came
    job.parted(1, 2)
    assert none(job.parted(3), KillWorkers)


@pytest.mark.parametrize("has_mate_ended", [True, False])
def test_a_replica_of_which_one_ends_as_it_is_taken_in_is_left_out_again(has_mate_ended: bool) -> None:
    job = with_newcomers()
    job.hold()
    job.all("entered")
    job.fetched(2)
    job.fetched(3)
    job.exited(3)
    if has_mate_ended:
        job.exited(2)
    left_out = only(job.written(), ChangeWorld)
    assert sorted(left_out.lost) == ["6.1#here", "7.1#here"]


def test_a_process_that_says_less_than_others_changes_nothing() -> None:
    job = with_newcomers()
    job.replica_size = 1
    job.entered(2)
    job.entered(3)
    job.fetched(2)
    assert len(only(job.fetched(3), ChangeWorld).joined) == 2
