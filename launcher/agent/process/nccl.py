"""The few variables by which torch's NCCL back end should differ from its defaults in a worker of ours.

Right as torch 2.13 has them, so not set, since a script may print its environment and must find torchrun's:
- TORCH_FR_BUFFER_SIZE and TORCH_NCCL_TRACE_BUFFER_SIZE: 2000, so the flight recorder counts, as we need it to;
- TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_NCCL_ENABLE_MONITORING and TORCH_NCCL_RETHROW_CUDA_ERRORS: on;
- TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 480. It is for a watchdog that is stuck; a standstill is noticed long before;
- TORCH_NCCL_PROPAGATE_ERROR: off. It makes each group ask the store all the time, and the agents tell everybody;
- TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ENABLE_TIMING, TORCH_NCCL_DESYNC_DEBUG: off, for they slow training down;
- TORCH_NCCL_USE_COMM_NONBLOCKING: off; torch withdrew it because NCCL 2.26 hangs with it (pytorch#153960).
"""

from __future__ import annotations

from collections.abc import Mapping

# Torch's name of a variable, which wins, and the deprecated one that it reads as well (ProcessGroupNCCL.hpp).
_DEPRECATED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING"}

# As torchrun: the watchdog ends the process after an error or a time-out. An abort asked for by us is no error to it.
_AS_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

# For workers that outlive a lost peer.
_IN_PROCESS = {
    # 2, CleanUpOnly: a watchdog that saw the peer's end before we told it aborts the communicators and no more. With 1
    # it ends the process, up to a minute later, when that has long gone on with a new group.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # After an error the watchdog sleeps four times as long, a minute by default, and destroy_process_group waits for
    # its end. A dump of the flight recorder takes less than this, in milliseconds.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}


def nccl_defaults(environ: Mapping[str, str], *, in_process: bool = False) -> dict[str, str]:
    """What to add to a worker's environment; never a variable that is set in ``environ`` under any of its names.

    ``in_process``: workers outlive a lost peer and make new groups, instead of being started anew.
    """
    wanted = _IN_PROCESS if in_process else _AS_TORCHRUN
    return {
        name: value for name, value in wanted.items() if name not in environ and _DEPRECATED.get(name) not in environ
    }
