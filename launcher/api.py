"""``torch.distributed.launcher.api`` with our agent: LaunchConfig, elastic_launch, launch_agent.

torch's own ``launch_agent`` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unicron_elastic.compat.launch import (
    HealthCheckServer,
    LaunchConfig,
    _get_addr_and_port,
    _get_entrypoint_name,
    agent_launcher,
)
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
    launch = agent_launcher(agent, rendezvous_handler)
    return launch(config, entrypoint, args, **only_accepted(launch, health_check_server=health_check_server))
