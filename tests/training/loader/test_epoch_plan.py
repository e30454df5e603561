from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.training.loader.epoch_plan import EpochPlan

PLANS = st.builds(EpochPlan, batches=st.integers(1, 60), accumulated=st.integers(1, 5), ranks=st.integers(1, 5))


@given(PLANS)
def test_each_batch_of_an_epoch_is_in_one_step(plan: EpochPlan) -> None:
    steps = range(plan.steps, 2 * plan.steps)
    dealt = [plan.batch(step, index) for step in steps for index in range(plan.micro_batches(step))]
    assert dealt == [(1, number) for number in range(plan.batches)]


@given(PLANS)
def test_the_loop_of_one_process_counts_as_many_steps(plan: EpochPlan) -> None:
    assert -(-plan.turns // plan.accumulated) == plan.steps


@given(PLANS)
def test_all_steps_are_whole_but_an_epochs_last(plan: EpochPlan) -> None:
    assert {plan.micro_batches(step) for step in range(plan.steps - 1)} <= {plan.per_step}
    assert 1 <= plan.micro_batches(plan.steps - 1) <= plan.per_step


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (0, -1), (0, 4), (2, 2)])
def test_there_is_no_other_batch(step: int, index: int) -> None:
    plan = EpochPlan(batches=10, accumulated=2, ranks=2)
    assert plan.batch(2, 1) == (0, 9)
    with pytest.raises(ValueError, match=f"no micro-batch {index} of step {step}"):
        plan.batch(step, index)
