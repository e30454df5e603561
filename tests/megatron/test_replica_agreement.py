"""What replicas of several members agree on, whatever each of them says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid, ReplicaAgreement, agree
from unicron_elastic.engine.protocol.replica_layout import ReplicaShape

PAIR = ReplicaShape(tensor=1, pipeline=2)
ALL = frozenset({0, 1})  # buckets


def said(seat: int, replica: str | None = "0/0", state: int | None = 3, **what: object) -> MemberSaid:
    return MemberSaid(seat=seat, replica=replica, state=state, buckets=2, **what)  # type: ignore[arg-type]


def pairs(*members: MemberSaid) -> ReplicaAgreement:
    return agree(members, shape=PAIR, micro_batches=4)


@st.composite
def steps_under_way(draw: st.DrawFn) -> tuple[list[MemberSaid], ReplicaShape, int, int]:
    """A world in the middle of a step, maybe with spares and newcomers behind it."""
    shape = draw(st.builds(ReplicaShape, tensor=st.integers(1, 2), pipeline=st.integers(1, 2)))
    unit = draw(st.sampled_from([1, 1, 2]))
    units, replicas = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    owner = draw(st.lists(st.integers(0, replicas), min_size=units, max_size=units))
    members: list[MemberSaid] = []
    for number in range(replicas):
        held = frozenset(each * unit + index for each, of in enumerate(owner) if of == number for index in range(unit))
        for seat in range(shape.seats):
            if number == 0 or draw(st.integers(0, 9)):
                done = frozenset(draw(st.sets(st.integers(0, 1))))
                is_spoiled = not draw(st.integers(0, 4))
                members.append(said(seat, f"0/{number}", held=frozenset() if is_spoiled else held, done=done))
    seats = st.integers(0, shape.seats - 1)
    members += [said(seat, None, state) for seat, state in draw(st.lists(st.tuples(seats, st.none()), max_size=3))]
    return draw(st.permutations(members)), shape, units * unit, unit


@given(steps_under_way())
def test_each_micro_batch_of_an_open_step_is_held_exactly_once(
    case: tuple[list[MemberSaid], ReplicaShape, int, int],
) -> None:
    members, shape, micro_batches, unit = case
    agreed = agree(members, shape=shape, micro_batches=micro_batches, unit=unit)
    if not agreed.is_even:
        return
    layout = agreed.layout
    is_open = any(
        all(bucket not in members[member].done for member in layout.in_seat(seat))
        for seat in range(shape.seats)
        for bucket in range(2)
    )
    held = [index for some in agreed.held for index in some]
    dealt = [index for some in agreed.dealt for index in some]
    assert sorted(held + dealt) == (list(range(micro_batches)) if is_open else sorted(held))
    for number, trains in enumerate(layout.replicas):
        assert len(agreed.dealt[number]) % unit == 0
        assert agreed.held[number] in ({members[member].held for member in trains}, frozenset()) or all(
            members[member].held == agreed.held[number] for member in trains
        )
    for seat in range(shape.seats):
        for bucket in range(2):
            having = [member for member in layout.in_seat(seat) if bucket in members[member].done]
            sources = [source for of, which, source in agreed.fill if (of, which) == (seat, bucket)]
            assert sources == having[: 0 < len(having) < len(layout.replicas)]


@given(steps_under_way())
def test_who_is_behind_pulls_from_its_seat(case: tuple[list[MemberSaid], ReplicaShape, int, int]) -> None:
    members, shape, micro_batches, unit = case
    agreed = agree(members, shape=shape, micro_batches=micro_batches, unit=unit)
    training = {member for trains in agreed.layout.replicas for member in trains}
    assert agreed.step == 3
    assert set(agreed.pull) == {member for member in training if members[member].state != 3}
    for member, source in zip(agreed.pull, agreed.sources, strict=True):
        assert members[source].seat == members[member].seat
        assert members[source].state == 3
        assert source in training


@given(steps_under_way(), st.booleans())
def test_in_a_later_round_all_are_as_they_were_laid_out(
    case: tuple[list[MemberSaid], ReplicaShape, int, int], has: bool
) -> None:
    members, shape, micro_batches, unit = case
    first = agree(members, shape=shape, micro_batches=micro_batches, unit=unit)
    now = [replace(each, state=3, done=ALL if has else each.done) for each in members]
    assert agree(now, shape=shape, micro_batches=micro_batches, unit=unit, layout=first.layout).layout is first.layout


# -- a step under way --------------------------------------------------------------------------------------------------


def test_what_all_members_of_a_replica_have_stays_and_the_rest_is_dealt() -> None:
    agreed = pairs(said(0, held=frozenset({0, 2})), said(1, held=frozenset({0, 2})), said(0, "0/1"))
    assert (agreed.held, agreed.dealt, agreed.layout.spares) == ((frozenset({0, 2}),), ((1, 3),), (2,))


def test_what_one_member_lost_is_dropped_by_all() -> None:
    agreed = pairs(said(0, held=frozenset({0, 2})), said(1))
    assert (agreed.held, agreed.dealt) == ((frozenset(),), ((0, 1, 2, 3),))


def test_what_is_in_the_sums_of_leftovers_is_dropped() -> None:
    agreed = pairs(said(0, held=frozenset({0})), said(1, "0/1", held=frozenset({0})))
    assert agreed.layout.names == (None,)
    assert agreed.held == (frozenset(),)


def test_nothing_is_computed_again_if_every_bucket_is_done_somewhere() -> None:
    first = [said(0, done=ALL, tokens=9), said(1, done=frozenset({0}))]
    agreed = pairs(*first, said(0, "0/1"), said(1, "0/1", done=frozenset({1}), tokens=9))
    assert agreed.dealt == ((), ())
    assert agreed.fill == ((0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 3))
    assert agreed.tokens == 9


def test_one_open_bucket_of_one_seat_is_enough_to_compute_the_lost() -> None:
    agreed = pairs(said(0, done=ALL, held=frozenset({0})), said(1, done=frozenset({0}), held=frozenset({0})))
    assert agreed.dealt == ((1, 2, 3),)


# -- somebody is ahead -------------------------------------------------------------------------------------------------


def test_replicas_with_all_gradients_make_the_step_that_others_know_to_be_complete() -> None:
    first = [said(0, is_finished=True, is_committed=True), said(1, is_finished=True)]
    agreed = pairs(*first, said(0, "0/1", is_finished=True), said(1, "0/1", is_finished=True))
    assert (agreed.step, agreed.advance, agreed.pull) == (4, (0, 1, 2, 3), ())


def test_one_member_alone_makes_its_step_only_if_the_norm_is_known() -> None:
    ahead, late = said(0, state=4, norm=1.5), said(1, is_finished=True)
    agreed = pairs(ahead, late)
    assert (agreed.advance, agreed.norm) == ((1,), 1.5)
    with pytest.raises(NoStateLeft, match="after 4 steps of part 1"):
        pairs(said(0, state=4), late)
    other = [said(0, "0/1", 4), said(1, "0/1", 4)]
    agreed = pairs(said(0, state=4), late, *other)
    assert (agreed.advance, agreed.pull, agreed.sources) == ((), (1,), (3,))


def test_who_lacks_the_sum_over_its_replica_takes_the_state() -> None:
    late = [said(0, "0/1", done=ALL), said(1, "0/1", done=ALL)]
    agreed = pairs(said(0, state=4, norm=1.0), said(1, state=4, norm=1.0), *late)
    assert (agreed.advance, agreed.pull, agreed.sources) == ((), (2, 3), (0, 1))


def test_survivors_of_two_replicas_make_the_step_together() -> None:
    agreed = pairs(said(0, is_committed=True, is_finished=True), said(1, "0/1", is_finished=True))
    assert agreed.advance == (0, 1)


def test_a_spare_with_the_state_is_used_rather_than_a_replica_without() -> None:
    """The replica's other member was about to take the state from one that is lost now."""
    agreed = pairs(said(0, "3/1"), said(1, "3/1", None), said(1, None))
    assert (agreed.layout.replicas, agreed.layout.spares) == (((0, 2),), (1,))
    assert agreed.is_even


# -- nothing is left ---------------------------------------------------------------------------------------------------


def test_newcomers_alone_have_no_state() -> None:
    with pytest.raises(NoStateLeft, match="no member"):
        pairs(said(0, None, None), said(1, None, None))


def test_without_a_seat_there_is_no_replica() -> None:
    with pytest.raises(NoStateLeft, match="of some part nobody is left"):
        pairs(said(0), said(0, "0/1"))
    with pytest.raises(NoStateLeft, match="after 3 steps of part 1"):
        pairs(said(0), said(1, None, None))


def test_the_state_comes_from_the_same_node_if_it_is_there_and_from_who_gives_least_else() -> None:
    members = [said(0, f"0/{number}") for number in range(3)] + [said(0, None, None) for _ in range(3)]
    nodes = ["a", "b", "c", "c", "x", "x"]
    agreed = agree(members, shape=ReplicaShape(tensor=1, pipeline=1), micro_batches=6, nodes=nodes)
    assert (agreed.pull, agreed.sources) == ((3, 4, 5), (2, 0, 1))
