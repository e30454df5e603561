"""What a rank keeps of the reductions between two steps, for others who have not got their result."""

from __future__ import annotations

import pytest
import torch

from unicron_elastic.base.world import Member, World
from unicron_elastic.training.group.reports import Reports


def _reported(reports: Reports, value: float) -> None:
    reports.begin("float64 []", torch.zeros(1))
    reports.end((torch.tensor([value]), ()))


def test_a_result_is_told_to_others_as_long_as_one_of_them_may_want_it() -> None:
    reports = Reports()
    reports.begin_shares(None, (8, 3))
    _reported(reports, 1.5)
    reports.begin(
        "float64 []", torch.zeros(1)
    )  # another reduction, in which somebody may be who has not got the one before
    told = reports.last()
    assert told is not None
    assert (told.until, told.state, told.number) == (8, 3, 1)


def test_a_result_of_an_earlier_step_is_not_carried_along() -> None:
    reports = Reports()
    reports.begin_shares(None, (8, 3))
    _reported(reports, 1.5)
    reports.begin_shares(None, (8, 4))
    assert reports.last() is None


def test_who_is_lost_of_the_first_world_is_told_by_all_ranks_of_its_replica(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    reports = Reports(seats=2)
    members = tuple(Member(name=name, node="n", local_rank=number) for number, name in enumerate(("0", "4")))
    lost = reports.lost(World(number=2, members=members, store="h:1"))
    assert lost == {1}
    reports.begin("float64 []", torch.zeros(1))
    reports.end((torch.tensor([1.0]), lost))
    reports.tell(0)
    assert "the share of ranks 2, 3, lost since then, is not in it" in capsys.readouterr().err
