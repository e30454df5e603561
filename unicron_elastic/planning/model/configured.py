"""How workers are told the configuration with which their job starts, and what follows if it has to be another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from unicron_elastic.base.require import require, require_keys
from unicron_elastic.planning.model.configurations import Configuration

CONFIGURATION = "UNICRON_CONFIGURATION"  # of a worker: the one with which it starts
CONFIGURATIONS = "UNICRON_CONFIGURATIONS"  # of the launcher: those of its job, by number of nodes

ByNodes = Mapping[int, Configuration]


def why_begin_again(known: ByNodes, started_on: int, nodes: int) -> str:
    """Why a job that was started on so many nodes must begin again to go on with ``nodes``, as a sentence; "" if not.

    A process has its part of the model for life, so TP and PP cannot change in place; the number of replicas can.
    """
    before, after = known.get(started_on), known.get(nodes)
    if before is None or after is None or (before.tensor, before.pipeline) == (after.tensor, after.pipeline):
        return ""
    return (
        f"On {nodes} node{'s' * (nodes != 1)} {after} is best, and it runs with TP {before.tensor} x PP "
        f"{before.pipeline}: all workers begin again, from a checkpoint."
    )


def configuration_text(configuration: Configuration) -> str:
    """Return the configuration as it stands in an environment variable."""
    return json.dumps(asdict(configuration), separators=(",", ":"))


def configurations_text(known: ByNodes) -> str:
    """Those by number of nodes, as they stand in an environment variable."""
    return json.dumps({str(nodes): asdict(each) for nodes, each in known.items()}, separators=(",", ":"))


def parse_configuration(text: str, what: str = CONFIGURATION) -> Configuration:
    """What ``configuration_text`` gave. Raises ValueError, which says what is wrong and what would be right."""
    return _made(_loaded(text, what), what)


def parse_configurations(text: str) -> dict[int, Configuration]:
    """What ``configurations_text`` gave. Raises ValueError for anything else."""
    told = _loaded(text, CONFIGURATIONS)
    require(all(nodes.isdecimal() for nodes in told), f"{CONFIGURATIONS} must have numbers of nodes as its keys")
    return {int(nodes): _made(each, f"{CONFIGURATIONS}, {nodes} nodes,") for nodes, each in told.items()}


def _loaded(text: str, what: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise ValueError(f'{what} is {text[:80]!r}: it must be a JSON object, such as {{"replicas": 4, "tensor": 2}}')
    return told


def _made(told: Any, what: str) -> Configuration:
    require(isinstance(told, dict), f"{what} is {told!r}: it must be a JSON object")
    require_keys(told, [each.name for each in fields(Configuration)], what, ("replicas",))
    recompute = told.get("recompute", False)
    require(isinstance(recompute, bool), f"{what}: recompute is {recompute!r}: it must be true or false")
    try:
        return Configuration(**told)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
