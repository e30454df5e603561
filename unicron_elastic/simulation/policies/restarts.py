"""How other systems answer faults: the model of ``published.Costs``, in simulated time.

A fault is noticed after the system's time for it; then the job stands still for its transition, and computes again
what it lost. A node that is lost is away; the job goes on with those that are left, and stands still again when nodes
join it.
"""

from __future__ import annotations

from collections.abc import Callable

from unicron_elastic.faults import Severity
from unicron_elastic.simulation.live.faults import Strike
from unicron_elastic.simulation.live.shows import Shows, shows
from unicron_elastic.simulation.model.accounting import IncidentEntry
from unicron_elastic.simulation.model.durations import DURATIONS, STATE_BYTES
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.training import Training
from unicron_elastic.simulation.policies.policies import ClusterPolicy

_WAITS = "waits"  # why a job stands still that cannot go on with fewer nodes
Takes = Callable[[Strike, float | None], None]  # the strike's node is away for so many seconds; None: for good


class Restarts:
    """The answers of one system in all jobs. ``takes``: takes a node away; nodes join by ``joins``."""

    def __init__(self, engine: SimulationEngine, policy: ClusterPolicy, takes: Takes) -> None:
        assert policy.costs is not None
        self._engine, self._policy, self._costs, self._takes = engine, policy, policy.costs, takes
        self._restarting: dict[str, int] = {}  # how many restarts of a job are under way

    def strike(self, strike: Strike, training: Training) -> None:
        """A fault strikes a job."""
        entry = strike.entry
        training.stall(entry, "detection", entry)
        detection_s = self._costs.detection[strike.method].value
        self._engine.after(detection_s, lambda: self._noticed(strike, training))

    def joins(self, training: Training, nodes: int, entry: IncidentEntry | None) -> None:
        """Nodes join a job: in a restart that is under way, else the job stands still for it once more.

        It does so right after a checkpoint, or a step: nothing is computed again.
        """
        training.resume(_WAITS)
        if self._restarting.get(training.name):
            training.grow(training.replaced(nodes))
            return
        self._begin(training)
        key = object()
        training.stall(key, "transition", entry)
        training.grow(training.replaced(nodes))
        self._engine.after(self._transition_s(training), lambda: self._end(training, key))

    def _noticed(self, strike: Strike, training: Training) -> None:
        entry, costs = strike.entry, self._costs
        is_taken = strike.status_severity is Severity.SEV1
        entry.reason = f"{costs.system}: {strike.status}, so {self._answer(is_taken)}."
        wait_s = self._transition_s(training) + self._redone_s(training, strike)
        self._begin(training)
        training.stall(entry, "transition", entry)
        if is_taken:
            entry.severity = Severity.SEV1
            self._takes(strike, strike.away_s)
        elif not costs.restarts_in_place:
            self._takes(strike, DURATIONS.process.value)
        self._engine.after(wait_s, lambda: self._restarted(strike, training, is_taken=is_taken))

    def _answer(self, is_taken: bool) -> str:
        if is_taken or not self._costs.restarts_in_place:
            return "the job goes on without the node"
        return "the replica restarts" if self._costs.loses == "replica" else "all processes of the job restart"

    def _restarted(self, strike: Strike, training: Training, *, is_taken: bool) -> None:
        self._end(training, strike.entry)
        if is_taken or not self._costs.restarts_in_place:
            return
        if strike.cure is Severity.SEV1:  # it did not help: the same once more, and the node goes
            self.strike(strike.worse(), training)
        elif self._costs.loses == "replica" and shows(strike.status) is not Shows.BROKEN_WORLD:
            training.lack(strike.entry, 1)
            self._engine.after(DURATIONS.process.value, lambda: self._rejoins(strike.entry, training))

    def _rejoins(self, entry: IncidentEntry, training: Training) -> None:
        training.mend(entry)
        training.stall_for(self._transition_s(training), "transition", entry)

    def _begin(self, training: Training) -> None:
        self._restarting[training.name] = self._restarting.get(training.name, 0) + 1

    def _end(self, training: Training, key: object) -> None:
        """Train on the nodes that are there."""
        self._restarting[training.name] -= 1
        training.resume(key)
        if self._restarting[training.name] or not training.missing_nodes:
            return
        if self._costs.loses == "replica":
            return  # the others go on as they are
        if self._policy.shrinks:
            training.resize(training.present)
        else:
            training.stall(_WAITS, "sub_healthy", training.lost_entries()[-1])

    def _transition_s(self, training: Training) -> float:
        shape = training.shape
        load_s = shape.parameters * STATE_BYTES / DURATIONS.storage_bytes_per_s.value if self._policy.loads else 0.0
        return self._costs.transition_s(shape.parameters) + load_s

    def _redone_s(self, training: Training, strike: Strike) -> float:
        steps = self._costs.redone_steps
        if steps is None:
            return training.unsaved_s
        return steps.value * strike.step_part * training.shape.step_s(training.size)
