"""Who trains together, and which rank Megatron-Core gives each of them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.engine.protocol.replica_layout import FormerPlace, ReplicaShape, lay_out

SHAPES = st.builds(ReplicaShape, tensor=st.integers(1, 4), pipeline=st.integers(1, 4))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[ReplicaShape, list[FormerPlace]]:
    """Any members that can meet: of a replica each seat is there once at most."""
    shape = draw(SHAPES)
    places: list[FormerPlace] = []
    for replica in range(draw(st.integers(0, 4))):
        there = draw(st.lists(st.booleans(), min_size=shape.seats, max_size=shape.seats))
        has_state = draw(st.booleans())
        places += [FormerPlace(seat, f"0/{replica}", has_state) for seat, is_there in enumerate(there) if is_there]
    alone = draw(st.lists(st.tuples(st.integers(0, shape.seats - 1), st.booleans()), max_size=8))
    places += [FormerPlace(seat, None, has_state) for seat, has_state in alone]
    return shape, draw(st.permutations(places))


# -- seats and ranks ---------------------------------------------------------------------------------------------------


@given(SHAPES, st.integers(1, 5))
def test_a_rank_is_of_one_seat_of_one_replica(shape: ReplicaShape, replicas: int) -> None:
    size = replicas * shape.seats
    for rank in range(size):
        seat, replica = shape.seat_of(rank, size)
        assert shape.rank_of(seat, replica, replicas) == rank
    assert {shape.seat_of(rank, size) for rank in range(size)} == set(product(range(shape.seats), range(replicas)))


def test_ranks_that_are_left_over_have_no_seat() -> None:
    with pytest.raises(ValueError, match=r"5 ranks are no multiple of the 2 .* \(tensor 1, pipeline 2\)"):
        ReplicaShape(tensor=1, pipeline=2).seat_of(0, 5)


@pytest.mark.parametrize(("tensor", "pipeline", "replicas"), [(1, 1, 3), (2, 1, 2), (1, 2, 3), (2, 2, 2), (2, 3, 4)])
def test_ranks_are_as_megatron_core_orders_them(tensor: int, pipeline: int, replicas: int) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    ranks = parallel_state.RankGenerator(tp=tensor, ep=1, dp=replicas, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    shape = ReplicaShape(tensor=tensor, pipeline=pipeline)
    assert ranks.get_ranks("tp-pp") == [
        [shape.rank_of(seat, replica, replicas) for seat in range(shape.seats)] for replica in range(replicas)
    ]
    assert ranks.get_ranks("dp") == [
        [shape.rank_of(seat, replica, replicas) for replica in range(replicas)] for seat in range(shape.seats)
    ]


# -- the layout --------------------------------------------------------------------------------------------------------


@given(worlds())
def test_each_member_trains_in_its_seat_or_waits(case: tuple[ReplicaShape, list[FormerPlace]]) -> None:
    shape, places = case
    layout = lay_out(shape, places)
    training = [member for members in layout.replicas for member in members]
    assert sorted([*training, *layout.spares]) == list(range(len(places)))
    assert layout.size == len(training)
    for members in layout.replicas:
        assert [places[member].seat for member in members] == list(range(shape.seats))
    ranks = [layout.rank_of(member) for member in training]
    assert sorted(rank for rank in ranks if rank is not None) == list(range(layout.size))
    for member in training:
        rank = layout.rank_of(member)
        assert rank is not None
        assert shape.seat_of(rank, layout.size) == (places[member].seat, layout.replica_of(member))
    assert all(layout.rank_of(member) is None for member in layout.spares)


@given(worlds())
def test_everybody_is_used_of_whom_a_replica_can_be_made(case: tuple[ReplicaShape, list[FormerPlace]]) -> None:
    shape, places = case
    have = [sum(place.seat == seat for place in places) for seat in range(shape.seats)]
    assert len(lay_out(shape, places).replicas) == min(have)


@given(worlds())
def test_whole_replicas_that_have_the_state_stay_and_others_have_no_name(
    case: tuple[ReplicaShape, list[FormerPlace]],
) -> None:
    shape, places = case
    layout = lay_out(shape, places)
    of: dict[str | None, list[int]] = {}
    for member, place in enumerate(places):
        of.setdefault(place.replica, []).append(member)
    whole = {
        name
        for name, members in of.items()
        if name is not None and len(members) == shape.seats and all(places[member].has_state for member in members)
    }
    assert {name for name in layout.names if name is not None} == whole
    for members, name in zip(layout.replicas, layout.names, strict=True):
        assert name is None or sorted(members) == sorted(of[name])
    assert [min(members) for members in layout.replicas] == sorted(min(members) for members in layout.replicas)


@given(worlds())
def test_who_has_the_state_is_used_first(case: tuple[ReplicaShape, list[FormerPlace]]) -> None:
    shape, places = case
    layout = lay_out(shape, places)
    for seat in range(shape.seats):
        used, waits = layout.in_seat(seat), [member for member in layout.spares if places[member].seat == seat]
        assert any(not places[member].has_state for member in used) <= all(not places[m].has_state for m in waits)


@given(worlds())
def test_those_who_trained_together_are_laid_out_so_again(case: tuple[ReplicaShape, list[FormerPlace]]) -> None:
    shape, places = case
    first = lay_out(shape, places)
    names = {member: f"2/{number}" for number, members in enumerate(first.replicas) for member in members}
    again = lay_out(shape, [FormerPlace(place.seat, names.get(member)) for member, place in enumerate(places)])
    assert (again.replicas, again.spares) == (first.replicas, first.spares)


def test_leftovers_of_two_replicas_make_a_new_one() -> None:
    places = [
        FormerPlace(0, "0/0"),
        FormerPlace(1, "0/1"),
        FormerPlace(0, "0/2"),
        FormerPlace(1, "0/2"),
        FormerPlace(1, None, has_state=False),
    ]
    layout = lay_out(ReplicaShape(tensor=1, pipeline=2), places)
    assert layout.replicas == ((0, 1), (2, 3))
    assert layout.names == (None, "0/2")
    assert layout.spares == (4,)


def test_a_newcomer_completes_the_replica_of_a_spare() -> None:
    places = [
        FormerPlace(0, None, has_state=False),
        FormerPlace(0, "0/0"),
        FormerPlace(1, "0/0"),
        FormerPlace(1, None, has_state=False),
    ]
    layout = lay_out(ReplicaShape(tensor=2, pipeline=1), places)
    assert layout.replicas == ((0, 3), (1, 2))
    assert layout.names == (None, "0/0")


def test_without_a_seat_nobody_trains() -> None:
    layout = lay_out(ReplicaShape(tensor=2, pipeline=1), [FormerPlace(0, "0/0"), FormerPlace(0, "0/1")])
    assert (layout.replicas, layout.spares, layout.size) == ((), (0, 1), 0)
