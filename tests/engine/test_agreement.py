"""What the members of a new world agree on, whatever each of them says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.engine.protocol.agreement import Agreement, NoStateLeft, agree
from unicron_elastic.engine.protocol.said import MismatchError, Said, read, written


@st.composite
def steps_under_way(draw: st.DrawFn) -> tuple[list[Said], int]:
    """Any world that can come to be: survivors at most one step apart, and newcomers with an older state or none.

    Each step trains parameters of its own choice.
    """
    micro_batches = draw(st.integers(1, 20))
    layouts = {0: (frozenset({0}), draw(st.integers(1, 5))), 1: (frozenset({0, 1}), draw(st.integers(1, 5)))}
    size, step = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    states = draw(
        st.lists(st.sampled_from([step, step, step - 1, max(step - 2, 0), None]), min_size=size, max_size=size)
    )
    if step not in states:
        states[draw(st.integers(0, size - 1))] = step
    # Nobody leaves a step before somebody has all of its gradients, so those of a rank behind may be partial.
    owner = draw(st.lists(st.integers(0, size), min_size=micro_batches, max_size=micro_batches))
    which = {number: layouts[draw(st.integers(0, 1))] for number in range(step + 1)}
    said = []
    for rank, state in enumerate(states):
        if state is None:
            said.append(Said(state=None, start=0))
            continue
        trained, buckets = which[state]
        held = frozenset(index for index, of in enumerate(owner) if of == rank)
        done = frozenset(draw(st.sets(st.integers(0, buckets - 1))))
        keeps_last = draw(st.booleans()) and which.get(state - 1) == which[state]
        said.append(Said(state=state, held=held, done=done, keeps_last=keeps_last, trained=trained, buckets=buckets))
    return said, micro_batches


def _open_micro_batches(agreement: Agreement, said: list[Said]) -> list[int]:
    """Those of open buckets, as often as somebody holds them afterwards."""
    assert agreement.open
    before = [index for each in said for index in each.held]
    return sorted(before + [index for dealt in agreement.dealt for index in dealt])


@given(steps_under_way())
def test_each_micro_batch_of_an_open_bucket_is_held_exactly_once(case: tuple[list[Said], int]) -> None:
    said, micro_batches = case
    agreement = agree(said, micro_batches=micro_batches)
    if agreement.is_even and agreement.open:
        assert _open_micro_batches(agreement, said) == list(range(micro_batches))


@given(steps_under_way())
def test_nothing_is_computed_again_if_every_bucket_is_done_somewhere(case: tuple[list[Said], int]) -> None:
    said, micro_batches = case
    agreement = agree(said, micro_batches=micro_batches)
    if not agreement.is_even:
        return
    done = frozenset().union(*(each.done for each in said))
    buckets = said[0].buckets
    assert set(agreement.open) == set(range(buckets)) - done
    assert sum(map(len, agreement.dealt)) == (
        micro_batches - len(frozenset().union(*(s.held for s in said))) if agreement.open else 0
    )


@given(steps_under_way())
def test_the_lost_micro_batches_are_dealt_evenly(case: tuple[list[Said], int]) -> None:
    said, micro_batches = case
    agreement = agree(said, micro_batches=micro_batches)
    if not agreement.is_even:
        return
    after = [len(each.held) + len(more) for each, more in zip(said, agreement.dealt, strict=True)]
    for rank, more in enumerate(agreement.dealt):
        if more:  # who got one could not have passed it on to anybody with two fewer
            assert after[rank] <= min(after) + 1


@given(steps_under_way())
def test_who_lacks_a_bucket_gets_it_from_one_that_has_it(case: tuple[list[Said], int]) -> None:
    said, micro_batches = case
    agreement = agree(said, micro_batches=micro_batches)
    if not agreement.is_even:
        return
    filled = dict(agreement.fill)
    for bucket, source in filled.items():
        assert bucket in said[source].done
    for each in said:
        assert each.done | set(filled) | set(agreement.open) == set(range(each.buckets))
        assert not set(agreement.open) & (each.done | set(filled))


@given(steps_under_way())
def test_whoever_is_behind_pulls_from_a_rank_that_is_not_or_gets_the_gradients(
    case: tuple[list[Said], int],
) -> None:
    said, micro_batches = case
    agreement = agree(said, micro_batches=micro_batches)
    step = max(each.state for each in said if each.state is not None)
    behind = {rank for rank, each in enumerate(said) if each.state != step}
    assert agreement.step == step
    assert set(agreement.pull) | set(agreement.advance) == behind
    assert not set(agreement.pull) & set(agreement.advance)
    assert not agreement.pull or agreement.sources
    assert all(said[source].state == step for source in agreement.sources)
    for rank in agreement.advance:
        assert said[rank].state == step - 1
        givers = [source for source, destination in agreement.gradients if destination == rank]
        if said[rank].has_all:
            assert not givers
        else:
            assert len(givers) == 1
            giver = said[givers[0]]
            assert (giver.state == step and giver.keeps_last) or (giver.state == step - 1 and giver.has_all)
            assert giver.trained == said[rank].trained


def test_nobody_makes_the_step_before_with_gradients_of_other_parameters() -> None:
    before, now = frozenset({0}), frozenset({0, 1})
    late, ahead = Said(state=3, trained=before), Said(state=4, trained=now, keeps_last=True)
    assert agree([late, ahead], micro_batches=4).pull == (0,)
    assert agree([late, ahead, Said(state=4, trained=before, keeps_last=True)], micro_batches=4).gradients == ((2, 0),)


def test_each_counts_the_buckets_of_its_own_step() -> None:
    late = Said(state=3, trained=frozenset({0}), done=frozenset({0, 1}), buckets=2)
    agreement = agree([late, Said(state=4, trained=frozenset({0, 1}), buckets=3)], micro_batches=4)
    assert (agreement.advance, agreement.pull, agreement.gradients) == ((0,), (), ())


def test_all_begin_with_what_the_first_has_if_nobody_has_trained() -> None:
    agreement = agree([Said(state=None, start=3), Said(state=None, start=0)], micro_batches=4)
    assert (agreement.begins, agreement.step, agreement.pull, agreement.sources) == (True, 3, (0, 1), (0,))


def test_a_newcomer_does_not_say_with_what_all_begin() -> None:
    said = [Said(state=None), Said(state=None, start=3), Said(state=None, start=0)]
    agreement = agree(said, micro_batches=4)
    assert (agreement.begins, agreement.step, agreement.pull, agreement.sources) == (True, 3, (0, 1, 2), (1,))


def test_without_state_anywhere_there_is_nothing_to_agree_on() -> None:
    with pytest.raises(NoStateLeft, match="no member"):
        agree([Said(state=None), Said(state=None)], micro_batches=4)


IN_THIRD = Said(state=7, until=9)  # of three calls of run.steps(), with totals of 3, 6 and 9
NEWCOMER = Said(state=None, is_new=True)


@pytest.mark.parametrize("until", [3, 6, 12])
@pytest.mark.parametrize("state", [None, 5])
def test_a_newcomer_in_another_call_leaves_and_the_others_go_on(until: int, state: int | None) -> None:
    agreement = agree([IN_THIRD, replace(NEWCOMER, until=until, state=state), IN_THIRD], micro_batches=4)
    assert (agreement.leave, agreement.until, agreement.step, agreement.is_even) == ((1,), 9, 7, False)
    assert (agreement.pull, agreement.advance) == ((), ())


def test_a_newcomer_in_the_same_call_takes_the_state() -> None:
    agreement = agree([IN_THIRD, replace(NEWCOMER, until=9)], micro_batches=4)
    assert (agreement.leave, agreement.pull, agreement.sources) == ((), (1,), (0,))


def test_a_newcomer_leaves_if_the_others_meet_between_two_steps() -> None:
    between = replace(IN_THIRD, is_between=True)
    assert agree([between, between, replace(NEWCOMER, until=9)], micro_batches=4).leave == (2,)
    assert agree([IN_THIRD, between, replace(NEWCOMER, until=9)], micro_batches=4).leave == (2,)


def test_members_are_never_sent_away() -> None:
    behind = Said(state=6, until=6)
    agreement = agree([IN_THIRD, behind, replace(IN_THIRD, is_between=True)], micro_batches=4)
    assert (agreement.leave, agreement.pull) == ((), (1,))


def test_newcomers_that_have_copied_the_state_go_on_if_nobody_else_is_left() -> None:
    copied = Said(state=7, until=9, is_new=True)
    agreement = agree([copied, replace(NEWCOMER, until=9)], micro_batches=4)
    assert (agreement.leave, agreement.pull, agreement.sources) == ((), (1,), (0,))


@pytest.mark.parametrize(
    ("copied", "pull"), [({"model": 1, "ema": 2}, ()), ({"model": 1, "ema": 3}, (1,)), ({"more": 4}, ()), ({}, ())]
)
def test_a_newcomer_whose_copy_is_not_what_the_others_have_takes_the_state_again(
    copied: dict[str, int], pull: tuple[int, ...]
) -> None:
    here = replace(IN_THIRD, digests={"model": 1, "ema": 2})
    newcomer = replace(IN_THIRD, is_new=True, digests=copied)
    agreement = agree([IN_THIRD, newcomer, here], micro_batches=4)  # the first says nothing of it
    assert (agreement.pull, agreement.sources[:1]) == (pull, (0,) if pull else ())
    assert read([written(newcomer, "")], "", newcomer) == [newcomer]


def test_a_newcomer_that_is_a_step_late_takes_the_state_as_nobody_can_compare_what_it_has() -> None:
    late = Said(state=6, until=9, is_new=True, digests={"model": 1})
    agreement = agree([replace(IN_THIRD, keeps_last=True), late], micro_batches=4)
    assert (agreement.pull, agreement.advance, agreement.gradients) == ((1,), (), ())


def test_whoever_has_not_heard_of_the_end_of_a_call_goes_on_to_the_next() -> None:
    agreement = agree([Said(state=6, until=6), Said(state=6, until=9)], micro_batches=4)
    assert (agreement.advance, agreement.pull, agreement.gradients, agreement.until) == ((0,), (), (), 9)


def test_whoever_lacks_the_last_step_of_the_call_before_gets_its_gradients() -> None:
    agreement = agree([Said(state=5, until=6), Said(state=6, until=9, keeps_last=True)], micro_batches=4)
    assert (agreement.advance, agreement.gradients, agreement.until) == ((0,), ((1, 0),), 9)


TERMS = "4 micro-batches and 2 parameters of 6 numbers (a)"
OTHERS = ("6 micro-batches and 2 parameters of 6 numbers (a)", "4 micro-batches and 3 parameters of 9 numbers (b)")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (OTHERS[0], "6 micro-batches, and this rank 4 micro-batches"),
        (OTHERS[1], r"3 parameters of 9 numbers \(b\), and this rank 2 parameters of 6 numbers \(a\)"),
    ],
)
def test_a_newcomer_that_trains_something_else_leaves_and_costs_the_others_nothing(other: str, why: str) -> None:
    member = Said(state=7, until=9, held=frozenset({0, 1}), micro_batches=4)
    stranger = Said(state=7, until=9, is_new=True)
    texts = [written(member, TERMS), written(member, TERMS), written(stranger, other)]
    said = read(texts, TERMS, member)
    assert said[:2] == [member, member]
    assert agree(said, micro_batches=4).leave == (2,)
    with pytest.raises(MismatchError, match="rank 0 trains something else: "):
        read(texts, other, stranger)
    with pytest.raises(MismatchError, match=f"rank 2 trains something else: {why}$"):
        read([*texts[:2], written(Said(state=7, until=9), other)], TERMS, member)  # it was there from the beginning


def test_of_newcomers_alone_nobody_is_right() -> None:
    newcomer = Said(state=7, until=9, is_new=True)
    texts = [written(newcomer, terms) for terms in (TERMS, OTHERS[0])]
    for terms in (TERMS, OTHERS[0]):
        with pytest.raises(MismatchError):
            read(texts, terms, newcomer)


def test_members_with_other_micro_batches_in_one_step_do_not_train_and_in_another_step_they_may_differ() -> None:
    first, other = Said(state=7, until=9, micro_batches=4), Said(state=7, until=9, micro_batches=6)
    begins = Said(state=None, start=7, until=9, micro_batches=6)
    late, done = Said(state=6, until=9, micro_batches=6), Said(state=9, until=9, micro_batches=6)
    for own, rest in [(first, [other]), (other, [first]), (first, [begins]), (begins, [late, first])]:
        said = [*rest, own]
        with pytest.raises(MismatchError, match=r"^in step 7 rank \d has [46] micro-batches, and this rank [46]$"):
            read([written(each, TERMS) for each in said], TERMS, own)
    for said in ([first, late], [late, first], [replace(done, micro_batches=4), done], [Said(state=None), first]):
        assert read([written(each, TERMS) for each in said], TERMS, said[0]) == said


def test_a_newcomer_with_other_micro_batches_in_the_others_step_leaves_and_costs_them_nothing() -> None:
    member, right = Said(state=7, until=9, micro_batches=4), Said(state=7, until=9, micro_batches=4, is_new=True)
    wrong = replace(right, micro_batches=6)
    said = [member, right, wrong]
    texts = [written(each, TERMS) for each in said]
    for own in (member, right):
        assert agree(read(texts, TERMS, own), micro_batches=4).leave == (2,)
    with pytest.raises(MismatchError, match=r"in step 7 rank 0 has 4 micro-batches, and this rank 6$"):
        read(texts, TERMS, wrong)
