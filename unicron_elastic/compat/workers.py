"""torch's processes of one generation of workers, and how one is bound to a NUMA node. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.launcher.api import LaunchConfig
from torch.numa import binding

from unicron_elastic.compat.signatures import accepts

__all__ = [
    "DefaultLogsSpecs",
    "LogsSpecs",
    "PContext",
    "SubprocessContext",
    "bound_to_numa",
    "folder_name",
    "handles_usual_signals",
    "keep_in_log_folder",
    "terminate_handler",
]

_WRAP = "_maybe_wrap_command_args_with_numa_binding"

terminate_handler = _terminate_process_handler  # of the signals that end an agent: raises SignalException

_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # set by torch's launch_agent, whatever it was before


def handles_usual_signals() -> bool:
    """Return whether torch is about to handle the signals that it handles where nobody names any."""
    usual = LaunchConfig.signals_to_handle
    return bool(os.environ.get(_SIGNALS, usual) == usual)


def bound_to_numa(command: Sequence[str], local_rank: int, options: Any) -> list[str]:
    """Return the command of a worker, with numactl before it if ``options`` (torch's NumaOptions) are given."""
    if options is None:
        return list(command)
    wrap = getattr(binding, _WRAP, None) or getattr(binding, _WRAP[1:])  # the second in torch 2.10
    device = "device_index" if accepts(wrap, "device_index") else "gpu_index"  # the second before torch 2.14
    return list(wrap(tuple(command), numa_options=options, **{device: local_rank}))


_RUN_ID = "TORCHELASTIC_RUN_ID"
_FOLDER_BYTES = 200  # of 255, as torch puts something random behind it


def keep_in_log_folder(specs: LogsSpecs) -> None:
    """Have torch's ``specs`` make the run's folder inside of the log folder, whatever the run is called.

    torch puts the name into the path as it is: with a slash it is a folder elsewhere, or an error once all have met.
    """
    if not isinstance(specs, DefaultLogsSpecs):
        return
    reify = specs.reify

    def reify_inside(envs: dict[int, dict[str, str]]) -> Any:
        names = {rank: env[_RUN_ID] for rank, env in envs.items() if _RUN_ID in env}
        for rank, name in names.items():
            envs[rank][_RUN_ID] = folder_name(name)
        try:
            return reify(envs)
        finally:
            for rank, name in names.items():
                envs[rank][_RUN_ID] = name

    specs.reify = reify_inside


def folder_name(run_id: str) -> str:
    """Return the id itself, unless it is too long or names a folder elsewhere."""
    return os.fsdecode(os.fsencode(run_id.replace("/", "%2F"))[:_FOLDER_BYTES])
