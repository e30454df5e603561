"""Arguments, environment and log prefix of each worker: torchrun's, name for name.

The contract is LocalElasticAgent._start_workers of torch 2.13 and torchrun's documentation ("Environment Variables").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from string import Template

from unicron_elastic.compat.agent import Worker, WorkerGroup, WorkerSpec, macros
from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.planning.model.configured import CONFIGURATION, configuration_text

# The few variables by which torch's NCCL back end should differ from its defaults in a worker of ours.


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

# Right as torch 2.13 has them, so not set, since a script may print its environment and must find torchrun's:
# - TORCH_FR_BUFFER_SIZE and TORCH_NCCL_TRACE_BUFFER_SIZE: 2000, so the flight recorder counts, as we need it to;
# - TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_NCCL_ENABLE_MONITORING and TORCH_NCCL_RETHROW_CUDA_ERRORS: on;
# - TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC: 480. It is for a watchdog that is stuck; a standstill is noticed long before;
# - TORCH_NCCL_PROPAGATE_ERROR: off. It makes each group ask the store all the time, and the agents tell everybody;
# - TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ENABLE_TIMING, TORCH_NCCL_DESYNC_DEBUG: off, for they slow training down;
# - TORCH_NCCL_USE_COMM_NONBLOCKING: off; torch withdrew it because NCCL 2.26 hangs with it (pytorch#153960).


def nccl_defaults(environ: Mapping[str, str], *, in_process: bool = False) -> dict[str, str]:
    """What to add to a worker's environment; never a variable that is set in ``environ`` under any of its names.

    ``in_process``: workers outlive a lost peer and make new groups, instead of being started anew.
    """
    wanted = _IN_PROCESS if in_process else _AS_TORCHRUN
    return {
        name: value for name, value in wanted.items() if name not in environ and _DEPRECATED.get(name) not in environ
    }


def describe_workers(
    group: WorkerGroup,
    *,
    restarts_used: int,
    log_line_prefix_template: str | None,
    set_local_rank: Callable[[dict[str, str], int, WorkerSpec], None],
    configuration: Configuration | None = None,
) -> tuple[dict[int, tuple[str, ...]], dict[int, dict[str, str]], dict[int, str] | None]:
    """Arguments, environments and prefixes (None: torch's default) by local rank.

    ``set_local_rank`` is torch's own rule for LOCAL_RANK and CUDA_VISIBLE_DEVICES (--virtual-local-rank).
    ``configuration``: the one with which the job was started.
    """
    args: dict[int, tuple[str, ...]] = {}
    envs: dict[int, dict[str, str]] = {}
    prefixes: dict[int, str] = {}
    for worker in group.workers:
        local_rank = worker.local_rank
        args[local_rank] = tuple(macros.substitute(list(group.spec.args), str(local_rank)))
        envs[local_rank] = _environment(group, worker, restarts_used)
        set_local_rank(envs[local_rank], local_rank, group.spec)
        if configuration is not None:
            envs[local_rank][CONFIGURATION] = configuration_text(configuration)
        if log_line_prefix_template:
            prefixes[local_rank] = Template(log_line_prefix_template).safe_substitute(
                role_name=group.spec.role, rank=worker.global_rank, local_rank=local_rank
            )
    return args, envs, prefixes if log_line_prefix_template else None


def _environment(group: WorkerGroup, worker: Worker, restarts_used: int) -> dict[str, str]:
    spec = group.spec
    env = {
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": restarts_used,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        **nccl_defaults(os.environ),
    }
    return {name: str(value) for name, value in env.items()}
