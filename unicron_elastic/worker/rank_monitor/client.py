"""``RankMonitorClient``: heartbeats and sections, as NVIDIA's client takes them, for our own detection."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from unicron_elastic.worker.link import AGENT
from unicron_elastic.worker.notices import ControlWanted, SectionLimits
from unicron_elastic.worker.rank_monitor.config import FaultToleranceConfig
from unicron_elastic.worker.rank_monitor.data import (
    HeartbeatTimeouts,
    RankMonitorClientError,
    SectionTimeouts,
    WorkloadControlRequest,
)
from unicron_elastic.worker.rank_monitor.measured import Measured
from unicron_elastic.worker.rank_monitor.sections import Sections

# NVIDIA's Lightning callback insists on finding just these in the configuration. No limit: detection has its own.
_EXPECTED_SECTIONS = {"setup": None, "step": None, "checkpointing": None}
_TOO_LITTLE = "not enough was measured to calculate time-outs"


class RankMonitorClient:
    """Tells the agent what this worker does. Each section is monitored, whether or not it was configured.

    Under another launcher it keeps its books and tells nobody. Calls before ``init_workload_monitoring``, and after
    ``shutdown_workload_monitoring``, raise RankMonitorClientError, except for states.
    """

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        self.is_initialized = False
        self.cfg: FaultToleranceConfig | None = None
        self.hb_timeouts: HeartbeatTimeouts | None = None  # both None until monitoring begins
        self.section_timeouts: SectionTimeouts | None = None
        self.loaded_hb_timeouts: HeartbeatTimeouts | None = None
        self.loaded_section_timeouts: SectionTimeouts | None = None
        self.num_warmup_iters: int | None = None
        self._sections = Sections()
        self._measured: Measured | None = None

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Begins. ``num_warmup_iters`` is taken and not needed: our detection sees by itself when steps are steady."""
        if self.is_initialized:
            raise RankMonitorClientError("monitoring of this worker has begun already")
        cfg = FaultToleranceConfig.from_environment()
        self.num_warmup_iters = num_warmup_iters
        self.hb_timeouts = HeartbeatTimeouts(cfg.initial_rank_heartbeat_timeout, cfg.rank_heartbeat_timeout, False)
        self.section_timeouts = SectionTimeouts(dict(cfg.rank_section_timeouts), cfg.rank_out_of_section_timeout)
        self._sections = Sections()
        self._measured = Measured(cfg.safety_factor, time.monotonic(), cfg.rank_section_timeouts)
        cfg.rank_section_timeouts = cfg.rank_section_timeouts or dict(_EXPECTED_SECTIONS)
        self.cfg = cfg
        self.is_initialized = True
        self._set(self.loaded_hb_timeouts, self.loaded_section_timeouts)

    def shutdown_workload_monitoring(self) -> None:
        """Ends it, and all sections with it; the time-outs stay. Does nothing if it has not begun."""
        if self.is_initialized:
            self.end_all_sections()
            self.is_initialized = False

    def send_heartbeat(self) -> None:
        """Says that the worker goes on."""
        at = time.monotonic()
        self._begun().heartbeat(at)
        AGENT.beat()
        self._tell_overdue(at)

    def start_section(self, section: str) -> None:
        """The worker does ``section`` from now on. Raises RankMonitorClientError if it is open already."""
        measured, at = self._begun(), time.monotonic()
        was_outside = not self._sections
        self._sections.open(section, at)
        measured.opened(section)
        if was_outside:
            measured.outside_until(at)
        self._tell_overdue(at)

    def end_section(self, section: str) -> None:
        """The worker has done ``section``. Raises RankMonitorClientError if it is not open."""
        measured, at = self._begun(), time.monotonic()
        self._tell_overdue(at)
        open_s = self._sections.close(section, at)
        measured.closed(section, open_s, at, is_last=not self._sections)

    def end_all_sections(self) -> None:
        """Ends those that are open, if any; NVIDIA's own method of 0.7 ends none of them."""
        self._begun()
        for section in reversed(self._sections.names()):
            self.end_section(section)

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Learns them from all ranks' heartbeats: each rank has to call this. Returns whether it could.

        Raises RankMonitorClientError if it could not, unless that is to be skipped.
        """
        measured = self._begun()
        measured.share()
        assert self.hb_timeouts is not None
        return self._calculated(measured.heartbeat_timeouts(self.hb_timeouts), None, skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """The same for sections, None: for all of them, and for the time outside."""
        measured = self._begun()
        if not self._sections:
            measured.outside_until(time.monotonic())  # the present stay may be the longest
        measured.share()
        assert self.section_timeouts is not None
        learned = measured.section_timeouts(selected_sections, calc_out_of_section, self.section_timeouts)
        return self._calculated(None, learned, skip_if_not_ready)

    def state_dict(self) -> Mapping[str, Any]:
        """The learned time-outs, as plain data that JSON knows, the same on all ranks, and NVIDIA's client's own."""
        heartbeat = self.hb_timeouts or self.loaded_hb_timeouts
        section = self.section_timeouts or self.loaded_section_timeouts
        state: dict[str, Any] = {}
        if heartbeat is not None and heartbeat.are_valid and heartbeat.were_calculated:
            state["heartbeat"] = asdict(heartbeat)
        if section is not None and (section.calculated_sections or section.is_out_of_section_calculated):
            state["section"] = {**asdict(section), "calculated_sections": sorted(section.calculated_sections)}
        return {self.CURRENT_TIMEOUTS_STATE_KEY: state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave, at any time; it wins over what is configured."""
        stored = state.get(self.CURRENT_TIMEOUTS_STATE_KEY, {})
        if "heartbeat" in stored:
            self.loaded_hb_timeouts = HeartbeatTimeouts(**stored["heartbeat"])
        if "section" in stored:
            self.loaded_section_timeouts = SectionTimeouts(**stored["section"])
        if self.is_initialized:
            self._set(self.loaded_hb_timeouts, self.loaded_section_timeouts)

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Asks the agent for an action. Raises RuntimeError if there is none: nobody would know that it was asked."""
        if not AGENT.say(ControlWanted(action=req.action.name, description=str(req.description))):
            raise RuntimeError(f"no launcher to ask for {req.action.name}: {req.description}")

    def _begun(self) -> Measured:
        if not self.is_initialized or self._measured is None:
            raise RankMonitorClientError("monitoring of this worker has not begun: call init_workload_monitoring")
        return self._measured

    def _calculated(
        self, heartbeat: HeartbeatTimeouts | None, section: SectionTimeouts | None, skip_if_not_ready: bool
    ) -> bool:
        if heartbeat is None and section is None:
            if skip_if_not_ready:
                return False
            raise RankMonitorClientError(_TOO_LITTLE)
        self._set(heartbeat, section)
        return True

    def _set(self, heartbeat: HeartbeatTimeouts | None, section: SectionTimeouts | None) -> None:
        """None: as they are. Tells the agent what holds now, unless there is no limit at all."""
        self.hb_timeouts = heartbeat or self.hb_timeouts
        self.section_timeouts = section or self.section_timeouts
        assert self.hb_timeouts is not None
        assert self.section_timeouts is not None
        limits = SectionLimits(
            first_heartbeat_s=self.hb_timeouts.initial,
            heartbeat_s=self.hb_timeouts.subsequent,
            sections_s=dict(self.section_timeouts.section),
            out_of_section_s=self.section_timeouts.out_of_section,
        )
        if limits != SectionLimits(first_heartbeat_s=None, heartbeat_s=None, sections_s={}, out_of_section_s=None):
            AGENT.say(limits)

    def _tell_overdue(self, at: float) -> None:
        if self.section_timeouts is not None:
            for overdue in self._sections.overdue(self.section_timeouts.section, at):
                AGENT.say(overdue)
