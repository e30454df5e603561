"""Which GPU is which ``cuda:N``."""

from __future__ import annotations

import pytest

from unicron_elastic.health.gpu.session import cuda_ordinals

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, {0: 0, 1: 1, 2: 2}),
        ("", {}),
        ("0,1,2", {0: 0, 1: 1, 2: 2}),
        ("2, 0", {2: 0, 0: 1}),
        ("GPU-cccc-3,GPU-aab", {2: 0, 1: 1}),
        ("1,-1,2", {1: 0}),
        ("1,7,2", {1: 0}),
        ("1,1", {1: 0}),
        ("GPU-aa", {}),  # stands for two
        ("NoDevFiles", {}),
        ("MIG-1234", {}),
        ("²", {}),
    ],
)
def test_the_list_ends_at_its_first_invalid_entry(visible: str | None, expected: dict[int, int]) -> None:
    assert cuda_ordinals(UUIDS, visible) == expected
