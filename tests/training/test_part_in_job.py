"""What a process learns of its part in the job from its agent's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicron_elastic.base.world import Member, World
from unicron_elastic.training.group.membership import AgentMembership
from unicron_elastic.worker.worlds import Link

WORLD = {
    "world": World(number=2, members=(Member(name="1.0#n", node="n", local_rank=0),), store="h:1").to_message(),
    "you": "1.0#n",
}
INVITATION = {"join": {"sources": [], "key": "00"}}


class Agent:
    """Answers at once, and with more than one word: the process that waits may wake after the last of them."""

    def __init__(self, *words: dict[str, Any]) -> None:
        self.words = words
        self.heard: list[dict[str, Any]] = []
        self.link = Link(self, lambda: None)  # type: ignore[arg-type]

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:  # noqa: ARG002
        self.heard.append(message)
        for word in self.words:
            assert self.link.heard(word)


def test_who_is_invited_and_in_a_world_at_once_is_a_newcomer() -> None:
    agent = Agent(INVITATION, WORLD)
    membership = AgentMembership(agent.link)
    assert membership.enter() == INVITATION["join"]
    membership.is_ready(0)  # the agent tells of the world once more
    assert [list(message) for message in agent.heard] == [["member"], ["ready"]]


def test_who_is_in_the_first_world_is_none() -> None:
    assert AgentMembership(Agent(WORLD).link).enter() is None
