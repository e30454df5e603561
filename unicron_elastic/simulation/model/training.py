"""One job as it is carried out: on how many nodes it trains, what it waits for, and what of it is missing.

Nothing is decided here. A job trains at T(t, x); while ranks are missing that others go on without, at the share of
the replicas that are left; and not at all while anything has it stand still.
"""

from __future__ import annotations

from unicron_elastic.simulation.model.accounting import Books, IncidentEntry, Stall
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.shape import JobShape


class Training:
    """``checkpoint_s``: the interval of checkpoints, None: there are none; ``overhead``: a part of its rate."""

    def __init__(
        self,
        name: str,
        weight: float,
        shape: JobShape,
        books: Books,
        engine: SimulationEngine,
        *,
        overhead: float = 0.0,
        checkpoint_s: float | None = None,
    ) -> None:
        self.name, self.weight, self.shape = name, weight, shape
        self.size = 0  # nodes, with those that are missing
        self._books, self._engine = books, engine
        self._overhead, self._checkpoint_s = overhead, checkpoint_s
        self._stalls: dict[object, Stall] = {}
        self._missing: dict[IncidentEntry, int] = {}  # GPUs
        self._run_s, self._since_s, self._steps = 0.0, engine.now_s, 0.0

    # -- what is ---------------------------------------------------------------------------------------------------

    @property
    def missing_nodes(self) -> int:
        """Whole nodes that are missing."""
        return sum(gpus // self.shape.node_gpus for gpus in self._missing.values())

    @property
    def present(self) -> int:
        """Nodes that are there."""
        return self.size - self.missing_nodes

    @property
    def stands(self) -> bool:
        """Whether it stands still."""
        return bool(self._stalls)

    def is_stalled(self, key: object) -> bool:
        """Whether it stands still for that reason."""
        return key in self._stalls

    @property
    def full_waf(self) -> float:
        """Weighted FLOP/s with all that it counts on."""
        return self.weight * self.shape.rate_flops(self.size)

    @property
    def unsaved_s(self) -> float:
        """For how long it has trained since the last checkpoint."""
        self._count()
        return self._run_s if self._checkpoint_s is None else self._run_s % self._checkpoint_s

    @property
    def steps(self) -> int:
        """Whole optimizer steps since the beginning."""
        self._count()
        return int(self._steps)

    @property
    def step_left_s(self) -> float:
        """Until the step in progress ends, if nothing disturbs it."""
        self._count()
        return (1.0 - self._steps % 1.0) * self.shape.step_s(self.size)

    def lost_part(self) -> float:
        """The part that stands still for what is missing.

        Those who are left go on as before, but no faster than T(t, x) of as many nodes.
        """
        lost = min(1.0, sum(self._raw_part(gpus) for gpus in self._missing.values()))
        full, nodes = self.shape.rate_flops(self.size), self.missing_nodes
        if nodes and full and lost < 1.0:
            lost = max(lost, 1.0 - self.shape.rate_flops(self.size - nodes) / full)
        return lost

    def _raw_part(self, gpus: int) -> float:
        return self.shape.lost_part(self.size, gpus)

    # -- what happens ----------------------------------------------------------------------------------------------

    def stall(self, key: object, phase: str, entry: IncidentEntry | None) -> None:
        """Stand still until ``resume`` of the same key. Of several reasons the first counts."""
        self._count()
        self._stalls[key] = Stall(phase, entry)
        self._tell()

    def resume(self, key: object) -> None:
        """That reason is gone."""
        self._count()
        self._stalls.pop(key, None)
        self._tell()

    def stall_for(self, seconds: float, phase: str, entry: IncidentEntry | None) -> None:
        """Stand still for so long from now."""
        key = object()
        self.stall(key, phase, entry)
        self._engine.after(seconds, lambda: self.resume(key))

    def resize(self, nodes: int) -> None:
        """Count on so many nodes from now on; nothing is missing."""
        self._count()
        self.size = nodes
        self._missing.clear()
        self._tell()

    def grow(self, nodes: int) -> None:
        """Count on so many nodes more, or fewer; what is missing stays so."""
        self._count()
        self.size += nodes
        self._tell()

    def lack(self, entry: IncidentEntry, gpus: int) -> None:
        """So many GPUs are missing, because of that incident."""
        self._count()
        self._missing[entry] = gpus
        self._tell()

    def mend(self, entry: IncidentEntry) -> None:
        """They are not missing any more."""
        self._count()
        self._missing.pop(entry, None)
        self._tell()

    def replaced(self, nodes: int) -> int:
        """So many nodes have come in the places of missing ones; how many were not needed for that."""
        self._count()
        for entry, gpus in list(self._missing.items()):
            if nodes and gpus >= self.shape.node_gpus:
                del self._missing[entry]
                nodes -= 1
        self._tell()
        return nodes

    def lost_entries(self) -> tuple[IncidentEntry, ...]:
        """The incidents that have taken whole nodes."""
        return tuple(entry for entry, gpus in self._missing.items() if gpus >= self.shape.node_gpus)

    def _count(self) -> None:
        now = self._engine.now_s
        if not self._stalls and self.size and self.lost_part() < 1.0:
            self._run_s += now - self._since_s
            self._steps += (now - self._since_s) / self.shape.step_s(self.size)
        self._since_s = now

    def _tell(self) -> None:
        stall = next(iter(self._stalls.values()), None)
        lost, raw = self.lost_part(), sum(self._raw_part(gpus) for gpus in self._missing.values())
        parts = tuple((entry, self._raw_part(gpus) / raw * lost) for entry, gpus in self._missing.items())
        if stall is None and lost >= 1.0:
            stall = Stall("transition", parts[0][0])  # nobody is left to go on
        self._books.job(
            self._engine.now_s,
            self.name,
            full_waf=self.full_waf,
            gpus=float(self.shape.used_nodes(self.size) * self.shape.node_gpus),
            overhead=self._overhead,
            stall=stall if self.size else None,
            missing=parts,
        )
