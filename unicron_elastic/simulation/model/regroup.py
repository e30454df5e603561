"""How a job that goes on in place comes to other numbers of nodes, and for how long it stands still for that."""

from __future__ import annotations

from unicron_elastic.simulation.model.accounting import IncidentEntry
from unicron_elastic.simulation.model.durations import Durations
from unicron_elastic.simulation.model.shape import JobShape
from unicron_elastic.simulation.model.training import Training


def regroup_s(training: Training, durations: Durations) -> float:
    """Survivors, or all with newcomers, make a world."""
    return durations.regroup_s(float(training.size * training.shape.node_gpus))


def fetch_s(shape: JobShape, nodes: int, durations: Durations) -> float:
    """A node gets the state that it needs: that of one replica, or the part of it that is on one node."""
    tensor, pipeline = shape.layout_on(nodes)
    return durations.fetch_s(shape.parameters, max(1, tensor * pipeline // shape.node_gpus))


def joined(training: Training, nodes: int, durations: Durations, entry: IncidentEntry | None) -> None:
    """Nodes that have started and have the state join at the end of a step."""
    training.grow(training.replaced(nodes))
    training.stall_for(regroup_s(training, durations), "transition", entry)


def settle(training: Training, planned: int, durations: Durations) -> None:
    """No node is to come any more for those that are missing: the job counts on ``planned``, which are there.

    If it would be no faster, it goes on as the survivors do. Where the model is divided in another way, or where
    nobody is left to go on, all processes begin again.
    """
    shape = training.shape
    is_alone = training.lost_part() >= 1.0
    if not is_alone and shape.rate_flops(planned) <= shape.rate_flops(training.size) * (1.0 - training.lost_part()):
        return
    lost = training.lost_entries()
    is_same = shape.layout_on(planned) == shape.layout_on(training.size)
    training.resize(planned)
    if is_alone or not is_same:
        restart_s = durations.process.value + durations.fetch_s(shape.parameters, max(planned, 1))
        entry = lost[-1] if lost else None
        training.stall_for(restart_s + regroup_s(training, durations), "transition", entry)
