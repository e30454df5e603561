"""What nodes tell each other of their ranks, and whom the detection names when the culprit is on another node."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import ASLEEP, BUSY, FOREVER, STOPPED, Job, Script, Trouble

from unicron_elastic.detection.evidence import suspects
from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.remote_ranks import (
    FRESH_S,
    GROUPS_MAX,
    RANKS_MAX,
    REPORT_BYTES_MAX,
    Heard,
    NodeReport,
    parse_report,
    report_text,
)
from unicron_elastic.detection.sample import GroupPosition, RankSample, RemoteRank, Sample
from unicron_elastic.detection.sentences import who
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Hung, Slow, Verdict, Waiting
from unicron_elastic.detection.watch import needs_evidence, needs_remote_ranks, next_look_at, observe
from unicron_elastic.faults import HangKind

POLICY = PacePolicy()
WORLD = GroupPosition(name="0", begun=12, ended=11, op="all_reduce")
SEEN = RankSample(
    rank=3,
    step=9,
    cpu_time_s=1.5,
    collective=12,
    waiting=True,
    runnable=False,
    in_io=None,
    groups=(WORLD, GroupPosition(name="tp", begun=3, ended=3)),
)
REPORT = NodeReport(asked=7, node="node-b", at=55.5, ranks=(SEEN,))
TOLD = json.loads(report_text(REPORT))


# -- the text --------------------------------------------------------------------------------------------------------


def test_what_is_told_is_what_is_read() -> None:
    assert parse_report(report_text(REPORT).encode()) == REPORT


def test_of_many_groups_the_first_are_told() -> None:
    groups = tuple(GroupPosition(name=str(number), begun=1, ended=None) for number in range(1000))
    text = report_text(replace(REPORT, ranks=(replace(SEEN, groups=groups),)))
    (read,) = parse_report(text.encode()).ranks
    assert read.groups == groups[:GROUPS_MAX]
    assert read.waiting is None


def odd(path: Sequence[Any], value: Any) -> bytes:
    told = json.loads(json.dumps(TOLD))
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"7",
        b"[" * 100_000,
        b" " * (REPORT_BYTES_MAX + 1),
        odd(["asked"], "7"),
        odd(["asked"], True),
        odd(["asked"], -1),
        odd(["asked"], 2**60),
        odd(["at"], float("nan")),
        odd(["at"], None),
        odd(["node"], 7),
        odd(["ranks"], None),
        odd(["ranks"], {"0": 1}),
        odd(["ranks"], [None]),
        odd(["ranks"], [TOLD["ranks"][0]] * 2),
        odd(["ranks"], [TOLD["ranks"][0] | {"rank": rank} for rank in range(RANKS_MAX + 1)]),
        odd(["ranks", 0, "rank"], None),
        odd(["ranks", 0, "rank"], 1.5),
        odd(["ranks", 0, "step"], "nine"),
        odd(["ranks", 0, "phase"], None),
        odd(["ranks", 0, "cpu"], float("inf")),
        odd(["ranks", 0, "cpu"], 10**400),
        odd(["ranks", 0, "groups"], [["0", 1, 1]]),
        odd(["ranks", 0, "groups"], [[0, 1, 1, ""]]),
        odd(["ranks", 0, "groups"], [["0", None, 1, ""]]),
        odd(["ranks", 0, "groups"], [["0", 1, -1, ""]]),
        odd(["ranks", 0, "groups"], [["0", 1, 1, ""]] * (GROUPS_MAX + 1)),
    ],
)
def test_what_no_agent_of_ours_writes_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="report") as refused:
        parse_report(text)
    assert len(str(refused.value)) < 200


@given(st.binary(max_size=200))
def test_no_text_does_more_than_be_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a report"):
        parse_report(text)


def test_names_are_cut_and_made_printable() -> None:
    text = odd(["node"], "evil\nhost\x1b[2J")
    assert parse_report(text).node == "evil host [2J"
    (rank,) = parse_report(odd(["ranks", 0, "groups"], [["n" * 1000, 1, 0, "o" * 1000]])).ranks
    assert (len(rank.groups[0].name), len(rank.groups[0].op)) == (100, 100)


# -- all reports together --------------------------------------------------------------------------------------------


def report(asked: int, *ranks: RankSample, at: float = 0.0) -> NodeReport:
    return NodeReport(asked=asked, node="node-b", at=at or float(asked), ranks=ranks)


def rank(number: int, **known: Any) -> RankSample:
    known = {"step": 9, "cpu_time_s": 1.0, "runnable": False, "in_io": False, "collective": 12, "waiting": True} | known
    return RankSample(rank=number, **known)


def heard(*reports: NodeReport, node: int = 1) -> Heard:
    found = Heard()
    for each in reports:
        found = found.asked(each.asked, float(each.asked)).told(node, each)
    return found


HERE = (rank(0), rank(1))


def known(found: Heard, at: float = 2.0) -> list[int]:
    return [each.seen.rank for each in found.ranks(HERE, 4, at, POLICY)]


def test_it_takes_two_reports_to_say_that_a_rank_does_nothing_unless_it_is_stopped() -> None:
    found = heard(report(1, rank(2), rank(3, stopped=True)))
    assert [each.working for each in found.ranks(HERE, 4, 1.0, POLICY)] == [None, ""]
    found = heard(report(1, rank(2), rank(3)), report(2, rank(2), rank(3)))
    assert [each.working for each in found.ranks(HERE, 4, 2.0, POLICY)] == ["", ""]


def test_it_takes_two_reports_to_say_that_a_rank_does_not_answer() -> None:
    silent = rank(3, silent=True)
    assert known(heard(report(1, rank(2), silent))) == []
    assert known(heard(report(1, rank(2), silent), report(2, rank(2), silent))) == [2, 3]
    assert known(heard(report(1, rank(2), silent), report(2, rank(2), rank(3)))) == [2, 3]


@pytest.mark.parametrize(
    "latest",
    [
        report(2, rank(2)),  # rank 3 has ended
        report(2, rank(2), rank(3), rank(4)),  # of another world
        report(2, rank(1), rank(2), rank(3)),  # one of ours
        report(2, rank(2), rank(3, silent=True)),  # perhaps only late this once
    ],
)
def test_unless_all_are_known_nothing_is(latest: NodeReport) -> None:
    assert known(heard(report(1, rank(2), rank(3)), latest)) == []


def test_a_rank_that_two_nodes_claim_is_not_known() -> None:
    found = heard(report(1, rank(2), rank(3)), report(2, rank(2), rank(3)))
    found = found.told(2, report(1, rank(3))).told(2, report(2, rank(3)))
    assert known(found) == []


def test_old_reports_say_nothing() -> None:
    found = heard(report(1, rank(2), rank(3)), report(2, rank(2), rank(3)))
    assert known(found, at=2.0 + FRESH_S) == [2, 3]
    assert known(found, at=2.1 + FRESH_S) == []


def test_reports_of_an_earlier_standstill_say_nothing() -> None:
    found = heard(report(1, rank(2), rank(3)), report(2, rank(2), rank(3)))
    for step_at, count in ((1.9, 2), (2.1, 0)):
        here = (rank(0, step_at=1.0), rank(1, step_at=step_at))
        assert len(found.ranks(here, 4, 3.0, POLICY)) == count


def test_answers_to_what_was_not_asked_are_ignored() -> None:
    found = heard(report(1, rank(2)))
    assert found.told(1, report(2, rank(2))) == found
    assert found.told(1, report(1, rank(3))) == found
    assert Heard().told(1, report(0, rank(2))) == Heard()
    assert Heard().has_all([]) and not Heard().has_all([1])  # noqa: PT018


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (rank(3), ""),
        (rank(3, cpu_time_s=1.6), "used 60% of a core"),
        (rank(3, runnable=True), "waits for a CPU"),
        (rank(3, in_io=True), "waits for a disk or a driver"),
        (rank(3, step=10), "has begun what it does only now"),
        (rank(3, collective=13), "has begun what it does only now"),
    ],
)
def test_what_a_rank_does_is_seen_between_two_reports(now: RankSample, words: str) -> None:
    found = heard(report(1, rank(2), rank(3)), report(2, rank(2), now))
    assert [each.working for each in found.ranks(HERE, 4, 2.0, POLICY)] == ["", words]


# -- process groups --------------------------------------------------------------------------------------------------


def in_groups(number: int, **groups: tuple[int, int | None]) -> RankSample:
    found = tuple(GroupPosition(name=name, begun=begun, ended=ended) for name, (begun, ended) in groups.items())
    waiting = any(ended is not None and begun > ended for begun, ended in groups.values())
    return rank(number, collective=found[0].begun, waiting=waiting, groups=found)


@pytest.mark.parametrize(
    ("ranks", "named", "clause"),
    [
        (  # rank 3 comes to no collective of the whole job
            [in_groups(0, w=(5, 4)), in_groups(1, w=(5, 4)), in_groups(3, w=(4, 4))],
            (3,),
            "at collective 4 while others are at 5 of process group w",
        ),
        (  # rank 2 is late in the whole job because rank 3 does not come to theirs
            [in_groups(0, w=(5, 4), a=(7, 7)), in_groups(1, w=(5, 4), a=(7, 7)),
             in_groups(2, w=(4, 4), b=(9, 8)), in_groups(3, w=(4, 4), b=(8, 8))],
            (3,),
            "at collective 4 while others are at 5 of process group w",
        ),
        (  # all are as far in the whole job
            [in_groups(0, w=(5, 5), a=(7, 6)), in_groups(1, w=(5, 5), a=(6, 6)), in_groups(2, w=(5, 5))],
            (1,),
            "at collective 6 while others are at 7 of process group a",
        ),
        (  # each waits for the other, in another group
            [in_groups(0, w=(5, 5), a=(7, 6), b=(3, 3)), in_groups(1, w=(5, 5), a=(6, 6), b=(4, 3))],
            (1, 0),
            "at collective 6 while others are at 7 of process group a",
        ),
        (  # rank 2 left one out
            [in_groups(0, w=(5, 4)), in_groups(1, w=(5, 4)), in_groups(2, w=(6, 5))],
            (2,),
            "gone past the collective of process group w in which the others wait",
        ),
        (  # nobody waits in the group in which they differ
            [in_groups(0, w=(5, 4), a=(7, 7)), in_groups(1, w=(5, 4), a=(6, 6))],
            (),
            "",
        ),
        (  # back ends that do not tell what has ended
            [in_groups(0, w=(5, None), a=(7, None)), in_groups(1, w=(5, None), a=(6, None))],
            (1,),
            "at collective 6 while others are at 7 of process group a",
        ),
    ],
)  # fmt: skip
def test_who_has_not_come_is_named_with_the_group(ranks: list[RankSample], named: tuple[int, ...], clause: str) -> None:
    found = suspects(tuple(ranks), frozenset({0}))
    assert (found.ranks, found.clause) == (named, clause)


def test_the_operation_is_named_if_anybody_knows_it() -> None:
    waits = replace(rank(0), groups=(WORLD,))
    late = in_groups(1, **{"0": (11, 11)})
    assert suspects((late, waits), frozenset({0})).clause == (
        "at collective 11 while others are at 12 of process group 0 (all_reduce)"
    )


# -- the job ---------------------------------------------------------------------------------------------------------


class Node:
    """Watches two of a simulated job's four ranks, and hears of the others every now and then."""

    def __init__(self, job: Job, here: Sequence[int], *, every_s: float = 0.3) -> None:
        self.job, self.here, self.every_s = job, here, every_s
        self.there = [number for number in range(job.script.ranks) if number not in here]
        self.now = 1000.0
        self.state = PaceState(whole_job=False, asks_remote_ranks=True)
        self.heard = Heard()
        self.said: list[Verdict] = []
        self.questions = 0

    def look(self) -> None:
        self.now = max(self.now + 1e-4, next_look_at(self.state))
        self.job.plan_to(self.now)
        ranks = self._seen(self.here, with_evidence=needs_evidence(self.state))
        remote_ranks = self._remote_ranks(ranks) if needs_remote_ranks(self.state) else ()
        self.state, verdicts = observe(self.state, Sample(at=self.now, ranks=ranks, remote_ranks=remote_ranks))
        self.said += verdicts

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while next_look_at(self.state) < end:
            self.look()

    def _remote_ranks(self, here: tuple[RankSample, ...]) -> tuple[RemoteRank, ...]:
        if self.now - self.heard.latest_at >= self.every_s:
            self.questions += 1
            told = NodeReport(
                asked=self.questions, node="node-b", at=self.now, ranks=self._seen(self.there, with_evidence=True)
            )
            self.heard = self.heard.asked(self.questions, self.now).told(1, told)
        return self.heard.ranks(here, self.job.script.ranks, self.now, POLICY)

    def _seen(self, ranks: Sequence[int], *, with_evidence: bool) -> tuple[RankSample, ...]:
        return tuple(
            self.job.workers[number].seen(self.now, counts_collectives=True, with_evidence=with_evidence)
            for number in ranks
        )


def trouble(kind: tuple[float, str], seconds: float = FOREVER) -> Job:
    return Job(Script(noise=0.0, compile_s=2.0, troubles=(Trouble(45, 3, kind, seconds=seconds),)))


@pytest.mark.parametrize(
    ("kind", "reason", "sure"),
    [
        (STOPPED, "stopped by a signal, it is not at work.", HangKind.STOPPED),
        (ASLEEP, "at collective 45 while others are at 46, it is not at work.", HangKind.AWAITED),
    ],
)
def test_who_waits_says_for_whom_and_the_other_node_says_who_hangs(
    kind: tuple[float, str], reason: str, sure: HangKind
) -> None:
    waits, hangs = Node(trouble(kind), [0, 1]), Node(trouble(kind), [2, 3])
    waits.run(60.0)
    hangs.run(60.0)
    (theirs,) = waits.said
    assert isinstance(theirs, Waiting)
    assert (theirs.ranks, theirs.missing, theirs.kind) == ((0, 1), (3,), sure)
    assert theirs.reason.startswith("ranks 0 and 1 wait for rank 3 on node-b: no step for ")
    assert theirs.reason.endswith(f"; {reason}")
    ours = hangs.said[-1]
    assert isinstance(ours, Hung)
    assert (ours.ranks, ours.kind) == ((3,), sure)
    assert ours.reason.startswith("rank 3 hangs: no step for ")
    assert ours.reason.endswith(f"; {reason}")
    assert theirs.standing_s < 0.6 + 2 * 0.3 + 0.2


def test_a_rank_that_was_reported_once_is_not_yet_judged() -> None:
    node = Node(trouble(ASLEEP), [0, 1], every_s=2.0)
    node.run(30.0)
    (verdict,) = node.said
    assert isinstance(verdict, Waiting)
    assert verdict.missing == (3,)
    assert 2.0 < verdict.standing_s < 3.5


def test_a_rank_alone_on_its_node_is_known_to_hang_by_the_others() -> None:
    node = Node(trouble(ASLEEP), [3])
    node.run(30.0)
    verdict = node.said[-1]
    assert isinstance(verdict, Hung)
    assert (verdict.ranks, verdict.kind) == ((3,), HangKind.AWAITED)


def test_of_ranks_on_several_nodes_each_node_acts_on_its_own() -> None:
    troubles = (Trouble(45, 1, ASLEEP), Trouble(45, 3, ASLEEP))
    node = Node(Job(Script(noise=0.0, compile_s=2.0, troubles=troubles)), [0, 1])
    node.run(30.0)
    verdict = node.said[-1]
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (1,)
    assert verdict.reason.startswith("ranks 1 and 3 (on node-b) hang: no step for ")


def test_a_rank_at_work_elsewhere_is_waited_for_in_silence() -> None:
    node = Node(trouble(BUSY, 60.0), [0, 1])
    node.run(100.0)
    assert node.said == []


def test_a_rank_at_work_elsewhere_is_slow_in_the_end() -> None:
    node = Node(trouble(BUSY), [0, 1])
    node.run(250.0)
    (verdict,) = node.said
    assert isinstance(verdict, Slow)
    assert verdict.reason.startswith("rank 3 on node-b is slow, not hung: no step for ")


def test_without_an_answer_it_is_said_later_that_they_wait_and_again_when_one_comes() -> None:
    node = Node(trouble(ASLEEP), [0, 1], every_s=FOREVER)
    node.heard = Heard().asked(1, 1e9)  # no question is due
    node.run(30.0)
    (verdict,) = node.said
    assert isinstance(verdict, Waiting)
    assert verdict.missing == ()
    assert verdict.standing_s >= 0.6 + POLICY.elsewhere_s
    node.every_s, node.heard = 0.3, Heard()
    node.run(30.0)
    assert [type(each) for each in node.said] == [Waiting, Waiting]
    assert node.said[1].missing == (3,)  # type: ignore[union-attr]


def test_a_stopped_rank_here_is_said_before_anybody_answers() -> None:
    node = Node(trouble(STOPPED), [2, 3], every_s=FOREVER)
    node.heard = Heard().asked(1, 1e9)
    node.run(30.0)
    assert isinstance(node.said[0], Hung)
    assert node.said[0].standing_s < 0.6 + 0.2


def test_a_job_that_goes_on_asks_nobody() -> None:
    node = Node(Job(Script(evaluate_every=20, evaluate_s=3.0)), [0, 1])
    node.run(120.0)
    assert (node.said, node.questions) == ([], 0)


def test_a_stuck_network_is_a_deadlock_on_each_node() -> None:
    node = Node(Job(Script(noise=0.0, compile_s=2.0)), [0, 1])
    node.run(30.0)
    state, at, said = node.state, node.now, list[Verdict]()

    def stuck(number: int) -> RankSample:
        return replace(node.state.ranks[0].seen, rank=number, collective=99, waiting=True, runnable=False, in_io=False)

    remote_ranks = tuple(RemoteRank(node="node-b", seen=stuck(number), working="") for number in (2, 3))
    while at < node.now + 5.0:
        at = max(at + 1e-3, next_look_at(state))
        state, verdicts = observe(state, Sample(at=at, ranks=(stuck(0), stuck(1)), remote_ranks=remote_ranks))
        said += verdicts
    (verdict,) = said
    assert isinstance(verdict, Hung)
    assert (verdict.ranks, verdict.kind) == ((0, 1), HangKind.DEADLOCKED)
    assert verdict.reason.endswith("; all wait in the same collective, and nobody is missing from it.")


@pytest.mark.parametrize(
    ("ranks", "nodes", "words"),
    [
        ((5,), {5: "b"}, "rank 5 on b"),
        ((4, 5), {4: "b", 5: "b"}, "ranks 4 and 5 on b"),
        ((1, 5), {5: "b"}, "ranks 1 and 5 (on b)"),
        ((1, 5, 9), {5: "b", 9: "c"}, "ranks 1, 5 (on b) and 9 (on c)"),
        ((1, 2), {5: "b"}, "ranks 1 and 2"),
    ],
)
def test_ranks_are_named_with_their_hosts(ranks: tuple[int, ...], nodes: dict[int, str], words: str) -> None:
    assert who(ranks, nodes) == words
