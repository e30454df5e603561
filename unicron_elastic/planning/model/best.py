"""The configurations with which a job is to start, by number of nodes.

They follow from its spec alone, before anything is measured, so that all nodes conclude the same whenever they ask.
"""

from __future__ import annotations

from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.planning.model.jobs import JobSpec, Modelled
from unicron_elastic.planning.model.throughput import ThroughputModel, estimates

NODES_MAX = 256  # beyond which a job that sets no maximum is told nothing


def configurations_of(spec: JobSpec) -> dict[int, Configuration]:
    """The best one by number of nodes; nothing for a job that no workload describes."""
    if not isinstance(spec.throughput, Modelled):
        return {}
    nodes_max = NODES_MAX if spec.max_nodes is None else min(spec.max_nodes, NODES_MAX)
    model = ThroughputModel(workload=spec.throughput.workload)
    return {
        each.units * spec.unit_nodes: each.configuration
        for each in estimates(model, nodes_max // spec.unit_nodes)
        if each.configuration is not None
    }
