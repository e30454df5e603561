"""Arguments, environment and log prefix of each worker: torchrun's, name for name.

The contract is LocalElasticAgent._start_workers of torch 2.13 and torchrun's documentation ("Environment Variables").
"""

from __future__ import annotations

import os
from collections.abc import Callable
from string import Template

from unicron_elastic.compat.agent import Worker, WorkerGroup, WorkerSpec, macros
from unicron_elastic.launcher.agent.process.nccl import nccl_defaults
from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.planning.model.configured import CONFIGURATION, configuration_text


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
