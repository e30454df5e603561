"""Which findings of the probes concern the job, and which are only told."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_elastic.base.finding import Finding, Level, finding
from unicron_elastic.faults import Severity, Status
from unicron_elastic.launcher.agent.core.node import NodeWatch

GPU = "GPU 3 (0000:3b:00.0)"
OURS = "GPU 3 (cuda:0, 0000:3b:00.0)"


def _found(probe: str = "gpu.ecc", level: Level = Level.CRITICAL, subject: str = GPU) -> Finding:
    return finding(probe, level, Status.ECC_ERROR, subject, f"{subject} is broken.", at=5.0)


@pytest.mark.parametrize(
    ("found", "visible", "is_posted"),
    [
        (_found(), None, True),
        (_found(level=Level.WARN), None, False),
        (_found(probe="disk"), None, False),
        (_found(probe="gpu.driver", subject="NVIDIA's driver"), None, False),  # whoever runs goes on
        (_found(subject=OURS), "3", True),
        (_found(), "0,1", False),  # another job's
    ],
)
def test_only_what_breaks_a_gpu_of_the_job_concerns_it(
    found: Finding, visible: str | None, is_posted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said: list[str] = []
    posted: list[Any] = []
    loop: Any = None
    NodeWatch(loop, said.append, posted.append)._tell(found)
    assert len(said) == 1
    assert [(each.at, each.status, each.severity, each.reason) for each in posted] == [
        (5.0, Status.ECC_ERROR, Severity.SEV1, found.reason)
    ] * is_posted
