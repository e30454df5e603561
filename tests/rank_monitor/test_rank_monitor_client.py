"""The client as NVIDIA's callers use it: what it keeps, what it raises, and what the agent learns."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fake_agent import Agent, Clock, in_section

from unicron_elastic import phase
from unicron_elastic.worker.notices import ControlWanted, SectionOverdue
from unicron_elastic.worker.pulse import TRAIN
from unicron_elastic.worker.rank_monitor.surface import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)


def test_nothing_is_known_before_it_begins() -> None:
    client = RankMonitorClient()
    assert not client.is_initialized
    assert client.hb_timeouts is None
    assert client.section_timeouts is None
    assert client.cfg is None
    assert client.state_dict() == {"current_timeouts": {}}


def test_no_time_out_is_known_when_it_begins(client: RankMonitorClient) -> None:
    assert client.is_initialized
    assert client.hb_timeouts is not None
    assert client.section_timeouts is not None
    assert (client.hb_timeouts.are_valid, client.hb_timeouts.were_calculated) == (False, False)
    assert (client.section_timeouts.are_valid, client.section_timeouts.were_calculated) == (False, False)


def test_lightnings_callback_finds_the_sections_that_it_insists_on(client: RankMonitorClient) -> None:
    assert client.cfg is not None
    assert set(client.cfg.rank_section_timeouts) == {"setup", "step", "checkpointing"}


CALLS: list[tuple[str, list[Any]]] = [
    ("send_heartbeat", []),
    ("start_section", ["setup"]),
    ("end_section", ["setup"]),
    ("end_all_sections", []),
    ("calculate_and_set_hb_timeouts", []),
    ("calculate_and_set_section_timeouts", []),
]


@pytest.mark.parametrize(("method", "arguments"), CALLS)
def test_it_must_have_begun_and_not_ended(client: RankMonitorClient, method: str, arguments: list[Any]) -> None:
    with pytest.raises(RankMonitorClientError, match="not begun"):
        getattr(RankMonitorClient(), method)(*arguments)
    client.shutdown_workload_monitoring()
    client.shutdown_workload_monitoring()  # does no harm
    assert not client.is_initialized
    with pytest.raises(RankMonitorClientError, match="not begun"):
        getattr(client, method)(*arguments)


def test_it_begins_once_and_again_after_its_end(client: RankMonitorClient) -> None:
    with pytest.raises(RankMonitorClientError, match="begun already"):
        client.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    client.init_workload_monitoring(num_warmup_iters=7)
    assert client.is_initialized
    assert client.num_warmup_iters == 7


def test_sections_are_opened_and_closed_in_turn(client: RankMonitorClient) -> None:
    client.start_section("setup")
    with pytest.raises(RankMonitorClientError, match="open already"):
        client.start_section("setup")
    client.end_section("setup")
    with pytest.raises(RankMonitorClientError, match="not open"):
        client.end_section("setup")
    for name in ("", "\0", None):
        with pytest.raises(RankMonitorClientError, match="cannot be a section"):
            client.start_section(name)  # type: ignore[arg-type]


def test_a_section_is_a_phase(agent: Agent, client: RankMonitorClient) -> None:
    client.start_section("setup")
    assert agent.phase == "setup"
    client.end_section("setup")
    assert agent.phase == TRAIN


def test_a_step_is_training(agent: Agent, client: RankMonitorClient) -> None:
    with phase("evaluation"):
        client.start_section("step")
        assert agent.phase == TRAIN
        client.end_section("step")
        assert agent.phase == "evaluation"


def test_the_innermost_open_section_is_shown(agent: Agent, client: RankMonitorClient) -> None:
    client.start_section("a")
    client.start_section("b")
    client.start_section("c")
    assert agent.phase == "c"
    client.end_section("b")
    assert agent.phase == "c"
    client.end_section("c")
    assert agent.phase == "a"
    client.start_section("b")
    client.end_section("a")
    assert agent.phase == "b"
    client.end_section("b")
    assert agent.phase == TRAIN


def test_end_all_sections_ends_all(agent: Agent, client: RankMonitorClient) -> None:
    client.end_all_sections()
    for name in ("a", "b", "step"):
        client.start_section(name)
    client.end_all_sections()
    assert agent.phase == TRAIN
    client.start_section("a")
    assert agent.phase == "a"


def test_the_end_of_monitoring_ends_sections(agent: Agent, client: RankMonitorClient) -> None:
    client.start_section("setup")
    client.shutdown_workload_monitoring()
    assert agent.phase == TRAIN


def test_the_phase_before_the_sections_comes_back(agent: Agent, client: RankMonitorClient) -> None:
    with phase("evaluation"):
        client.start_section("checkpointing")
        client.end_section("checkpointing")
        assert agent.phase == "evaluation"
    assert agent.phase == TRAIN


def test_only_the_main_thread_is_shown(agent: Agent, client: RankMonitorClient) -> None:
    client.start_section("setup")
    thread = threading.Thread(target=client.start_section, args=("checkpointing",))
    thread.start()
    thread.join()
    assert agent.phase == "setup"
    client.end_section("checkpointing")
    assert agent.phase == "setup"
    client.end_section("setup")
    assert agent.phase == TRAIN


def test_an_outer_section_that_takes_too_long_is_told_once(
    agent: Agent, client: RankMonitorClient, clock: Clock
) -> None:
    limits = {"section": {"outer": 1.0, "inner": 10.0}, "out_of_section": None}
    client.load_state_dict({"current_timeouts": {"section": limits}})
    client.start_section("outer")
    clock.wait(2.0)
    agent.heard()
    client.start_section("inner")
    assert agent.heard() == [SectionOverdue(section="outer", open_s=2.0, limit_s=1.0).message()]
    client.send_heartbeat()
    client.end_all_sections()
    assert agent.heard() == []
    client.start_section("outer")
    clock.wait(3.0)
    client.end_section("outer")
    assert agent.heard() == [SectionOverdue(section="outer", open_s=3.0, limit_s=1.0).message()]


def test_a_request_reaches_the_agent(agent: Agent, client: RankMonitorClient) -> None:
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "ECC"))
    assert agent.heard() == [ControlWanted(action="ExcludeThisNode", description="ECC").message()]


def test_a_request_that_nobody_hears_raises(client: RankMonitorClient) -> None:
    with pytest.raises(RuntimeError, match="no launcher"):
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload))


def test_without_an_agent_only_the_books_are_kept(client: RankMonitorClient, clock: Clock) -> None:
    for _ in range(9):
        in_section(client, clock, "step", 1.0)
        client.send_heartbeat()
    assert client.calculate_and_set_hb_timeouts()
    assert client.hb_timeouts is not None
    assert "initial=5.00, subsequent=5.00, were_calculated=True" in str(client.hb_timeouts)
    with pytest.raises(RankMonitorClientError, match="not enough"):
        client.calculate_and_set_section_timeouts()  # no time was spent outside
    assert client.calculate_and_set_section_timeouts(calc_out_of_section=False)
    assert "sections=[step=5.00]" in str(client.section_timeouts)
