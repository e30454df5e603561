"""torch's agent of one node, in the shape that ours inherits from, and what belongs to it. Imports torch."""

from __future__ import annotations

import signal

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import prof, put_metric
from torch.distributed.elastic.utils import macros

from unicron_elastic.compat.signatures import accepts

__all__ = [
    "DEFAULT_ROLE",
    "RunResult",
    "TorchAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "macros",
    "prof",
    "put_metric",
]


class TorchAgent(LocalElasticAgent):  # type: ignore[misc]
    """torch's LocalElasticAgent; where it can be told how long to wait for its workers' end, it waits so long."""

    _shutdown_timeout: int = 30  # torch from 2.12 on sets it; before, it waited so long and had no option for it

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if accepts(LocalElasticAgent._shutdown, "timeout"):
            super()._shutdown(death_sig, timeout)
        else:
            super()._shutdown(death_sig)
