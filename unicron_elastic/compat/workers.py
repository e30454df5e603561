"""torch's processes of one generation of workers, and how one is bound to a NUMA node. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.numa import binding

from unicron_elastic.compat.signatures import accepts

__all__ = ["DefaultLogsSpecs", "LogsSpecs", "PContext", "SubprocessContext", "bound_to_numa", "terminate_handler"]

_WRAP = "_maybe_wrap_command_args_with_numa_binding"

terminate_handler = _terminate_process_handler  # of the signals that end an agent: raises SignalException


def bound_to_numa(command: Sequence[str], local_rank: int, options: Any) -> list[str]:
    """Return the command of a worker, with numactl before it if ``options`` (torch's NumaOptions) are given."""
    if options is None:
        return list(command)
    wrap = getattr(binding, _WRAP, None) or getattr(binding, _WRAP[1:])  # the second in torch 2.10
    device = "device_index" if accepts(wrap, "device_index") else "gpu_index"  # the second before torch 2.14
    return list(wrap(tuple(command), numa_options=options, **{device: local_rank}))
