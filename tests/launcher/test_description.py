"""What a worker is started with, against what torch's own agent starts it with."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.utils import macros

from unicron_elastic.launcher.agent.core.description import describe_workers

READ_BY_TORCH = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class Handler:
    """The two things a rendezvous is asked for here."""

    def __init__(self, uses_agent_store: bool) -> None:
        self.use_agent_store = uses_agent_store

    def get_run_id(self) -> str:
        return "run-7"


@pytest.fixture(autouse=True)
def _none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ_BY_TORCH:
        monkeypatch.delenv(name, raising=False)


def _group(spec: dict[str, Any], *, uses_agent_store: bool = True) -> WorkerGroup:
    """Node 1 of 3, with two workers whose every number is another."""
    group = WorkerGroup(
        WorkerSpec(
            role="trainer",
            local_world_size=2,
            rdzv_handler=Handler(uses_agent_store),
            entrypoint="python",
            max_restarts=5,
            master_port=0,
            **spec,
        )
    )
    group.store = HashStore()
    group.group_rank, group.group_world_size = 1, 3
    group.master_addr, group.master_port = "n0", 29511
    group.workers = [
        Worker(local_rank=local, global_rank=8 + local, role_rank=4 + local, world_size=24, role_world_size=12)
        for local in range(2)
    ]
    return group


def _by_torch(group: WorkerGroup, template: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """What torch's agent hands to ``start_processes`` for a job that has used two of its restarts."""
    handed: dict[str, Any] = {}

    class Started:
        def pids(self) -> dict[int, int]:
            return {}

    def start_processes(**arguments: Any) -> Started:
        handed.update(arguments)
        return Started()

    monkeypatch.setattr(local_elastic_agent, "start_processes", start_processes)
    logs = DefaultLogsSpecs(log_dir=str(tmp_path))
    agent = LocalElasticAgent(group.spec, logs, log_line_prefix_template=template)
    agent._remaining_restarts = group.spec.max_restarts - 2
    agent._start_workers(group)
    return agent, handed


SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "arguments": {"args": ("-u", "train.py", "--device", f"{macros.local_rank}", 7, "$HOME")},
    "virtual local rank": {"virtual_local_rank": True},
}
ENVIRONMENTS: dict[str, dict[str, str]] = {
    "nothing set": {},
    "set by the user": {
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "6, 2,5",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    },
}


@pytest.mark.parametrize("env", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("template", [None, "[${role_name} ${rank}/${local_rank} ${other}]: "])
def test_a_worker_is_started_as_torch_starts_it(
    env: dict[str, str], spec: dict[str, Any], template: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    group = _group(spec)
    agent, torchs = _by_torch(group, template, monkeypatch, tmp_path)
    args, envs, prefixes = describe_workers(
        group,
        restarts_used=2,
        log_line_prefix_template=template,
        set_local_rank=agent._set_local_rank_env,
    )
    assert {rank: tuple(map(str, each)) for rank, each in args.items()} == {
        rank: tuple(map(str, each)) for rank, each in torchs["args"].items()
    }
    assert prefixes == torchs["log_line_prefixes"]
    # A worker gets these on top of the launcher's own environment.
    assert {rank: {**os.environ, **each} for rank, each in envs.items()} == {
        rank: {**os.environ, **each} for rank, each in torchs["envs"].items()
    }
    assert all(isinstance(value, str) for each in envs.values() for value in each.values())


@pytest.mark.parametrize("uses_agent_store", [True, False])
def test_the_agents_store_is_announced_as_torch_does(
    uses_agent_store: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    group = _group({}, uses_agent_store=uses_agent_store)
    agent, torchs = _by_torch(group, None, monkeypatch, tmp_path)
    _, envs, _ = describe_workers(
        group, restarts_used=2, log_line_prefix_template=None, set_local_rank=agent._set_local_rank_env
    )
    name = "TORCHELASTIC_USE_AGENT_STORE"
    assert {envs[0][name]} == {torchs["envs"][0][name]} == {str(uses_agent_store)}


def test_more_workers_than_visible_devices_is_torchs_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    group = _group({"virtual_local_rank": True})
    agent, _ = _by_torch(group, None, monkeypatch, tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match="local_rank 1 exceeds available GPUs"):
        describe_workers(
            group, restarts_used=0, log_line_prefix_template=None, set_local_rank=agent._set_local_rank_env
        )
