"""The sentences about standstills and degradations, and the words that they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unicron_elastic.detection.allowance import Allowance
from unicron_elastic.detection.evidence import Suspects, hang_kind
from unicron_elastic.detection.lockstep import Skip
from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import Sample
from unicron_elastic.detection.telling import Attended, Degraded, Hung, OutOfStep, Recovered, Slow, Waiting
from unicron_elastic.faults import HangKind


def duration(seconds: float) -> str:
    """A duration as people say it: "84 ms", "3.2 s", "4 min 10 s"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def times(factor: float) -> str:
    """A factor: "1.31x", "12x"."""
    return f"{factor:.3g}x" if factor < 100 else f"{factor:.0f}x"


def who(ranks: Sequence[int], nodes: Mapping[int, str] | None = None) -> str:
    """Ranks as the middle of a sentence: "rank 3", "ranks 1, 2 and 5", "rank 5 on node-b".

    ``nodes`` has the host of those that are elsewhere; a host that all share is named once.
    """
    hosts = [(nodes or {}).get(rank, "") for rank in ranks]
    shared = hosts[0] if len(set(hosts)) == 1 else ""
    place = f" on {shared}" if shared else ""
    places = ["" if shared or not host else f" (on {host})" for host in hosts]
    names = [f"{rank}{each}" for rank, each in zip(ranks, places, strict=True)]
    if len(names) == 1:
        return f"rank {names[0]}{place}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}{place}"


def verb(ranks: Sequence[object], one: str, many: str) -> str:
    """The form of a verb, or of a pronoun, that goes with so many ranks."""
    return one if len(ranks) == 1 else many


def sentence(words: str) -> str:
    """The words as a sentence; it begins in lower case, as all sentences about ranks do."""
    return f"{words}."


def idle(
    standing: tuple[int, ...], suspected: Suspects, allowed: Allowance, sample: Sample, whole_job: bool
) -> Hung | Waiting:
    """Nobody whom the others wait for is at work."""
    at = sample.at
    nodes = {rank.seen.rank: rank.node for rank in sample.remote_ranks}
    here = tuple(rank for rank in suspected.ranks if rank not in nodes)
    if suspected.clause and not here:
        return _waiting(standing, suspected, allowed, sample, nodes)
    if not whole_job and not suspected.clause and (suspected.ranks or not sample.remote_ranks):
        doing = f"{who(standing)} {verb(standing, 'waits', 'wait')} for what is not on this node"
        reason = sentence(f"{doing}: {_no_step(allowed, at)}, and nobody is at work here")
        return Waiting(
            at=at, ranks=standing, standing_s=at - allowed.since, expected_s=allowed.expected_s, reason=reason
        )
    if not suspected.ranks:
        clause = "all wait in the same collective, and nobody is missing from it"
        kind = hang_kind(sample.everybody, standing, whole_job or bool(sample.remote_ranks))
        return _hung(standing, clause, allowed, kind, at, named=standing)
    kind = hang_kind(sample.everybody, suspected.ranks, whole_job or bool(sample.remote_ranks))
    return _hung(here, _not_at_work(suspected), allowed, kind, at, named=suspected.ranks, nodes=nodes)


def _waiting(
    standing: tuple[int, ...], suspected: Suspects, allowed: Allowance, sample: Sample, nodes: Mapping[int, str]
) -> Waiting:
    """All who hold the others up are on other nodes."""
    at, missing = sample.at, suspected.ranks
    words = f"{who(standing)} {verb(standing, 'waits', 'wait')} for {who(missing, nodes)}: {_no_step(allowed, at)}"
    return Waiting(
        at=at,
        ranks=standing,
        standing_s=at - allowed.since,
        expected_s=allowed.expected_s,
        reason=sentence(f"{words}; {_not_at_work(suspected)}"),
        missing=missing,
        kind=hang_kind(sample.everybody, missing, True),
    )


def _not_at_work(suspected: Suspects) -> str:
    clause = f"{suspected.clause}, " if suspected.clause else ""
    return f"{clause}{verb(suspected.ranks, 'it is', 'they are')} not at work"


def slow(working: dict[int, str], allowed: Allowance, at: float, nodes: Mapping[int, str]) -> Slow:
    """Somebody whom the others wait for is at work; ``nodes`` has the hosts of those elsewhere."""
    ranks = tuple(sorted(working))
    words = (
        f"{who(ranks, nodes)} {verb(ranks, 'is', 'are')} slow, not hung: {_no_step(allowed, at)}, but {_work(working)}"
    )
    return Slow(
        at=at, ranks=ranks, standing_s=at - allowed.since, expected_s=allowed.expected_s, reason=sentence(words)
    )


def attended(people: Mapping[int, str], standing: tuple[int, ...], at: float) -> Attended:
    """``people`` are those at whose debugger or terminal a person is, and at which."""
    places = " and ".join(f"rank {rank}'s {place}" for rank, place in people.items())
    waiting = tuple(rank for rank in standing if rank not in people)
    others = f"; {who(waiting)} {verb(waiting, 'waits', 'wait')} for that" if waiting else ""
    return Attended(at=at, ranks=tuple(people), reason=sentence(f"a person is at {places}{others}"))


def degraded(
    ranks: tuple[int, ...], clause: str, *, factor: float, usual_s: float, at: float, policy: PacePolicy
) -> Degraded | Slow:
    """Steps take longer than usual; ``clause`` says how ``ranks`` are known, if they are."""
    took = f"steps take {duration(factor * usual_s)}, {times(factor)} the usual {duration(usual_s)}"
    if ranks:
        reason = sentence(f"{who(ranks)} {verb(ranks, 'holds', 'hold')} the job up: {took}; {clause}")
    else:
        reason = sentence(f"the job is slow: {took}; no rank stands out")
    if factor < policy.hung_factor:
        return Degraded(at=at, ranks=ranks, factor=factor, usual_s=usual_s, reason=reason)
    return Slow(at=at, ranks=ranks, standing_s=factor * usual_s, expected_s=usual_s, reason=reason)


def out_of_step(found: Skip, since: float, at: float) -> OutOfStep:
    """A rank has begun fewer collectives than the others."""
    op = found.op or "collective"
    what = f"{'an' if op[0] in 'aeiou' else 'a'} {op}" if found.missing == 1 else f"{found.missing} collectives"
    words = (
        f"rank {found.rank} seems to have left out {what} of the group of all ranks in step {found.step}: "
        f"if so, it and the others mix different steps since then, and the numbers are wrong"
    )
    return OutOfStep(at=at, since=since, step=found.step, rank=found.rank, reason=sentence(words))


def at_work_again(ranks: tuple[int, ...], working: dict[int, str], standing_s: float, at: float) -> Recovered:
    """Those who were said to hang do something."""
    words = f"{who(ranks)} {verb(ranks, 'is', 'are')} at work again after {duration(standing_s)}: {_work(working)}"
    return Recovered(at=at, ranks=ranks, reason=sentence(words), was_hung=True)


def _hung(
    ranks: tuple[int, ...],
    clause: str,
    allowed: Allowance,
    kind: HangKind,
    at: float,
    *,
    named: tuple[int, ...],
    nodes: Mapping[int, str] | None = None,
) -> Hung:
    """``ranks`` are those here, of all that are ``named``."""
    words = f"{who(named, nodes)} {verb(named, 'hangs', 'hang')}: {_no_step(allowed, at)}; {clause}"
    return Hung(
        at=at,
        ranks=ranks,
        kind=kind,
        standing_s=at - allowed.since,
        expected_s=allowed.expected_s,
        reason=sentence(words),
    )


def _no_step(allowed: Allowance, at: float) -> str:
    standing_s = at - allowed.since
    no_step = f"no step for {duration(standing_s)}"
    if not allowed.expected_s:
        return f"{no_step}{allowed.doing}, where {duration(allowed.limit_s)} are allowed"
    usual = f"the usual {duration(allowed.expected_s)}"
    return f"{no_step}, {times(standing_s / allowed.expected_s)} {usual}{allowed.doing}"


def _work(working: dict[int, str]) -> str:
    """What those at work were doing; of many, the first tells."""
    rank, words = next(iter(sorted(working.items())))
    return f"it {words}" if len(working) == 1 else f"rank {rank} {words}"
