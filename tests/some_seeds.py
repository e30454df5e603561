"""The numbers by which randomised cases differ: a few in each run of the tests, all of them with the slow ones."""

from __future__ import annotations

from typing import Any

import pytest


def some_seeds(each_run: int, of: int) -> list[Any]:
    """Return ``of`` numbers from 0, of which all but the first ``each_run`` are slow."""
    return [*range(each_run), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(each_run, of))]
