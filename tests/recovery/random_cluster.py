"""A whole job, simulated: every node runs the real decisions, all else is time, chance and one store.

A ``Cluster`` is one seeded schedule. Its nodes decide by ``recovery.machine.handle`` and ``rendezvous.membership``;
what the launcher and the rendezvous handler do with that is imitated here, call for call. Time is a number, seconds.
What an invariant finds is a ``Violation``, which names the node, the time and the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from random_cluster_node import Node
from random_cluster_store import EtcdStore, Executor, RoundStore

from unicron_elastic.membership.rounds import Round, Settings
from unicron_elastic.recovery.policy import Policy

__all__ = ["Cluster", "Executor", "Violation"]


class Violation(AssertionError):
    """An invariant does not hold."""


class Cluster:
    """One job with its nodes, and the time."""

    def __init__(self, seed: int, settings: Settings, policy: Policy, workers: int, executor: Executor) -> None:
        self.seed, self.settings, self.policy, self.workers = seed, settings, policy, workers
        self.executor = executor
        self.chance = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.serial = 0
        self.store = EtcdStore(self)
        self.nodes: list[Node] = []
        self.round_stores: dict[int, RoundStore] = {}
        self.faults = 0  # that may cost a restart
        self.faults_before: dict[int, int] = {}  # each round was written
        self.counts: dict[int, int] = {}  # restarts that the nodes of a round agreed on
        self.newest_step = 0  # the greatest round that has trained
        self.is_ending = False
        self.on_round: Callable[[], None] = lambda: None  # a round was written
        self.story: list[str] = []

    def at(self, time: float, do: Callable[..., object], *args: Any) -> None:
        self.serial += 1
        heapq.heappush(self.queue, (time, self.serial, do, args))

    def after(self, least: float, most: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self.now + self.chance.uniform(least, most), do, *args)

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, do, args = heapq.heappop(self.queue)
            do(*args)
        self.now = until

    def say(self, who: str, what: str) -> None:
        self.story.append(f"{self.now:8.2f} {who:6} {what}")

    def fail(self, who: str, what: str) -> None:
        last = "\n".join(self.story[-60:])
        raise Violation(f"seed {self.seed}, at {self.now:.2f} s, {who}: {what}\n{last}")

    def start(self, host: str) -> Node:
        node = Node(self, f"{host}/{len(self.nodes)}", host)
        self.nodes.append(node)
        node.begin()
        return node

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.is_up]

    def of_round(self, number: int) -> list[Node]:
        """The nodes of a round that run its workers."""
        return [n for n in self.nodes if n.is_up and n.round is not None and n.round.number == number and n.has_workers]

    # -- invariants ------------------------------------------------------------------------------------------------

    def check_round(self, before: Round | None, found: Round) -> None:
        size, ids = len(found.places), [place.node_id for place in found.places]
        if not self.settings.min_nodes <= size <= self.settings.most or len(set(ids)) != size:
            self.fail("store", f"round {found.number} has {size} nodes: {ids}.")
        for rank, place in enumerate(before.places if before else ()):
            if rank < size and place.node_id in ids and ids[rank] != place.node_id:
                self.fail(place.node_id, f"had rank {rank}, and loses it in round {found.number}: {ids}.")
        if before is not None and found.number != before.number + 1:
            self.fail("store", f"round {found.number} comes after round {before.number}.")
        self.say("store", f"round {found.number}: {' '.join(ids)}")
        self.store.rounds.append(found)
        self.faults_before[found.number] = self.faults
        self.on_round()

    def most_restarts(self, number: float = float("inf")) -> int:
        """How many a round of this number may count, as far as is known now."""
        trained = max((each for each in self.counts if each < number), default=0)
        faults = self.faults - self.faults_before.get(trained - 1, 0)
        return max(self.counts.values(), default=0) + min(1, faults)

    def check_steps(self, found: Round) -> None:
        """Called when a node's workers have started: from now on all nodes of ``found`` may step."""
        if not self.is_live(found):
            return
        if found.number < self.newest_step:
            self.fail("round", f"{found.number} makes a step after round {self.newest_step} did.")
        for other in self.store.rounds:
            if other.number < found.number and self.is_live(other):
                self.fail("round", f"{found.number} trains while round {other.number} still does.")
        self.newest_step = found.number
        self.say("round", f"{found.number} trains")
        for node in self.of_round(found.number):
            self.after(0.05, 1.0, node.steps, found.number)

    def is_live(self, found: Round) -> bool:
        here = {node.id for node in self.of_round(found.number) if node.all_run}
        return all(place.node_id in here for place in found.places)

    def why_not_settled(self) -> str:
        """What is still waited for; "": the job trains with all who live, is over, or has too few nodes."""
        alive = self.alive
        if len(alive) < self.settings.min_nodes:
            return ""
        newest = self.store.rounds[-1] if self.store.rounds else None
        if newest is None or not self.is_live(newest):
            return "no round trains"
        there = min(len(alive), self.settings.most)
        return "" if len(newest.places) == there else f"{len(newest.places)} nodes train, and {there} could"
