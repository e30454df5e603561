"""What a process learns of its part in the job from its agent's words."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from unicron_elastic.base.world import Member, World
from unicron_elastic.training.group.membership import AgentMembership
from unicron_elastic.worker.instructions import (
    BePatient,
    FreeToStop,
    Instruction,
    Invitation,
    MakeSnapshot,
    NewWorld,
    SnapshotOffers,
)
from unicron_elastic.worker.notices import Broke, Entered, Left, Notice, Ready, Saving, SnapshotsWanted
from unicron_elastic.worker.worlds import Link

FIRST = World(number=1, members=(Member(name="1.0#n", node="n", local_rank=0),), store="h:1")
BEFORE, WORLD = (NewWorld(world=replace(FIRST, number=number), name="1.0#n") for number in (1, 2))
INVITATION = Invitation(sources=(), key="00")
PATIENCE = BePatient(patience_s=30.0)


class Agent:
    """Answers at once, and with more than one word: the process that waits may wake after the last of them."""

    def __init__(self, *words: Instruction) -> None:
        self.words = words
        self.heard: list[Notice] = []
        self.link = Link(self, lambda: None)  # type: ignore[arg-type]

    def send(self, said: Notice) -> None:
        self.heard.append(said)
        for word in self.words:
            self.link.heard(word)


def test_who_is_invited_and_in_a_world_at_once_is_a_newcomer() -> None:
    agent = Agent(INVITATION, WORLD)
    membership = AgentMembership(agent.link)
    assert membership.enter() == INVITATION
    membership.is_ready(0)  # the agent tells of the world once more
    assert agent.heard == [Entered(), Ready(state=0)]


def test_who_is_in_the_first_world_is_none() -> None:
    assert AgentMembership(Agent(WORLD).link).enter() is None


@pytest.mark.parametrize("will_save", [True, False, None])
def test_who_is_to_save_answers_whether_it_will(will_save: bool | None) -> None:
    agent = Agent()
    if will_save is not None:
        agent.link.on_save = lambda: will_save
    agent.link.heard(MakeSnapshot())
    assert agent.heard == [Saving(will_save=bool(will_save))]


class SlowAgent(Agent):
    """Answers one question when it has agreed with the others, for longer than workers wait by themselves."""

    def __init__(self, question: type[Notice], *words: Instruction) -> None:
        super().__init__(*words)
        self._question = question
        self._timer = threading.Timer(0.6, lambda: self.link.heard(WORLD))

    def send(self, said: Notice) -> None:
        """Hears the question."""
        if isinstance(said, self._question):
            self._timer.start()
        else:
            self.link.heard(INVITATION)


def _enter(membership: AgentMembership) -> None:
    membership.enter()


def _be_ready(membership: AgentMembership) -> None:
    membership.enter()
    membership.is_ready(0)


def _break(membership: AgentMembership) -> None:
    membership._link.heard(BEFORE)
    membership._world = membership._link.adopt()
    membership.broke(RuntimeError("a peer is gone"))


def _wait_without_a_newcomer(membership: AgentMembership) -> None:
    membership._link.heard(BEFORE)
    membership._world = membership._link.adopt()
    membership.tell(Left())
    if not membership.wait_for_agreed(0.1):
        raise TimeoutError


@pytest.mark.parametrize(
    ("question", "wait"),
    [(Entered, _enter), (Ready, _be_ready), (Broke, _break), (Left, _wait_without_a_newcomer)],
)
@pytest.mark.parametrize("is_told", [True, False])
def test_workers_wait_as_long_as_the_agent_does(
    question: type[Notice], wait: Callable[[AgentMembership], None], is_told: bool
) -> None:
    agent = SlowAgent(question)
    if is_told:
        agent.link.heard(PATIENCE)
    membership = AgentMembership(agent.link, answer_timeout_s=0.1, next_world_timeout_s=0.1)
    if is_told:
        wait(membership)
    else:
        with pytest.raises((TimeoutError, RuntimeError)):
            wait(membership)


class StoppingAgent(Agent):
    """`StoppingAgent` has a worker stop that has said something, or waits."""

    def __init__(self, *words: Instruction, is_late: bool) -> None:
        super().__init__(*words)
        self._timer = threading.Timer(0.1, lambda: self.link.heard(FreeToStop(reason="all begin again")))
        self._is_late = is_late

    def send(self, said: Notice) -> None:
        """Hear the worker, which waits by then, or does not yet."""
        super().send(said)
        self._timer.start()
        if not self._is_late:
            self._timer.join()


@pytest.mark.parametrize("wait", [_enter, _break, _wait_without_a_newcomer])
@pytest.mark.parametrize("is_late", [True, False])
def test_who_is_to_stop_waits_for_nobody(wait: Callable[[AgentMembership], None], *, is_late: bool) -> None:
    agent = StoppingAgent(PATIENCE, is_late=is_late)
    with pytest.raises(RuntimeError, match="this rank waits for the others no longer: all begin again"):
        wait(AgentMembership(agent.link))


def test_who_is_to_stop_and_waits_for_nobody_goes_on() -> None:
    link = Agent().link
    link.heard(WORLD)
    link.heard(FreeToStop(reason="all begin again"))
    assert link.newer_than(0) == (WORLD.world, 0)
    assert not link.is_left()


def test_an_agent_tells_its_patience_while_it_is_waited_for() -> None:
    agent = SlowAgent(Entered)
    threading.Timer(0.05, lambda: agent.link.heard(PATIENCE)).start()
    AgentMembership(agent.link, answer_timeout_s=0.3).enter()


def test_files_that_nobody_has_taken_are_closed_when_others_come() -> None:
    agent = Agent()
    (_, first), (_, second) = os.pipe(), os.pipe()
    agent.link.heard(SnapshotOffers(fds=(first,)))
    agent.words = (SnapshotOffers(fds=(second,)),)
    answer = agent.link.ask(SnapshotsWanted(rank=0, world_size=1), (SnapshotOffers,), 1.0)
    assert answer.fds == (second,)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    os.fstat(second)
