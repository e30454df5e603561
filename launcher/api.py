"""``torch.distributed.launcher.api`` with our agent: LaunchConfig, elastic_launch, launch_agent.

torch's own ``launch_agent`` does the work. It finds the agent's class and the rendezvous by name in its module, so it
is run here with a namespace in which those two names mean ours. torch's module itself is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch.distributed.launcher.api as torch_api
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.launcher.api import LaunchConfig, _get_addr_and_port, _get_entrypoint_name

from unicron_elastic.compat.signatures import only_accepted
from unicron_elastic.launcher.agent import Agent as LocalElasticAgent
from unicron_elastic.launcher.runtime import Runtime
from unicron_elastic.rendezvous.choose import rendezvous_handler

__all__ = ["LaunchConfig", "_get_addr_and_port", "_get_entrypoint_name", "elastic_launch", "launch_agent"]


class elastic_launch:
    """Launches an agent that runs ``entrypoint``; see torch.distributed.launcher.api.elastic_launch."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server
        self._runtime = runtime

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Runs to the end and returns each worker's result by global rank. Raises ChildFailedError."""
        return launch_agent(
            self._config, self._entrypoint, list(args), self._health_check_server, runtime=self._runtime
        )


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
    *,
    runtime: Runtime | None = None,
) -> dict[int, Any]:
    """torch's launch_agent with our agent and rendezvous; ``runtime`` is one that was begun early."""
    agent = LocalElasticAgent if runtime is None else partial(LocalElasticAgent, runtime=runtime)
    namespace = {
        **vars(torch_api),
        "LocalElasticAgent": agent,
        "rdzv_registry": SimpleNamespace(get_rendezvous_handler=rendezvous_handler),
    }
    launch = FunctionType(
        torch_api.launch_agent.__code__, namespace, "launch_agent", torch_api.launch_agent.__defaults__
    )
    takes = only_accepted(torch_api.launch_agent, health_check_server=health_check_server)
    results: dict[int, Any] = launch(config, entrypoint, args, **takes)
    return results
