"""Copies of a plan that leave the checks out: they are what a checked one would be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_cluster import two_jobs

from unicron_elastic.planning.coordinate.published import Published


def plan() -> Published:
    found = two_jobs().published
    assert found is not None
    return found


def test_a_plan_without_times_is_as_if_it_had_been_made_so() -> None:
    found = replace(plan(), made_unix_s=5.0, moved_unix_s=(("a", 3.0),), look_again_unix_s=7.0)
    expected = replace(found, made_unix_s=0.0, moved_unix_s=(), losses=(), look_again_unix_s=None)
    bare = found.without_times()
    assert bare == expected
    assert hash(bare) == hash(expected)
    assert (bare.node_ids, bare.draining_ids, bare.job_of) == (found.node_ids, found.draining_ids, found.job_of)
    assert found.made_unix_s == 5.0


def test_a_plan_at_a_revision_is_the_same_plan() -> None:
    found = plan().at_revision(99)
    assert found == replace(plan(), revision=99)
    assert Published.from_json(found.to_json(), 99) == found
    with pytest.raises(ValueError, match="revision of the plan is -1"):
        plan().at_revision(-1)


def test_what_is_looked_up_is_not_stored() -> None:
    assert "node_ids" not in plan().to_json()
    assert "draining_ids" not in plan().to_json()


def test_seats_tell_their_jobs() -> None:
    found = plan()
    assert found.job_of == {seat.node_id: seat.job for seat in found.seats}
