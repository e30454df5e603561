"""What the nodes of a job tell each other of their ranks: the text of a report, and what all reports together say.

A report comes from another process of another host, perhaps of another version: it is read with bounds, and what is
odd is refused as a whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from unicron_elastic.base.text import one_line
from unicron_elastic.detection.evidence import work
from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import GroupPosition, RankSample, RemoteRank, waits

FRESH_S = 5.0  # since a question was asked: so old may the answers be that are judged by
REPORT_BYTES_MAX = 256 * 1024
RANKS_MAX = 256  # of one node
GROUPS_MAX = 16  # of one rank; of more, the whole job's and those that are waited in come first
NAME_CHARACTERS = 100  # as in the answers of workers, or names would not be the same
_COUNT_MAX = 2**53
_QUESTIONS = 4  # that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The ranks of one node, as that node saw them."""

    asked: int  # the number of the question that it answers
    node: str  # its host
    at: float  # monotonic seconds of that host
    ranks: tuple[RankSample, ...]


def report_text(report: NodeReport) -> str:
    """The report as JSON."""
    ranks = [
        {
            "rank": seen.rank,
            "step": seen.step,
            "phase": seen.phase,
            "cpu": seen.cpu_time_s,
            "stopped": seen.stopped,
            "silent": seen.silent,
            "runnable": seen.runnable,
            "in_io": seen.in_io,
            "uses_gpu": seen.uses_gpu,
            "groups": [[each.name, each.begun, each.ended, each.op] for each in _told_of(seen.groups)],
        }
        for seen in report.ranks
    ]
    return json.dumps({"asked": report.asked, "node": report.node, "at": report.at, "ranks": ranks})


def _told_of(groups: tuple[GroupPosition, ...]) -> list[GroupPosition]:
    return [*groups[:1], *sorted(groups[1:], key=lambda group: group.waits is not True)][:GROUPS_MAX]


def parse_report(text: bytes) -> NodeReport:
    """The report in ``text``. Raises ValueError for what no agent of ours writes."""
    if len(text) > REPORT_BYTES_MAX:
        raise ValueError(f"a report of {len(text)} bytes exceeds the limit of {REPORT_BYTES_MAX}")
    try:
        told = json.loads(text)
        ranks = tuple(_rank(each) for each in _list(told["ranks"], RANKS_MAX))
        if len({seen.rank for seen in ranks}) != len(ranks):
            raise ValueError("a rank twice")
        return NodeReport(asked=_count(told["asked"]), node=_name(told["node"]), at=_seconds(told["at"]), ranks=ranks)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"not a report on ranks: {one_line(repr(error), 100)}") from None


def _rank(told: Mapping[str, Any]) -> RankSample:
    groups = tuple(
        GroupPosition(name=_name(name), begun=_count(begun), ended=_maybe_count(ended), op=_name(op))
        for name, begun, ended, op in _list(told["groups"], GROUPS_MAX)
    )
    return RankSample(
        rank=_count(told["rank"]),
        step=_maybe_count(told["step"]),
        phase=_name(told["phase"]),
        cpu_time_s=None if told["cpu"] is None else _seconds(told["cpu"]),
        stopped=told["stopped"] is True,
        silent=told["silent"] is True,
        runnable=_flag(told["runnable"]),
        in_io=_flag(told["in_io"]),
        uses_gpu=told["uses_gpu"] is not False,
        collective=groups[0].begun if groups else None,
        waiting=waits(groups),
        groups=groups,
    )


def _list(told: Any, longest: int) -> list[Any]:
    if not isinstance(told, list) or len(told) > longest:
        raise ValueError(f"not a list of at most {longest}")
    return told


def _count(told: Any) -> int:
    if not isinstance(told, int) or isinstance(told, bool) or not 0 <= told <= _COUNT_MAX:
        raise ValueError("not a count")
    return told


def _maybe_count(told: Any) -> int | None:
    return None if told is None else _count(told)


def _seconds(told: Any) -> float:
    if not isinstance(told, int | float) or isinstance(told, bool) or not math.isfinite(told):
        raise ValueError("not a time")
    return float(told)


def _flag(told: Any) -> bool | None:
    return told if isinstance(told, bool) else None


def _name(told: Any) -> str:
    if not isinstance(told, str):
        raise ValueError("not a name")
    return one_line(told, NAME_CHARACTERS)


class _OfNode(NamedTuple):
    """The two latest reports of one node."""

    before: NodeReport | None
    now: NodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The questions that were asked in this generation, and what came; ``Heard()`` has heard nothing yet."""

    questions: tuple[tuple[int, float], ...] = ()  # the latest: number, and when this node heard of it
    nodes: Mapping[int, _OfNode] = field(default_factory=dict)  # the other nodes, by their number

    @property
    def latest(self) -> int:
        """The number of the latest question; 0 if there was none."""
        return self.questions[-1][0] if self.questions else 0

    @property
    def latest_at(self) -> float:
        """When this node heard of it; minus infinity if there was none."""
        return self.questions[-1][1] if self.questions else -math.inf

    def asked(self, number: int, at: float) -> Heard:
        """After a question, which is new."""
        return replace(self, questions=(*self.questions, (number, at))[-_QUESTIONS:])

    def told(self, node: int, report: NodeReport) -> Heard:
        """After a report; without effect if it is known, or answers what this node has not heard of."""
        known = self.nodes.get(node)
        is_new = known is None or report.asked > known.now.asked
        if not is_new or all(number != report.asked for number, _ in self.questions):
            return self
        before = known.now if known is not None and report.at - known.now.at <= FRESH_S else None
        return replace(self, nodes={**self.nodes, node: _OfNode(before, report)})

    def has_all(self, nodes: Collection[int]) -> bool:
        """Whether all ``nodes`` have answered the latest question."""
        found = [self.nodes.get(node) for node in nodes]
        return all(each is not None and each.now.asked == self.latest for each in found)

    def ranks(
        self, here: Collection[RankSample], members: int, at: float, policy: PacePolicy
    ) -> tuple[RemoteRank, ...]:
        """All ranks of the job, which has ``members``, but those ``here``.

        Nothing unless all are known, each from one node, of late, and since the latest step here: what was asked in an
        earlier standstill would make the others seem to lag behind.
        """
        asked_at = dict(self.questions)
        since = max((seen.step_at or 0.0 for seen in here), default=0.0)
        ours = {seen.rank for seen in here}
        found: dict[int, RemoteRank] = {}
        for before, now in self.nodes.values():
            question_at = asked_at.get(now.asked, -math.inf)
            if at - question_at > FRESH_S or question_at < since:
                continue  # perhaps of a node that is lost
            for rank in now.ranks:
                remote = _remote(before, now, rank, policy)
                if remote is None or rank.rank in found or rank.rank in ours:
                    return ()
                found[rank.rank] = remote
        if len(found) + len(ours) != members:
            return ()
        return tuple(found[rank] for rank in sorted(found))


def _remote(before: NodeReport | None, now: NodeReport, seen: RankSample, policy: PacePolicy) -> RemoteRank | None:
    """One rank; None if it takes one more report to say whether it answers."""
    if seen.stopped:
        return RemoteRank(node=now.node, seen=seen, working="")
    was = next((each for each in before.ranks if each.rank == seen.rank), None) if before is not None else None
    if seen.silent and (was is None or not was.silent):
        return None
    if was is None or before is None or was.silent != seen.silent or was.stopped:
        return RemoteRank(node=now.node, seen=seen, working=None)
    if (was.step, was.collective) != (seen.step, seen.collective):
        return RemoteRank(node=now.node, seen=seen, working="has begun what it does only now")
    return RemoteRank(node=now.node, seen=seen, working=work(was, seen, now.at - before.at, policy))
