"""Which nodes: from how many each job gets to the name of every node, moving as few as can be.

A node stays with its job while that has a use for it. Who needs more takes idle nodes first, then those that other
jobs give up; of these those whose memory has its state, its own host of before, then its own part of the network. The
same snapshot and counts give the same seats.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import compress, count, repeat
from operator import attrgetter, itemgetter, ne

from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.published import Loss, Seat
from unicron_elastic.planning.coordinate.situation import usable_nodes
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot

# Who keeps its place first: one that works costs most to replace, one on its way to the job least.
_KEEPS = (NodeState.WORKING, NodeState.JOINING, NodeState.LEAVING)
# Who is taken first: what an idle node costs nobody, a working one costs its job a transition.
_TAKEN = (NodeState.IDLE, NodeState.LEAVING, NodeState.JOINING, NodeState.WORKING)
_NODE_ID, _JOB = itemgetter(0), itemgetter(2)
_NEW_SEAT = partial(tuple.__new__, Seat)  # as Seat._make, for thousands of them


def seated(
    snapshot: ClusterSnapshot, counts: Mapping[str, int], kept: frozenset[str], losses: Sequence[Loss], at_unix_s: float
) -> tuple[tuple[Seat, ...], dict[str, int]]:
    """The seats, and how many nodes each job that comes short can have, as nodes refuse it or have to stay elsewhere.

    ``kept``: draining nodes that may stay. ``losses``: who lost a node on which host.
    """
    if _is_as_planned(snapshot, counts) and snapshot.published is not None:
        return snapshot.published.seats, {}
    usable = usable_nodes(snapshot, kept)
    groups = _Groups(snapshot, usable, counts, at_unix_s)
    place = groups.places()
    unplaced = [node for node in groups.movable if not place[node.node_id]]
    short = {}
    for job in _neediest(snapshot, groups, at_unix_s):
        own_hosts = {loss.host for loss in losses if loss.job == job}
        missing = counts[job] - len(groups[job])
        if not missing:
            continue
        free = [node for node in unplaced if not place[node.node_id] and _may_be_lent(node, job, at_unix_s)]
        while len(free) < missing and (swapped := _swapped(usable, place, groups, job, at_unix_s)):
            free.append(swapped)
            unplaced = list(usable)  # the other one has a place now
        for node in _nearest_first(free, job, groups[job], own_hosts)[:missing]:
            groups[job].append(node)
            place[node.node_id] = job
        if len(groups[job]) < counts[job]:
            short[job] = len(groups[job])
    return _seats(snapshot, place), short


class _Groups(dict[str, list[NodeStatus]]):
    """The nodes that stay with each job, of those that head for it.

    They are listed for ``changing`` jobs; for others when asked for: all that head for these stay, and a cluster of
    thousands of nodes has few of the former at a time.
    """

    def __init__(
        self, snapshot: ClusterSnapshot, usable: tuple[NodeStatus, ...], counts: Mapping[str, int], at_unix_s: float
    ) -> None:
        super().__init__()
        is_all = usable is snapshot.sound_nodes
        heads = snapshot.heads if is_all else tuple(node.heads_for for node in usable)
        self._all = usable, heads
        self._ids = snapshot.sound_ids if is_all else tuple(node.node_id for node in usable)
        self.counts, self._at_unix_s = counts, at_unix_s
        heading = snapshot.heading if is_all else Counter(heads)
        unsettled = {node.heads_for for node in snapshot.unsettled_nodes}
        self.changing = [job for job, count in counts.items() if job in unsettled or heading.get(job, 0) != count]
        settled = set(counts).difference(self.changing)
        # All that head for no job, or for one whose nodes change.
        self.movable = [node for head, node in zip(heads, usable, strict=True) if head not in settled]
        listed: defaultdict[str, list[NodeStatus]] = defaultdict(list)
        for node in self.movable:
            listed[node.heads_for].append(node)
        for job in self.changing:
            self[job] = _stayers(listed[job], job, counts[job], at_unix_s)

    def __missing__(self, job: str) -> list[NodeStatus]:
        nodes, heads = self._all
        heading = [node for head, node in zip(heads, nodes, strict=True) if head == job]
        self[job] = found = _stayers(heading, job, self.counts.get(job, 0), self._at_unix_s)
        return found

    def places(self) -> dict[str, str]:
        """The job with which each node stays, by its id; "" for none."""
        found = dict(zip(self._ids, self._all[1], strict=True))
        found.update(dict.fromkeys([node.node_id for node in self.movable], ""))
        for job in self.changing:
            found.update(dict.fromkeys([node.node_id for node in self[job]], job))
        return found


def _is_as_planned(snapshot: ClusterSnapshot, counts: Mapping[str, int]) -> bool:
    """Whether all nodes head for where the published plan has them, and that is what ``counts`` asks for."""
    published = snapshot.published
    if published is None or snapshot.sound_ids != published.node_ids or published.plan.counts != counts:
        return False
    is_simple = not snapshot.draining_ids and not published.draining_ids
    return (
        is_simple
        and not any(node.refusals for node in snapshot.unsettled_nodes)
        and not any(map(ne, snapshot.heads, published.job_of.values()))
    )


def _seats(snapshot: ClusterSnapshot, place: Mapping[str, str]) -> tuple[Seat, ...]:
    """A seat for each node, in their order."""
    ids, draining = snapshot.sound_ids, snapshot.draining_ids
    jobs = list(map(place.get, ids, repeat("")))
    known = _known_seats(snapshot)
    if known is not None and not draining:
        for at in compress(count(), map(ne, map(_JOB, known), jobs)):
            known[at] = known[at]._replace(job=jobs[at])
        return tuple(known)
    hosts = map(attrgetter("host"), snapshot.sound_nodes)
    are_draining = [node_id in draining for node_id in ids] if draining else repeat(False, len(ids))
    return tuple(map(_NEW_SEAT, zip(ids, hosts, jobs, are_draining, strict=True)))


def _known_seats(snapshot: ClusterSnapshot) -> list[Seat] | None:
    """Those of the published plan, if they are of all nodes that are left: thousands of them need not be made anew."""
    published = snapshot.published
    if published is None or published.draining_ids:
        return None
    ids, seats = snapshot.sound_ids, list(published.seats)
    if ids == published.node_ids:
        return seats
    here = set(ids)
    left = [seat for seat in seats if seat.node_id in here]
    return left if len(left) == len(ids) and tuple(map(_NODE_ID, left)) == ids else None


def _stayers(heading: list[NodeStatus], job: str, count: int, at_unix_s: float) -> list[NodeStatus]:
    """Which of the nodes that head for a job stay with it, at most ``count``."""
    if _are_alike(heading):
        return heading[:count]
    own = [node for node in heading if _may_stay(node, job, at_unix_s)]
    labels = Counter(node.label for node in own)
    own.sort(
        key=lambda node: (
            node.health is Health.DRAINING,
            _KEEPS.index(node.state),
            -labels[node.label],  # who is alone in its part of the network goes first
            node.label,
            node.node_id,
        )
    )
    return own[:count]


def _are_alike(nodes: Sequence[NodeStatus]) -> bool:
    """Whether nothing but the id tells them apart, by which they are in order: the usual case, and the quickest."""
    states = [node.state for node in nodes]
    is_one_place = len({node.label for node in nodes}) < 2
    return is_one_place and states.count(NodeState.WORKING) == len(states) and all(n.health is Health.OK for n in nodes)


def _may_stay(node: NodeStatus, job: str, at_unix_s: float) -> bool:
    """Whether a node that heads for a job can go on doing so; whatever it has refused, it works."""
    return node.state is NodeState.WORKING or _may_be_lent(node, job, at_unix_s)


def _may_be_lent(node: NodeStatus, job: str, at_unix_s: float) -> bool:
    return node.health is Health.OK and not node.refuses(job, at_unix_s)


def _swapped(
    usable: Sequence[NodeStatus],
    place: dict[str, str],
    groups: _Groups,
    job: str,
    at_unix_s: float,
) -> NodeStatus | None:
    """A node of a job that gives one anyway, in exchange for the one that it was to give and that refuses ``job``."""
    for node in usable:
        if place[node.node_id] or not node.heads_for or not _may_stay(node, node.heads_for, at_unix_s):
            continue
        giver = groups[node.heads_for]
        other = next((each for each in reversed(giver) if _may_be_lent(each, job, at_unix_s)), None)
        if other is not None and not _may_be_lent(node, job, at_unix_s):
            giver[giver.index(other)] = node
            place[node.node_id], place[other.node_id] = node.heads_for, ""
            return other
    return None


def _neediest(snapshot: ClusterSnapshot, groups: _Groups, at_unix_s: float) -> list[str]:
    """The order in which jobs choose: those that some node refuses, which have less to choose from, then those below
    their minimum.
    """
    nodes = (*snapshot.unsettled_nodes, *snapshot.unsound_nodes)
    refused = {each.job for node in nodes for each in node.refusals if node.refuses(each.job, at_unix_s)}
    least = {job.name: job.least_nodes for job in snapshot.jobs}
    return sorted(groups.changing, key=lambda job: (job not in refused, len(groups[job]) >= least[job], job))


def _nearest_first(
    free: Iterable[NodeStatus], job: str, group: Sequence[NodeStatus], own_hosts: set[str]
) -> list[NodeStatus]:
    """The best ones to add to a group first."""
    labels = Counter(node.label for node in group)
    return sorted(
        free,
        key=lambda node: (
            _TAKEN.index(node.state),
            job not in node.keeps,
            node.host not in own_hosts,
            -labels[node.label],
            node.label,
            node.node_id,
        ),
    )
