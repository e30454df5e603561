"""What a node decides while it cannot see the store: docs/assumptions.md as a table."""

from __future__ import annotations

import pytest

from unicron_elastic.membership.decision import Decision, why_not


def test_who_sees_decides_everything() -> None:
    assert {why_not(decision, "") for decision in Decision} == {""}


@pytest.mark.parametrize(
    ("decision", "does"),
    [
        (Decision.TRAIN, True),
        (Decision.HEED_FAULT, True),
        (Decision.MEET, False),
        (Decision.TAKE_FOR_LOST, False),
        (Decision.REMOVE_NODE, False),
        (Decision.COORDINATE, False),
        (Decision.LEAVE, False),
    ],
)
def test_who_is_blind_trains_and_heeds_faults_and_decides_nothing_else(decision: Decision, does: bool) -> None:
    why = why_not(decision, "etcd is silent", blind_for_s=599.0, patience_s=600.0)
    words = "The cluster's store cannot be seen (etcd is silent): until it can, this node does not "
    assert why == ("" if does else f"{words}{decision.value}.")


def test_patience_ends_training_and_nothing_else_that_was_possible() -> None:
    assert why_not(Decision.TRAIN, "etcd is silent", 600.0, 600.0).endswith("this node does not train.")
    assert why_not(Decision.HEED_FAULT, "etcd is silent", 600.0, 600.0) == ""
