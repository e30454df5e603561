"""Whole jobs under random faults: whatever happens, no two rounds train at once, and nobody waits for ever.

``UNICRON_SCHEDULES`` is how many schedules are played, ``UNICRON_SEED`` the only one to play, with its story.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from random_cluster import Cluster, Executor, Violation
from random_cluster_node import Node
from random_cluster_store import RECALLED

from unicron_elastic.membership import rounds as membership
from unicron_elastic.membership.rounds import Formed, JobView, NotYet, Settings
from unicron_elastic.recovery import commands, events, machine
from unicron_elastic.recovery.policy import Policy
from unicron_elastic.recovery.state import JobState

SCHEDULES = int(os.environ.get("UNICRON_SCHEDULES", "10000"))
SEED = os.environ.get("UNICRON_SEED")
BLOCKS = 10
FAULTS_END_S = 45.0
PATIENCE_S = 400.0  # an exit barrier takes 300 s of it
EXECUTOR = Executor()
FAULTS = (
    *("worker", "worker", "exception", "agent", "agent", "join", "etcd", "blind", "blind", "cut", "hang", "sick"),
    *("signal", "removed"),
)


class Schedule:
    """The faults of one seed."""

    def __init__(self, seed: int, executor: Executor = EXECUTOR, faults: Sequence[str] = FAULTS) -> None:
        self.faults = faults
        self.chance = chance = random.Random(seed)
        fewest = chance.choice((1, 1, 2, 2, 3))
        most = min(5, fewest + chance.randint(0, 3))
        target = chance.randint(fewest, most) if chance.random() < 0.2 else None
        patience_s = chance.choice((6.0, 12.0))
        settings = Settings(
            min_nodes=fewest, max_nodes=most, last_call_s=2.0, target_nodes=target, blind_patience_s=patience_s
        )
        policy = Policy(
            max_restarts=chance.choice((0, 1, 3, 100, 100)),
            stop_timeout_s=chance.choice((2.0, 10.0, 30.0)),
            isolate_after=chance.choice((0, 1, 3)),
            isolates=chance.random() < 0.8,
        )
        self.cluster = Cluster(seed, settings, policy, chance.choice((1, 1, 2)), executor)
        self.hosts = 0
        for _ in range(chance.randint(max(2, fewest), 5)):
            self._join(chance.choice((0.0, 1.0)))
        at = chance.choice((0.5, 3.0))
        for _ in range(chance.randint(1, 8)):
            at += chance.choice((0.0, 0.05, 0.5, 2.0, 8.0)) * chance.uniform(0.0, 2.0)
            self.cluster.at(min(at, FAULTS_END_S - 1.0), self._happen, chance.choice(faults))
        self.cluster.on_round = self._happen_while_meeting
        if chance.random() < 0.25:
            self.cluster.at(chance.uniform(5.0, FAULTS_END_S), self._finish)

    def play(self) -> None:
        """To the end of the faults, and until all is well. Raises Violation."""
        cluster, calm_at = self.cluster, FAULTS_END_S + 1.0
        cluster.run(calm_at)
        while why := cluster.why_not_settled():
            if cluster.now > calm_at + PATIENCE_S:
                cluster.fail("job", f"{why}, {PATIENCE_S:g} s after the last fault.")
            cluster.run(cluster.now + 2.0)
        cluster.run(cluster.now + 5.0)
        if why := cluster.why_not_settled():
            cluster.run(cluster.now + PATIENCE_S)
            if why := cluster.why_not_settled():
                cluster.fail("job", f"{why}, although it was well before.")

    def _join(self, within_s: float) -> None:
        self.hosts += 1
        self.cluster.after(0.0, within_s, self.cluster.start, f"h{self.hosts}")

    def _happen(self, what: str) -> None:
        cluster, chance = self.cluster, self.chance
        alive = cluster.alive
        node = chance.choice(alive) if alive else None
        if what == "join":
            if len(alive) < 6:
                self._join(0.1)
        elif what == "etcd":
            self._take_store_away(chance.choice((0.3, 2.0, 5.0, 20.0)))
        elif node is not None:
            self._happen_to(node, what)

    def _happen_while_meeting(self) -> None:
        if self.cluster.now < FAULTS_END_S - 2.0 and self.chance.random() < 0.3:
            soon = self.chance.choice((0.1, 0.8))
            self.cluster.after(0.0, soon, self._happen, self.chance.choice(self.faults))

    def _happen_to(self, node: Node, what: str) -> None:
        cluster, chance = self.cluster, self.chance
        local = chance.choice(list(node.running)) if node.running else None
        if what in ("worker", "exception", "hang") and (local is None or node.mode):
            return
        if what == "recall":
            cluster.store.commit({}, {f"{RECALLED}{node.host}": ("It is wanted elsewhere.", None)})
            return
        cluster.faults += 1
        cluster.say(node.id, f"fault: {what}")
        match what:
            case "sick":
                node.sickens()
            case "hang":
                node.worker_hangs(local or 0)
            case "worker":
                code = chance.choice((1, 1, -9, -9, -11, 93))
                node.worker_ends(local or 0, node.running[local or 0], code, chance.choice((None, 0, 60)))
            case "exception":
                node.worker_raises(local or 0, node.running[local or 0], "bad input")
            case _:
                self._happen_to_agent(node, what)

    def _happen_to_agent(self, node: Node, what: str) -> None:
        cluster, chance = self.cluster, self.chance
        match what:
            case "agent":
                node.die(is_silent=chance.random() < 0.3)
            case "signal":
                node.is_told_to_end()
            case "removed":
                node.is_removed()
            case "blind":
                self._cut(node, chance.choice((0.3, 2.0, 6.0, 15.0)))
            case "cut":  # some nodes together, and the others go on to see
                for_s, alive = chance.choice((6.0, 15.0, 25.0)), cluster.alive
                for each in chance.sample(alive, chance.randint(1, len(alive))):
                    self._cut(each, for_s)
        if not node.is_up and chance.random() < 0.7:
            cluster.after(0.1, 12.0, cluster.start, node.host)

    def _take_store_away(self, for_s: float) -> None:
        cluster = self.cluster
        if not cluster.store.is_away:
            cluster.say("store", "is away")
            cluster.store.is_away = True
            for node in cluster.alive:
                node.notice_blindness_later()
            cluster.at(min(cluster.now + for_s, FAULTS_END_S), self._bring_store_back)

    def _bring_store_back(self) -> None:
        cluster = self.cluster
        cluster.say("store", "is back")
        cluster.store.come_back()
        for node in cluster.alive:
            cluster.after(0.0, 0.5, node.regain_sight)

    def _cut(self, node: Node, for_s: float) -> None:
        if node.is_cut or not node.is_up:
            return
        node.is_cut = True
        node.lose_sight()
        if self.chance.random() < 0.3:  # cut off from the coordinator, too
            self.cluster.after(1.0, 3.0, node.is_removed)
        self.cluster.at(min(self.cluster.now + for_s, FAULTS_END_S), self._see_again, node)

    def _see_again(self, node: Node) -> None:
        self.cluster.say(node.id, "sees again")
        node.is_cut = False
        node.regain_sight()

    def _finish(self) -> None:
        """The training ends: all workers of the round do, each in its time."""
        cluster = self.cluster
        newest = cluster.store.rounds[-1] if cluster.store.rounds else None
        if newest is None or not cluster.is_live(newest):
            return
        cluster.say("job", "training ends")
        for node in cluster.of_round(newest.number):
            for local, pid in node.running.items():
                cluster.after(0.0, 0.5, node.worker_ends, local, pid, 0)


def play(seed: int, executor: Executor = EXECUTOR, faults: Sequence[str] = FAULTS) -> Cluster:
    schedule = Schedule(seed, executor, faults)
    schedule.play()
    return schedule.cluster


def seeds(block: int) -> range:
    if SEED is not None:
        return range(int(SEED), int(SEED) + 1) if block == 0 else range(0)
    size = -(-SCHEDULES // BLOCKS)
    return range(block * size, min(SCHEDULES, (block + 1) * size))


def violations(word: str, executor: Executor = EXECUTOR, faults: Sequence[str] = FAULTS, most: int = 2000) -> list[str]:
    """The first sentence of each violation, up to the first that has the word."""
    found: list[str] = []
    for seed in range(most):
        try:
            play(seed, executor, faults)
        except Violation as violation:
            found.append(str(violation).split("\n", 1)[0])
            if re.search(word, found[-1]):
                break
    return found


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=[pytest.mark.slow] if block % 4 else []) for block in range(BLOCKS)]
)
def test_whatever_happens_the_job_goes_on_or_ends_for_all(block: int) -> None:
    for seed in seeds(block):
        cluster = play(seed)
        if SEED is not None:
            print("\n".join(cluster.story))


@pytest.mark.parametrize("faults", [("recall", "recall", "join"), (*FAULTS, "recall", "recall", "recall")])
def test_nodes_that_are_recalled_leave_a_job_that_goes_on_and_counts_nothing(faults: Sequence[str]) -> None:
    played = [play(seed, EXECUTOR, faults) for seed in range(SCHEDULES // 20)]
    assert {"DepartWell", "recalled"} <= {node.ended for cluster in played for node in cluster.nodes}


def test_who_does_not_heed_that_a_node_departs_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "handle", deaf_to_departures)
    assert "were for faults" in violations("were for faults", EXECUTOR, ("recall", "join"))[-1]


def test_the_schedules_are_worth_playing() -> None:
    """Most have a regroup, and every way to end comes."""
    played = [play(seed) for seed in range(300)]
    assert sum(len(cluster.store.rounds) > 1 for cluster in played) > 150
    assert sum(len(cluster.store.rounds) > 3 for cluster in played) > 20
    ends = {node.ended.split(":")[0] for cluster in played for node in cluster.nodes}
    assert ends >= {"", "FinishJob", "FailJob", "LeaveJob", "closed", "died"}


def test_the_same_seed_is_the_same_story() -> None:
    assert play(7).story == play(7).story


# -- the invariants bite -----------------------------------------------------------------------------------------------


NEXT_ROUND, HANDLE, RANKED = membership.next_round, machine.handle, membership._ranked
Handled = tuple[JobState, list[commands.Command]]


def as_if_none_trained(view: JobView, settings: Settings, enough_for_s: float, _for_s: float) -> Formed | NotYet:
    return NEXT_ROUND(replace(view, members=view.waiting), settings, enough_for_s, math.inf)


def ranked_anew(_before: Any, chosen: Any) -> Any:
    return RANKED(None, sorted(chosen, key=lambda member: member.joined))


def deaf_to_peers(state: JobState, event: events.Event) -> Handled:
    return (state, []) if isinstance(event, events.PeerFailed) else HANDLE(state, event)


def deaf_to_departures(state: JobState, event: events.Event) -> Handled:
    return (state, []) if isinstance(event, events.NodesDepart) else HANDLE(state, event)


def forgetful(state: JobState, event: events.Event) -> Handled:
    """Of more than one restart it forgets all."""
    state, todo = HANDLE(state, event)
    is_many = state.restarts_used > 0
    return state, [
        replace(each, restarts_used=0) if is_many and isinstance(each, commands.StartWorkers) else each for each in todo
    ]


def wordless(state: JobState, event: events.Event) -> Handled:
    state, todo = HANDLE(state, event)
    return state, [replace(each, reason="") if isinstance(each, commands.StopWorkers) else each for each in todo]


def repetitive(state: JobState, event: events.Event) -> Handled:
    state, todo = HANDLE(state, event)
    return state, [each for each in todo for _ in range(1 + isinstance(each, commands.RecordIncident))]


@pytest.mark.parametrize(
    ("module", "name", "mutant", "word"),
    [
        (membership, "next_round", as_if_none_trained, "still does"),
        (JobView, "gone", (), "after the last fault"),
        (JobView, "lost", (), "after the last fault"),
        (membership, "may_train_unseen", lambda _view: False, "still does"),
        (membership, "nodes_waiting", lambda _view, _settings: 0, "nodes? train, and . could"),
        (membership, "_ranked", ranked_anew, "loses it"),
        (machine, "handle", deaf_to_peers, "after the last fault"),
        (machine, "handle", forgetful, "counts 0 restarts after"),
        (machine, "handle", wordless, "no sentence"),
        (machine, "handle", repetitive, "told again after its end"),
    ],
    ids=["trains", "gone", "lost", "unseen", "waiting", "ranks", "peers", "restarts", "reasons", "incidents"],
)
def test_a_wrong_decision_is_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mutant: Any, word: str
) -> None:
    monkeypatch.setattr(module, name, mutant)
    found = violations(word)
    assert found
    assert re.search(word, found[-1]), found


@pytest.mark.parametrize(
    ("executor", "faults", "word"),
    [
        (Executor(regroups_blindly=True), FAULTS, "after the last fault|need not"),
        (Executor(closes_on_leaving=True), FAULTS, "has neither finished nor failed"),
        (Executor(counts_newcomers=True), ("join",), "were for faults"),
        (Executor(newcomers_are_free=True), ("join",), "were for faults"),
        (Executor(says_once=True), ("blind", "etcd"), "after the last fault"),
        (Executor(misses_failures=True), ("blind", "worker", "agent"), "after the last fault"),
        (Executor(trains_on_blindly=True), FAULTS, "still does"),
        (Executor(waits_removed=True), ("removed", "join"), "after the last fault"),
        (Executor(proposes_late=True), FAULTS, "loses it in round"),
    ],
    ids=[
        "regroups",
        "closes",
        "counts",
        "free",
        "says",
        "failures",
        "blind",
        "removed",
        "late",
    ],
)
def test_what_carries_out_the_decisions_has_to_do_it_right(
    executor: Executor, faults: Sequence[str], word: str
) -> None:
    found = violations(word, executor, faults)
    assert found
    assert re.search(word, found[-1]), found


@pytest.mark.parametrize("late", ["notices_late", "looks_late", "counts_early"])
def test_who_waits_for_blind_nodes_has_to_wait_a_little_longer(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    monkeypatch.setattr(membership, "BLIND_MARGIN_S", 0.0)
    found = violations("still does", Executor(**{late: True}), ("blind", "cut"))
    assert found
    assert "still does" in found[-1]
