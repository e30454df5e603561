"""A task as the planner sees it: what it is worth on how many nodes, and what a transition costs it.

Terms are those of the Unicron paper (arXiv 2401.00134): a task t of weight w(t) achieves T(t, x) FLOP/s on x nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unicron_elastic.base.require import require, require_count

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """D_transition: seconds for which a task stands still, by what happens to it.

    ``grow_s``: it goes on with more nodes; ``shrink_s``: with fewer; ``replace_s``: with as many, one of which takes
    the place of a lost one; ``stop_s``: it has to wait with none. ``unsaved_s``: what it has trained since its last
    save that outlives its processes, which it does again if it has to wait with none. Raises ``ValueError`` if one is
    negative or not finite, or if to stop costs less than another: it could pay to stop a task while nodes are idle.
    """

    grow_s: float
    shrink_s: float
    replace_s: float
    stop_s: float
    unsaved_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("grow_s", "shrink_s", "replace_s", "stop_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0.0, f"{name} is {value}: it must be a number, 0 or more")
            require(value <= self.stop_s, f"{name} is {value}: it must be at most stop_s, which is {self.stop_s}")
        unsaved_s = self.unsaved_s
        is_right = math.isfinite(unsaved_s) and unsaved_s >= 0.0
        require(is_right, f"unsaved_s is {unsaved_s}: it must be a number, 0 or more")

    @property
    def stopped_s(self) -> float:
        """Returns the seconds of training that a task loses which has to wait with no nodes."""
        return self.stop_s + self.unsaved_s

    @classmethod
    def of(cls, seconds: float) -> Transition:
        """The same cost for every kind, as in the paper."""
        return cls(grow_s=seconds, shrink_s=seconds, replace_s=seconds, stop_s=seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One task, and the nodes it has.

    ``rates_flops``: shape (x_max + 1,), T(t, x) in FLOP/s by number of *units* of ``unit_nodes`` nodes each, 0 where
    the task cannot run; neither concave nor monotone in general. ``min_nodes`` and ``max_nodes`` (None: as many as
    there are rates for) bound what a plan may give it. ``nodes``: x, how many it has, with those in it that were just
    lost, ``lost_nodes``. ``pinned_nodes``: the plan leaves it with so many; 0 pauses it. Raises ``ValueError`` naming
    the task and the value that is wrong.
    """

    name: str
    rates_flops: Floats
    weight: float = 1.0
    min_nodes: int = 1
    max_nodes: int | None = None
    unit_nodes: int = 1
    nodes: int = 0
    lost_nodes: int = 0
    pinned_nodes: int | None = None
    transition: Transition = field(default_factory=lambda: Transition.of(60.0))

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates_flops", _frozen_rates(self.name, self.rates_flops))
        _require_numbers(self)
        _require_holding(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Task):
            return NotImplemented
        is_same = _plain(self) == _plain(other)
        return is_same and np.array_equal(self.rates_flops, other.rates_flops)

    def __hash__(self) -> int:
        return hash((self.name, self.nodes, self.lost_nodes))

    @property
    def held_nodes(self) -> int:
        """The nodes that it still has."""
        return self.nodes - self.lost_nodes

    @property
    def most_nodes(self) -> int:
        """The most that a plan may give it."""
        most = (len(self.rates_flops) - 1) * self.unit_nodes
        return most if self.max_nodes is None else min(most, self.max_nodes)

    @property
    def is_paused(self) -> bool:
        """Whether it is to wait with no nodes."""
        return self.pinned_nodes == 0

    def rate_flops(self, nodes: int) -> float:
        """T(t, x) in FLOP/s for any number of nodes; 0.0 where there is no rate."""
        units, rest = divmod(nodes, self.unit_nodes)
        return float(self.rates_flops[units]) if not rest and units < len(self.rates_flops) else 0.0

    def can_have(self, nodes: int) -> bool:
        """Whether the task runs on exactly ``nodes``."""
        return self.min_nodes <= nodes <= self.most_nodes and nodes > 0 and self.rate_flops(nodes) > 0.0


def _plain(task: Task) -> tuple[object, ...]:
    bounds = task.weight, task.min_nodes, task.max_nodes, task.unit_nodes
    return task.name, *bounds, task.nodes, task.lost_nodes, task.pinned_nodes, task.transition


def _frozen_rates(name: str, rates: npt.ArrayLike) -> Floats:
    """A read-only copy, unless it is one."""
    if isinstance(rates, np.ndarray) and rates.dtype == np.float64 and not rates.flags.writeable:
        found = rates
    else:
        found = np.array(rates, dtype=np.float64)
        found.setflags(write=False)
    require(
        found.ndim == 1 and len(found) > 0,
        f"task {name}: rates_flops has shape {found.shape}: it must have one FLOP/s for each number of units from 0 on",
    )
    wrong = ~(np.isfinite(found) & (found >= 0.0))
    if wrong.any():
        units = int(np.argmax(wrong))
        raise ValueError(
            f"task {name}: the rate of {units} units is {found[units]}: it must be FLOP/s, 0 where it cannot run"
        )
    require(found[0] == 0.0, f"task {name}: the rate of 0 units is {found[0]}: it must be 0")
    return found


def _require_numbers(task: Task) -> None:
    require(
        isinstance(task.name, str) and task.name.strip() != "", f"a task is called {task.name!r}: it must have a name"
    )
    where = f"task {task.name}"
    require(
        math.isfinite(task.weight) and task.weight >= 0.0,
        f"{where}: weight is {task.weight}: it must be a number, 0 or more",
    )
    require_count(f"{where}: min_nodes", task.min_nodes, 1)
    require_count(f"{where}: unit_nodes", task.unit_nodes, 1)
    require_count(f"{where}: nodes", task.nodes)
    require_count(f"{where}: lost_nodes", task.lost_nodes)
    if task.max_nodes is not None:
        require_count(f"{where}: max_nodes", task.max_nodes, 1)
        require(
            task.min_nodes <= task.max_nodes,
            f"{where}: min_nodes is {task.min_nodes}: it must be at most max_nodes, which is {task.max_nodes}",
        )


def _require_holding(task: Task) -> None:
    where = f"task {task.name}"
    require(
        task.lost_nodes <= task.nodes,
        f"{where}: lost_nodes is {task.lost_nodes}: it must be at most nodes, which is {task.nodes}",
    )
    require(
        task.nodes % task.unit_nodes == 0,
        f"{where}: nodes is {task.nodes}: it must be a multiple of unit_nodes, which is {task.unit_nodes}",
    )
    most = (len(task.rates_flops) - 1) * task.unit_nodes
    require(task.nodes <= most, f"{where}: nodes is {task.nodes}: rates_flops ends at {most} nodes, it must reach that")
    if task.pinned_nodes is not None:
        require_count(f"{where}: pinned_nodes", task.pinned_nodes)
        require(
            task.is_paused or task.can_have(task.pinned_nodes),
            f"{where}: pinned_nodes is {task.pinned_nodes}: it must be 0, or a number of nodes on which it can run",
        )
