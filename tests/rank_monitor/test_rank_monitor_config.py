"""The file that ft_launcher would have read."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_agent import Agent

from unicron_elastic.worker.rank_monitor.surface import FaultToleranceConfig, RankMonitorClient

SETTINGS = {
    "rank_heartbeat_timeout": 900,
    "initial_rank_heartbeat_timeout": 1200,
    "rank_section_timeouts": {"init": 20, "step": None},
    "rank_out_of_section_timeout": 30,
    "safety_factor": 2.0,
    "unknown": True,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """JSON is YAML, so this needs no PyYAML."""
    monkeypatch.setitem(sys.modules, "yaml", SimpleNamespace(safe_load=json.load))  # type: ignore[arg-type]
    made = tmp_path / "ft.yaml"
    made.write_text(json.dumps({"job": [1, {"fault_tolerance": SETTINGS}]}))
    return made


@pytest.mark.parametrize("variable", ["FAULT_TOL_CFG_PATH", "PET_FT_CFG_PATH"])
def test_what_is_configured_holds_and_is_told(
    agent: Agent, path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(path))
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert client.cfg is not None
    assert client.cfg.rank_section_timeouts == {"init": 20, "step": None}
    assert client.cfg.safety_factor == 2.0
    assert client.hb_timeouts is not None
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (1200, 900)
    assert (client.hb_timeouts.are_valid, client.hb_timeouts.were_calculated) == (True, False)
    assert client.state_dict() == {"current_timeouts": {}}  # configured ones belong to no checkpoint
    told = {"first_heartbeat_s": 1200, "heartbeat_s": 900, "sections_s": {"init": 20, "step": None}}
    assert agent.heard() == [{"is": "SectionLimits", **told, "out_of_section_s": 30}]


def test_a_stored_state_wins(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_TOL_CFG_PATH", str(path))
    client = RankMonitorClient()
    stored: dict[str, Any] = {"initial": 1.0, "subsequent": 2.0, "were_calculated": True}
    client.load_state_dict({"current_timeouts": {"heartbeat": stored}})
    client.init_workload_monitoring()
    assert client.hb_timeouts is not None
    assert client.hb_timeouts.subsequent == 2.0
    assert client.section_timeouts is not None
    assert client.section_timeouts.out_of_section == 30


@pytest.mark.parametrize("content", ["{}", "[", '{"fault_tolerance": []}'])
def test_an_unfit_file_does_not_end_the_job(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path.write_text(content)
    monkeypatch.setenv("FAULT_TOL_CFG_PATH", str(path))
    with caplog.at_level(logging.WARNING):
        assert FaultToleranceConfig.from_environment() == FaultToleranceConfig()
    assert str(path) in caplog.text


def test_a_file_that_is_not_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAULT_TOL_CFG_PATH", str(tmp_path / "none.yaml"))
    assert FaultToleranceConfig.from_environment() == FaultToleranceConfig()


def test_settings_by_name() -> None:
    assert FaultToleranceConfig.from_kwargs(rank_heartbeat_timeout=3.0, other=1).rank_heartbeat_timeout == 3.0
    with pytest.raises(ValueError, match="other"):
        FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, other=1)
