"""Whether a cluster is well: a table of rules, each of which finds problems and says them as sentences. Pure.

The bounds are those of the alerts that come with the package, where there is one. What people have decided (a drained
node, a paused job) and what the plan has decided (a job that waits, as others earn more) is no problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.view.cluster.members import lost_text
from unicron_elastic.launcher.view.cluster.overview import (
    CRITICAL,
    DEGRADED,
    FINE,
    LEVELS,
    ClusterVerdict,
    JobLine,
    Overview,
    Problem,
)
from unicron_elastic.launcher.view.cluster.plan_text import span
from unicron_elastic.launcher.view.cluster.recorded_fault import moment_s

STANDS_S = 600.0  # without a step: as the alert UnicronJobWithoutStep
OPEN_S = 60.0  # after a fault without a step: something holds the recovery up
SLOW = 0.5  # of what the plan promises, at this moment; the alert UnicronJobBelowPlan waits, and so takes more


def verdict_of(overview: Overview) -> ClusterVerdict:
    """What all rules find together, of an overview whose own verdict is not looked at."""
    found = [problem for rule in _RULES for problem in rule(overview)]
    problems = tuple(sorted(found, key=lambda each: -LEVELS.index(each.level)))  # stable: as the rules find them
    if not problems:
        return ClusterVerdict(level=FINE, reason=_why_fine(overview))
    more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
    return ClusterVerdict(level=problems[0].level, reason=f"{problems[0].sentence}{more}", problems=problems)


def _why_fine(overview: Overview) -> str:
    training = sum(job.state == "training" for job in overview.jobs)
    alive = sum(job.is_alive for job in overview.jobs)
    if not overview.nodes and not overview.jobs:
        return "Nobody is there: no agent, and no job."
    if not alive:
        return "No job is there."
    if training == alive:
        return "The job trains." if alive == 1 else f"All {alive} jobs train." if alive > 2 else "Both jobs train."
    rest = alive - training
    return f"{training} of {alive} jobs train; {'one waits' if rest == 1 else f'{rest} wait'}, as decided."


def _no_coordinator(overview: Overview) -> Iterator[Problem]:
    if overview.coordinator is None and (_there(overview) or any(job.is_alive for job in overview.jobs)):
        sentence = "Nobody coordinates: lost nodes are noticed by their leases alone, and nothing is planned."
        yield Problem(level=CRITICAL, kind="no coordinator", about="cluster", sentence=sentence)


def _standing(overview: Overview) -> Iterator[Problem]:
    for job in overview.jobs:
        if job.state != "training" or not _counts_steps(job):
            continue
        since = _fault_at(overview, job) if job.stepped_unix_s is None else job.stepped_unix_s
        stood_s = 0.0 if since is None else overview.at_unix_s - since
        if job.is_incident_open and OPEN_S < stood_s <= STANDS_S:
            yield _about(
                job, CRITICAL, "stands", f"{job.job} has not come back from a fault: no step for {span(stood_s)}."
            )
        elif stood_s > STANDS_S:
            yield _about(job, CRITICAL, "stands", f"{job.job} has made no step for {span(stood_s)}.")
        elif job.is_incident_open:
            yield _about(job, DEGRADED, "recovers", f"{job.job} recovers from a fault.")


def _counts_steps(job: JobLine) -> bool:
    """Whether steps of it are known, or must have been: who tells of them may be new to the job."""
    return job.stepped_unix_s is not None or (job.is_planned and job.has_run)


def _fault_at(overview: Overview, job: JobLine) -> float | None:
    """Since when a fault waits for its first step, as the job says itself, in unix seconds; None if none does."""
    known = (moment_s(each) for each in overview.incidents if each.is_open and each.run_id == job.job)
    return min((moment for moment in known if moment > 0.0), default=None) if job.is_incident_open else None


def _without_nodes(overview: Overview) -> Iterator[Problem]:
    for job in overview.jobs:
        if job.state != "waiting" or not job.is_alive:
            continue
        why = _sentence(job.why) if job.why else f"{job.job} waits for its nodes."
        if not job.is_planned:
            level = CRITICAL if job.has_run else DEGRADED
            yield _about(job, level, "waits", f"{job.job} {'stands still' if job.has_run else 'has not begun'}: {why}")
        elif job.wanted_nodes or job.has_run or (job.min_nodes or 0) > _there(overview):
            yield _about(job, DEGRADED, "waits", why)


def _with_fewer_nodes(overview: Overview) -> Iterator[Problem]:
    for job in overview.jobs:
        if job.state == "training" and job.wanted_nodes is not None and job.nodes < job.wanted_nodes:
            coming = f", {job.joining_nodes} on the way" if job.joining_nodes else ""
            yield _about(
                job, DEGRADED, "fewer nodes", f"{job.job} trains on {job.nodes} of {job.wanted_nodes} nodes{coming}."
            )


def _slow(overview: Overview) -> Iterator[Problem]:
    for job in overview.jobs:
        is_whole = job.wanted_nodes is None or job.nodes >= job.wanted_nodes
        if job.state == "training" and is_whole and job.of_expected is not None and 0.0 < job.of_expected < SLOW:
            yield _about(job, DEGRADED, "slow", f"{job.job} achieves {job.of_expected:.0%} of what the plan promises.")


def _failed(overview: Overview) -> Iterator[Problem]:
    for job in overview.jobs:
        if job.state == "failed":
            said = f"{job.job} has failed"
            why = job.why if said in job.why else f"{said}: {job.why}" if job.why else said
            yield _about(job, DEGRADED, "failed", _sentence(why))


def _without_restarts(overview: Overview) -> Iterator[Problem]:
    for job in overview.jobs:
        used, most = job.restarts_used, job.max_restarts
        if job.state == "training" and used is not None and most and used >= most:
            yield _about(job, DEGRADED, "no restarts", f"{job.job} has no restart left: the next fault ends it.")


def _broken_nodes(overview: Overview) -> Iterator[Problem]:
    for node in overview.nodes:
        if node.health == "broken":
            sentence = f"{node.host} is kept out: {_sentence(node.reason)}"
            yield Problem(level=DEGRADED, kind="broken node", about=f"node:{node.host}", sentence=sentence)


def _lost_nodes(overview: Overview) -> Iterator[Problem]:
    """Hosts that belong to the cluster and are not there; of one that is kept out that is no news."""
    for node in overview.nodes:
        if node.state == "lost" and node.health == "well":
            ago = "" if node.lost_unix_s is None else f"{span(max(0.0, overview.at_unix_s - node.lost_unix_s))} ago"
            sentence = lost_text(node.host, node.lost_why, ago)
            yield Problem(level=DEGRADED, kind="lost node", about=f"node:{node.host}", sentence=sentence)


def _there(overview: Overview) -> int:
    return sum(node.state != "lost" for node in overview.nodes)


def _unreadable(overview: Overview) -> Iterator[Problem]:
    for text in overview.odd:
        sentence = f"The store has what nobody can read: {_sentence(text)}"
        yield Problem(level=DEGRADED, kind="unreadable", about="cluster", sentence=sentence)


_Rule = Callable[[Overview], Iterable[Problem]]
_RULES: tuple[_Rule, ...] = (
    _no_coordinator,
    _standing,
    _without_nodes,
    _failed,
    _with_fewer_nodes,
    _broken_nodes,
    _lost_nodes,
    _slow,
    _without_restarts,
    _unreadable,
)


def _about(job: JobLine, level: str, kind: str, sentence: str) -> Problem:
    return Problem(level=level, kind=kind, about=f"job:{job.job}", sentence=sentence)


def _sentence(text: str) -> str:
    return f"{one_line(text).rstrip('.')}."
