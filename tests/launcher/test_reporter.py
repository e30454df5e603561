"""What people hear of an incident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_incident_picture import INCIDENT

from unicron_elastic.launcher.agent.core.reporter import Reporter
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.config.options import Options


@pytest.mark.parametrize("is_told", [True, False])
def test_of_an_incident_that_another_node_tells_this_one_says_nothing(
    is_told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = Loop()
    reporter = Reporter(Options(console="plain", ledger=str(tmp_path / "ledger.jsonl")), loop, "run")
    begun = replace(INCIDENT, number=1, occurred_at=1.0, first_step_at=None)
    reporter.record(begun, is_told=is_told)
    reporter.record(replace(begun, first_step_at=2.0))  # of another round, which has heard nothing
    reporter.close()
    loop.close()
    assert ("Incident 1: first step 1000 ms after the fault." in capfd.readouterr().err) is not is_told
