"""torch's launchers with parts of ours in the place of theirs. Imports torch.

``torch.distributed.run.run`` and ``torch.distributed.launcher.api.launch_agent`` find what they use by name in their
modules. So they are run here with other namespaces, in which some of those names mean ours; torch's modules are as they
were. What torch's own command launches has our agent by ``lend_agent``, which changes one of them for a moment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch.distributed.launcher.api as torch_api
import torch.distributed.run as torch_run
from torch.distributed.launcher.api import LaunchConfig

__all__ = ["LaunchConfig", "agent_launcher", "lend_agent", "run_with", "torch_api", "torch_run"]


def run_with(elastic_launch: Callable[[Any, Any], Any], args: argparse.Namespace) -> None:
    """Run parsed arguments to the job's end, launched by ``elastic_launch(config, entrypoint)``."""
    _with_names(torch_run.run, elastic_launch=elastic_launch)(args)


def agent_launcher(
    agent: Callable[..., Any], rendezvous_handler: Callable[[Any], Any]
) -> Callable[..., dict[int, Any]]:
    """Return torch's ``launch_agent`` with this agent's class and this maker of rendezvous handlers."""
    registry = SimpleNamespace(get_rendezvous_handler=rendezvous_handler)
    return _with_names(torch_api.launch_agent, LocalElasticAgent=agent, rdzv_registry=registry)


def lend_agent(handler: Any, make: Callable[..., Any]) -> None:
    """Let the launch by torch that has this rendezvous get its agent from ``make(theirs, **options)``.

    ``theirs`` makes torch's own. The next agent that is made, of whatever launch, puts torch's class back in its place.
    """
    theirs = torch_api.LocalElasticAgent

    def lent(*args: Any, **options: Any) -> Any:
        torch_api.LocalElasticAgent = theirs
        spec = options.get("spec")
        return theirs(*args, **options) if spec is None or spec.rdzv_handler is not handler else make(theirs, **options)

    torch_api.LocalElasticAgent = lent


def _with_names(function: Any, **names: Any) -> Callable[..., Any]:
    return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)
