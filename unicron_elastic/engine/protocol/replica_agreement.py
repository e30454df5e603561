"""What the members of a new world agree on, from what each says of itself: pure, so that all conclude the same.

It is the agreement of ``unicron_elastic.training`` for replicas of several processes. A micro-batch counts as computed
if all members of a replica have its gradients; gradients are reduced seat by seat, over all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.replica_layout import Cut, FormerPlace, ReplicaLayout, ReplicaShape, lay_out
from unicron_elastic.engine.protocol.shares import deal


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSaid:
    """What one member says of itself.

    ``replica`` is the name of the replica that it trains in; None: it waits, or is new. ``state`` is how many optimizer
    steps its parameters have behind them, and so the number of the step it is in; None: it has no state that others
    know. ``held``: the micro-batches of that step whose gradients it has summed up. ``done``: those of its ``buckets``
    of that step which it has, reduced over all replicas. ``is_finished``: it has all gradients of that step, also what
    is summed up within a replica. ``is_committed``: it knows that all members have. ``tokens``: of all its
    micro-batches, if it knows, as who has a bucket does. ``norm``: of the gradients of the step that it committed last,
    if it knows. ``cuts``: the parts of the distributed optimizer's state that it has (``shards``). ``is_between``: its
    script has the step before behind it, and has not begun this one.
    """

    seat: int
    replica: str | None
    state: int | None
    buckets: int
    held: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    is_finished: bool = False
    is_committed: bool = False
    tokens: int | None = None
    norm: float | None = None
    cuts: tuple[Cut, ...] = ()
    is_between: bool = False

    @property
    def heads_for(self) -> int:
        """The state that it has, or is sure to have next; -1 without any."""
        return -1 if self.state is None else self.state + self.is_committed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAgreement:
    """What happens next, by index of the member in the new world.

    Somebody may be behind: those who ``advance`` have all gradients of the step before, and make its optimizer step
    first; with the ``norm`` if anybody knows it, and else nobody has begun to. Else those who ``pull`` take the state
    of step ``step``, each from the member beside it in ``sources``, the nearest that has it, and know the ``norm`` of
    the step before. Then all say again where they are. If nobody is behind, ``fill`` are the (seat, bucket, source) of
    buckets that some in the seat have and others need; ``tokens`` those of the step, if anybody knows; ``held`` are the
    micro-batches, by replica, whose gradients stay; and ``dealt`` those that each replica computes besides, for the
    buckets that nobody in some seat has. ``cuts`` are what each said, and ``between`` who said that it is.
    """

    layout: ReplicaLayout
    step: int
    advance: tuple[int, ...] = ()
    tokens: int | None = None
    norm: float | None = None
    cuts: tuple[tuple[Cut, ...], ...] = ()
    pull: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    fill: tuple[tuple[int, int, int], ...] = ()
    held: tuple[frozenset[int], ...] = field(default=())
    dealt: tuple[tuple[int, ...], ...] = field(default=())
    between: frozenset[int] = frozenset()

    @property
    def is_even(self) -> bool:
        """Whether all who train are in the same step with the same parameters."""
        return not self.pull and not self.advance


def agree(
    said: Sequence[MemberSaid],
    *,
    shape: ReplicaShape,
    micro_batches: int,
    unit: int = 1,
    layout: ReplicaLayout | None = None,
    nodes: Sequence[str] = (),
) -> ReplicaAgreement:
    """The agreement of those who ``said`` this, for steps of so many micro-batches, dealt in units of so many.

    ``layout``: the one of this world, if they have agreed on it already. ``nodes``: where each of them is, if that is
    known. Raises NoStateLeft, also if too few are left for one replica.
    """
    step = max(each.heads_for for each in said)
    if step < 0:
        raise NoStateLeft("no member of the new world has the training state in its memory")
    if layout is None:
        layout = lay_out(
            shape, [FormerPlace(each.seat, each.replica, has_state=_is_ready(each, step)) for each in said]
        )
    if not layout.replicas:
        raise NoStateLeft(
            f"a replica takes {shape.seats} ranks, each with a part of the model of its own, and of some part nobody "
            "is left"
        )
    if any(said[member].state != step for members in layout.replicas for member in members):
        return _catch_up(said, layout, step, nodes)
    held = tuple(_held(said, layout, number) for number in range(len(layout.replicas)))
    is_open = False
    fill: list[tuple[int, int, int]] = []
    for seat in range(shape.seats):
        members = layout.in_seat(seat)
        for bucket in range(said[members[0]].buckets):
            having = [member for member in members if bucket in said[member].done]
            is_open = is_open or not having
            if having and len(having) < len(members):
                fill.append((seat, bucket, having[0]))
    lost = sorted(frozenset(range(micro_batches)).difference(*held)) if is_open else []
    units = deal(range(len(lost) // unit), [len(each) // unit for each in held])
    dealt = tuple(tuple(index for each in some for index in lost[each * unit : (each + 1) * unit]) for some in units)
    return ReplicaAgreement(
        layout=layout,
        step=step,
        tokens=next((each.tokens for each in said if each.state == step and each.tokens is not None), None),
        fill=tuple(fill),
        held=held,
        dealt=dealt,
        cuts=tuple(each.cuts for each in said),
        between=frozenset(member for member, each in enumerate(said) if each.is_between),
    )


def _held(said: Sequence[MemberSaid], layout: ReplicaLayout, replica: int) -> frozenset[int]:
    """What a replica has summed up, if all its members have the same: what else is in a sum cannot be taken out."""
    held = {said[member].held for member in layout.replicas[replica]}
    return held.pop() if layout.names[replica] is not None and len(held) == 1 else frozenset()


def _catch_up(said: Sequence[MemberSaid], layout: ReplicaLayout, step: int, nodes: Sequence[str]) -> ReplicaAgreement:
    """Those who have all gradients of the step before make that step; then the others take the state.

    The norm is summed up over the members of a replica, so without it one of them alone cannot make the step.
    """
    ahead = [each for each in said if each.heads_for == step]
    norm = next((each.norm for each in ahead if each.norm is not None), None)
    ready = {member for member, each in enumerate(said) if each.state == step - 1 and _is_ready(each, step)}
    advance = tuple(
        member
        for members in layout.replicas
        for member in members
        if member in ready and (norm is not None or ready.issuperset(members))
    )
    if advance:
        cuts = tuple(each.cuts for each in said)
        return ReplicaAgreement(layout=layout, step=step, advance=advance, norm=norm, cuts=cuts)
    pull: list[int] = []
    sources: list[int] = []
    for seat in range(layout.shape.seats):
        members = layout.in_seat(seat)
        behind = [member for member in members if said[member].state != step]
        having = [member for member in members if said[member].state == step]
        if behind and not having:
            raise NoStateLeft(f"nobody is left with the state after {step} steps of part {seat} of the model")
        for member in behind:
            sources.append(_nearest(member, having, sources, nodes))
        pull += behind
    return ReplicaAgreement(layout=layout, step=step, norm=norm, pull=tuple(pull), sources=tuple(sources))


def _nearest(member: int, having: Sequence[int], busy: Sequence[int], nodes: Sequence[str]) -> int:
    """Choose who gives the state: one on the same node, and of these one that gives it to the fewest others yet."""
    return min(having, key=lambda source: (bool(nodes) and nodes[source] != nodes[member], busy.count(source), source))


def _is_ready(said: MemberSaid, step: int) -> bool:
    """Whether it has the state ``step``, or all gradients of the step that leads there."""
    if said.heads_for == step:
        return True
    return said.state == step - 1 and said.is_finished
