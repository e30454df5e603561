"""``torch.distributed.launcher.api`` with our agent: LaunchConfig, elastic_launch, launch_agent.

torch's own ``launch_agent`` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unicron_elastic.compat.expectations import Feature, lacks
from unicron_elastic.compat.launch import LaunchConfig, agent_launcher, torch_api
from unicron_elastic.compat.signatures import only_accepted
from unicron_elastic.launcher import stepping_aside
from unicron_elastic.launcher.agent.process.runtime import Runtime

if not stepping_aside.why_not_ours():
    from unicron_elastic.launcher.agent.core.agent import Agent as LocalElasticAgent
    from unicron_elastic.rendezvous.torch.choose import rendezvous_handler

__all__ = ["LaunchConfig", "_get_addr_and_port", "_get_entrypoint_name", "elastic_launch", "launch_agent"]


if TYPE_CHECKING:
    _get_addr_and_port: Any
    _get_entrypoint_name: Any


class elastic_launch:
    """Launches an agent that runs ``entrypoint``; see torch.distributed.launcher.api.elastic_launch."""

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: Any = None,
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
    health_check_server: Any = None,
    *,
    runtime: Runtime | None = None,
) -> dict[int, Any]:
    """torch's launch_agent with our agent and rendezvous; ``runtime`` is one that was begun early.

    Where torch is not as expected, it is torch's with torch's.
    """
    stepping_aside.tell()
    more = only_accepted(torch_api.launch_agent, health_check_server=health_check_server)  # torch 2.13 and newer
    if not stepping_aside.why_not_ours() and not (config.numa_options and lacks(Feature.NUMA)):
        agent = LocalElasticAgent if runtime is None else partial(LocalElasticAgent, runtime=runtime)
        try:
            return agent_launcher(agent, rendezvous_handler)(config, entrypoint, args, **more)
        except stepping_aside.STRANGE as error:
            if not stepping_aside.may_step_aside():
                raise
            stepping_aside.tell(f"{type(error).__name__}: {error}")
    results: dict[int, Any] = torch_api.launch_agent(config, entrypoint, args, **more)
    return results


def __getattr__(name: str) -> Any:
    """What else torch's module has."""
    return getattr(torch_api, name)
