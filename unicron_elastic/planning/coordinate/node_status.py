"""One node of the cluster, as the store has it: whether it may work, what it does, for whom, and what it has refused.

Moments are unix seconds, as they pass between coordinators: a monotonic clock means nothing on another host. Clocks
jump; see ``is_within`` for what that may cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from unicron_elastic.base.require import require

REFUSED_S = 600.0  # so long a job that a node has refused is not offered to it again


class Health(Enum):
    """Whether a node may work."""

    OK = "ok"
    DRAINING = "draining"  # an operator wants it out, as soon as its job can do without
    BROKEN = "broken"  # it works for nobody


class NodeState(Enum):
    """What the agent of a node does, as it says itself."""

    IDLE = "idle"
    JOINING = "joining"  # its workers start
    WORKING = "working"
    LEAVING = "leaving"  # its workers end


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node could not or would not work for a job."""

    job: str
    at_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node. It has at most one ``job``, "" if it is idle; only one that leaves its job goes ``towards`` another.

    ``node_id`` is another one each time that an agent starts, ``host`` stays. Raises ``ValueError`` if state, job and
    towards contradict each other.
    """

    node_id: str
    host: str
    label: str = ""  # place in the network
    health: Health = Health.OK
    state: NodeState = NodeState.IDLE
    job: str = ""
    towards: str = ""
    refusals: tuple[Refusal, ...] = ()
    keeps: tuple[str, ...] = ()  # jobs that do not run here now, and whose newest state its memory has

    def __post_init__(self) -> None:
        require(self.node_id != "", "a node has no id")
        is_idle = self.state is NodeState.IDLE
        require(is_idle == (self.job == ""), f"node {self.node_id} is {self.state.value} with the job {self.job!r}")
        require(
            self.towards == "" or self.state is NodeState.LEAVING,
            f"node {self.node_id} goes towards {self.towards} while {self.state.value}: it must be leaving",
        )

    @property
    def heads_for(self) -> str:
        """The job that it works for once all that is under way is done; "" for none."""
        return self.towards if self.state is NodeState.LEAVING else self.job

    @property
    def held_by(self) -> str:
        """The job that counts on it, "" for none: one that leaves is counted on no more."""
        return "" if self.state is NodeState.LEAVING else self.job

    def refuses(self, job: str, at_unix_s: float) -> bool:
        """Whether it has refused the job lately."""
        return any(each.job == job and is_within(at_unix_s, each.at_unix_s, REFUSED_S) for each in self.refusals)


def is_within(at_unix_s: float, since_unix_s: float, length_s: float) -> bool:
    """Whether less than ``length_s`` have passed.

    A moment that lies ahead was written before the clock was set back, or by a host whose clock is fast: then it counts
    as over. So a jump of the clock ends a wait early, at worst, and never makes one longer.
    """
    return 0.0 <= at_unix_s - since_unix_s < length_s
