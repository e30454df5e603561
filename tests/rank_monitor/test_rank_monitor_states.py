"""Time-outs that the client learns, tells, and keeps in checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_agent import Agent, Clock, in_section

from unicron_elastic.worker.rank_monitor.surface import RankMonitorClient, RankMonitorClientError


def test_limits_are_told_when_there_are_any(agent: Agent, client: RankMonitorClient, clock: Clock) -> None:
    assert agent.heard() == []
    client.send_heartbeat()
    clock.wait(2.0)
    client.send_heartbeat()
    clock.wait(2.0)
    in_section(client, clock, "a", 3.0)
    client.calculate_and_set_section_timeouts()
    told = {"first_heartbeat_s": None, "heartbeat_s": None, "sections_s": {"a": 15.0}, "out_of_section_s": 20.0}
    assert agent.heard() == [{"is": "SectionLimits", **told}]


def test_states_go_round(client: RankMonitorClient, clock: Clock) -> None:
    clock.wait(3.0)
    client.send_heartbeat()
    clock.wait(2.0)
    client.send_heartbeat()
    in_section(client, clock, "b", 1.0)
    in_section(client, clock, "a", 4.0)
    assert client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_section_timeouts()
    state = json.loads(json.dumps(client.state_dict()))
    assert state == {
        "current_timeouts": {
            "heartbeat": {"initial": 15.0, "subsequent": 10.0, "were_calculated": True},
            "section": {
                "section": {"a": 20.0, "b": 5.0},
                "out_of_section": 25.0,
                "calculated_sections": ["a", "b"],
                "is_out_of_section_calculated": True,
            },
        }
    }
    early, late = RankMonitorClient(), RankMonitorClient()
    early.load_state_dict(state)
    assert early.state_dict() == state
    early.init_workload_monitoring()
    late.init_workload_monitoring()
    late.load_state_dict(state)
    for other in (early, late):
        assert other.state_dict() == state
        assert other.hb_timeouts == client.hb_timeouts
        assert other.section_timeouts == client.section_timeouts
        assert other.section_timeouts is not None
        assert other.section_timeouts.were_calculated


@pytest.mark.parametrize("state", [{}, {"current_timeouts": {}}, {"something": "else"}])
def test_a_state_without_time_outs_changes_nothing(client: RankMonitorClient, state: dict[str, Any]) -> None:
    before = client.hb_timeouts, client.section_timeouts
    client.load_state_dict(state)
    assert (client.hb_timeouts, client.section_timeouts) == before


def test_too_little_was_measured(client: RankMonitorClient, clock: Clock) -> None:
    for calculate in (client.calculate_and_set_hb_timeouts, client.calculate_and_set_section_timeouts):
        with pytest.raises(RankMonitorClientError, match="not enough"):
            calculate()
        assert calculate(skip_if_not_ready=True) is False
    client.start_section("one")
    clock.wait(1.0)
    with pytest.raises(RankMonitorClientError, match="not enough"):
        client.calculate_and_set_section_timeouts()  # it was not closed yet
    with pytest.raises(RankMonitorClientError, match="not enough"):
        client.calculate_and_set_section_timeouts(["unheard of"], calc_out_of_section=False)
