"""The names that callers import from ``nvidia_resiliency_ext.fault_tolerance`` and its modules."""

from __future__ import annotations

from unicron_elastic.worker.rank_monitor.client import RankMonitorClient
from unicron_elastic.worker.rank_monitor.config import FaultToleranceConfig
from unicron_elastic.worker.rank_monitor.data import (
    HeartbeatTimeouts,
    RankMonitorClientError,
    SectionTimeouts,
    WorkloadAction,
    WorkloadControlRequest,
)

__all__ = [
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankMonitorClient",
    "RankMonitorClientError",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]
