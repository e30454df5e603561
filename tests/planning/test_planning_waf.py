"""F and G as in the Unicron paper (arXiv 2401.00134)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from situations import linear, task

from unicron_elastic.planning.model.tasks import Transition
from unicron_elastic.planning.model.waf import IMPOSSIBLE, MOVES, gains, keys, penalty_flop, standstill_s, waf_flops

KINDS = Transition(grow_s=1.0, shrink_s=2.0, replace_s=3.0, stop_s=4.0)
TASK = task("a", [0, 1, 5, 4, 9], weight=2.0, min_nodes=2, nodes=3, transition=KINDS)
LOST = replace(TASK, lost_nodes=1)
D_S = 100.0


def test_weighted_flops_count_from_the_minimum_on() -> None:
    assert [waf_flops(TASK, nodes) for nodes in range(6)] == [0.0, 0.0, 10e12, 8e12, 18e12, 0.0]


def test_the_penalty_is_what_was_earned_before() -> None:
    """G(t, x') = F(t, x') * D_running - [x' != x] * F(t, x) * D_transition, with F(t, 3) = 8e12."""
    expected = [-4 * 8.0, -np.inf, 10 * D_S - 2 * 8.0, 8 * D_S, 18 * D_S - 1 * 8.0]
    assert gains(TASK, 4, D_S, is_pin_held=True) == pytest.approx(np.array(expected) * 1e12)


def test_a_task_that_lost_a_node_stands_still_whatever_it_gets() -> None:
    expected = [-4 * 8.0, -np.inf, 10 * D_S - 2 * 8.0, 8 * D_S - 3 * 8.0, 18 * D_S - 1 * 8.0]
    assert gains(LOST, 4, D_S, is_pin_held=True) == pytest.approx(np.array(expected) * 1e12)
    assert [standstill_s(LOST, nodes) for nodes in (0, 2, 3, 4)] == [4.0, 2.0, 3.0, 1.0]
    assert [standstill_s(TASK, nodes) for nodes in (0, 2, 3, 4)] == [4.0, 2.0, 0.0, 1.0]
    assert penalty_flop(LOST, 3) == pytest.approx(3 * 8e12)


def test_a_task_that_is_left_with_no_node_trains_again_what_it_has_not_saved() -> None:
    unsaved = replace(TASK, transition=replace(KINDS, unsaved_s=50.0))
    expected = [-(4 + 50) * 8.0, -np.inf, 10 * D_S - 2 * 8.0, 8 * D_S, 18 * D_S - 1 * 8.0]
    assert gains(unsaved, 4, D_S, is_pin_held=True) == pytest.approx(np.array(expected) * 1e12)
    assert penalty_flop(unsaved, 0) == pytest.approx(54 * 8e12)
    assert penalty_flop(unsaved, 2) == penalty_flop(TASK, 2)


def test_a_task_that_earned_nothing_loses_nothing() -> None:
    waiting = replace(TASK, nodes=0)
    assert gains(waiting, 2, D_S, is_pin_held=True) == pytest.approx([0.0, -np.inf, 1e15])
    assert penalty_flop(waiting, 2) == standstill_s(waiting, 2) == 0.0
    below = replace(TASK, nodes=1)
    assert gains(below, 2, D_S, is_pin_held=True) == pytest.approx([0.0, -np.inf, 1e15])


def test_options_end_at_what_there_is() -> None:
    assert len(gains(TASK, 2, D_S, is_pin_held=True)) == 3
    assert np.flatnonzero(gains(replace(TASK, max_nodes=3), 4, D_S, is_pin_held=True) > -np.inf).tolist() == [0, 2, 3]


def test_units_leave_gaps() -> None:
    pipeline = task("p", [0, 3, 5], unit_nodes=3)
    assert gains(pipeline, 7, D_S, is_pin_held=True) == pytest.approx(
        [0, -np.inf, -np.inf, 3e14, -np.inf, -np.inf, 5e14, -np.inf]
    )


@pytest.mark.parametrize(("is_pin_held", "options"), [(True, [2]), (False, [0, 2])])
def test_a_pinned_task_has_its_pin(is_pin_held: bool, options: list[int]) -> None:
    pinned = replace(TASK, pinned_nodes=2)
    found = gains(pinned, 4, D_S, is_pin_held=is_pin_held)
    assert np.flatnonzero(found > -np.inf).tolist() == options
    paused = gains(replace(TASK, pinned_nodes=0), 4, D_S, is_pin_held=is_pin_held)
    assert np.flatnonzero(paused > -np.inf).tolist() == [0]


def test_keys_are_values_first_then_nodes_that_move() -> None:
    even = task("e", linear(3), nodes=2)
    found = keys(even, np.array([-8.0, 16.0, 16.0, -np.inf]), 3)
    assert found.tolist() == [-2 * MOVES - 2, 3 * MOVES - 1, 4 * MOVES, IMPOSSIBLE]
    lost = keys(replace(even, lost_nodes=1), np.array([0.0, 0.0, 0.0, 0.0]), 0)
    assert lost.tolist() == [-MOVES - 1, 2 * MOVES, MOVES - 1, MOVES - 2]
