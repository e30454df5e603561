"""The user's options as the decisions take them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unicron_elastic.launcher.agent.core.job import policy_of
from unicron_elastic.launcher.config.options import Options


@pytest.mark.parametrize(
    ("on_fault", "on_hang", "acts_on_hangs", "isolates"),
    [
        ("act", "act", True, True),
        ("act", "observe", False, True),
        ("observe", "act", False, False),
        ("observe", "observe", False, False),
    ],
)
def test_to_observe_faults_is_to_observe_hangs_and_nodes(
    on_fault: str, on_hang: str, acts_on_hangs: bool, isolates: bool
) -> None:
    spec: Any = SimpleNamespace(max_restarts=3)
    policy = policy_of(spec, Options(on_fault=on_fault, on_hang=on_hang), 30)
    assert (policy.acts_on_hangs, policy.isolates, policy.max_restarts) == (acts_on_hangs, isolates, 3)
