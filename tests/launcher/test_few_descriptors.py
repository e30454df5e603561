"""A low limit of open files is told of at the start."""

from __future__ import annotations

import resource

import pytest

from unicron_elastic.launcher.common.few_descriptors import few_descriptors


@pytest.mark.parametrize(("may_open", "workers", "is_told"), [(44, 2, False), (43, 2, True), (44, 3, True)])
def test_it_is_told_if_the_limit_is_lower_than_what_is_needed(may_open: int, workers: int, is_told: bool) -> None:
    said = few_descriptors(workers, lambda _: (may_open, 4096))
    assert bool(said) == is_told
    assert not is_told or f"may have {may_open} files open" in said


def test_unlimited_is_enough() -> None:
    assert few_descriptors(1000, lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)) == ""
