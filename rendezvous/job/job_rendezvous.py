"""What an agent may ask of its job's rendezvous, besides what torch asks, and the answers of one that can do no more.

A rendezvous of ours says what it can; around a handler of torch's, or of somebody else's, stands ``PlainRendezvous``,
so that the agent asks all in one way and never looks what there is to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.compat.rendezvous import RendezvousHandler, RendezvousInfo, signs_of_life, static_place
from unicron_elastic.membership.wait_news import SILENT_S, who_waits
from unicron_elastic.rendezvous.job.round_watch import RoundListener
from unicron_elastic.rendezvous.job.silent_nodes import SilentNodes
from unicron_elastic.rendezvous.job.telling_who_waits import telling_who_waits

if TYPE_CHECKING:
    from unicron_elastic.rendezvous.records.news_writer import NewsWriter

_STATIC = "static"  # torch's name for nodes that are counted beforehand


class JobRendezvous(RendezvousHandler):  # type: ignore[misc]
    """`JobRendezvous` meets the nodes of one job; the answers here are those of one that can do what torch's can."""

    why_failed = ""  # set before it is shut down for a job that has failed: why, as a sentence
    trains_on = False  # set while the agent meets the others and its workers train on: it does not leave from there

    # What it is.

    @property
    def node_id(self) -> str:
        """Return what this node is called, as no other node ever is; "" if the rendezvous names none."""
        return ""

    @property
    def is_of_cluster(self) -> bool:
        """Return whether there is a cluster, with a secret and metrics of its own."""
        return False

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Return the names of all nodes of this round, by rank; none if the rendezvous names none."""
        return ()

    @property
    def patience_s(self) -> float:
        """Return how long workers may have to wait for what all agents must agree on."""
        return 0.0

    @property
    def outlives_stores(self) -> bool:
        """Return whether the next round has another store, on another host, so that one may be lost."""
        return False

    @property
    def needs_all_nodes(self) -> bool:
        """Return whether the job ends with each node that is told to end."""
        return False

    @property
    def has_store_of_each_round(self) -> bool:
        """Return whether nodes can speak in the round's store: what was said in one must not be heard in the next."""
        return bool(self.get_backend() != _STATIC)

    @property
    def store_of_workers(self) -> tuple[str, int] | None:
        """Return where workers find their store in this round, if not where the command line says."""
        return None

    def cluster_secret(self) -> str:
        """Return what the agents of the cluster know and others do not; "" if there is none."""
        return ""

    def cluster_samples(self) -> Iterable[Any]:
        """Return the metrics of the cluster, where this agent coordinates it."""
        return ()

    def world_log(self) -> Any:
        """Return where the worlds of this round are written; None: in the round's store."""
        return None

    # What it tells.

    def watch_nodes(self, listener: RoundListener) -> None:
        """Tell ``listener`` what happens to this round; nothing where others have to be asked."""

    def has_ended_well(self) -> bool:
        """Return whether the job has ended well on other nodes."""
        return False

    def is_nobody_awaited(self) -> bool:
        """Return whether nobody needs this round's store when the last step is made, without asking that store."""
        return False

    def silent_ranks(self) -> tuple[int, ...]:
        """Return the ranks of nodes that have given no sign of life for long, where nobody tells that they are lost."""
        return ()

    # What it is told.

    def tell_fault(self, reason: str) -> bool:  # noqa: ARG002
        """Tell the other nodes of a fault; whether that is done faster so than in the round's store."""
        return False

    def hold_joins(self, reason: str) -> None:
        """Keep waiting nodes out as long as there is a reason; nobody can be told by torch's."""

    def offer_job(self, argv: Sequence[str], cwd: str, env: Mapping[str, str], nproc_per_node: int) -> None:
        """Let spare nodes know what this job runs. Raises ValueError for what they cannot run."""

    def keep_measured(self, job: str, merge: Callable[[bytes | None], bytes]) -> bool:  # noqa: ARG002
        """Keep what was measured of a planned job; whether it was kept."""
        return False

    def tell_restarts(self, count: int) -> None:
        """Let nodes that take over from all others know how many restarts count; torch's have no place for it."""

    def restarts_taken_over(self) -> int:
        """Return how many count already where no node of this round was in the one before."""
        return 0

    def why_lost_before(self) -> str:
        """Return why nodes that trained with this one in the round before are lost, as a sentence; "": none is."""
        return ""

    def news_writer(self) -> NewsWriter | None:
        """Return what tells others how far the job is; None where they do not look."""
        return None

    # How a node leaves.

    def why_stay(self, nodes: int) -> str:  # noqa: ARG002
        """Return why the job cannot go on without this one of its ``nodes``, as follows "The node stays: "."""
        return f"torch's {self.get_backend()} rendezvous cannot be left."

    def take_leave(self, nodes: int) -> str:
        """Return why this node may not leave just now, "" if it may: of those that would only as many may as can."""
        return self.why_stay(nodes)

    def depart(self, nodes: int, reason: str, have_state: Collection[str] = ()) -> str:  # noqa: ARG002
        """Take leave while the others go on in place; why not, or ""."""
        return "only where --rdzv-backend is unicron the others could go on in place without it."

    def leave(self) -> None:
        """Leave the job, which may go on elsewhere."""

    def keep_out(self, quarantined: Quarantined) -> str:  # noqa: ARG002
        """Put a node into the cluster's quarantine; why not, or ""."""
        return "this job belongs to no cluster."


class PlainRendezvous(JobRendezvous):
    """`PlainRendezvous` asks the torch ``handler`` what torch's can be asked, and says for whom a static one waits."""

    silent_s = SILENT_S

    def __init__(self, handler: RendezvousHandler) -> None:
        self._handler = handler
        self._silent = SilentNodes()

    @property
    def use_agent_store(self) -> bool:
        """Answer as the handler does."""
        return bool(self._handler.use_agent_store)

    def get_backend(self) -> str:
        """Answer as the handler does."""
        return str(self._handler.get_backend())

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes as the handler does."""
        place = static_place(self._handler)
        with nullcontext() if place is None else telling_who_waits(lambda: who_waits(*place), self.silent_s):
            info = self._handler.next_rendezvous()
        self._silent = SilentNodes()
        return info

    def silent_ranks(self) -> tuple[int, ...]:
        """Return them as of the last question how many nodes wait."""
        signs = signs_of_life(self._handler)
        return () if signs is None else self._silent.look(signs)

    def is_closed(self) -> bool:
        """Answer as the handler does."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Close the handler's rendezvous."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Answer as the handler does."""
        return int(self._handler.num_nodes_waiting())

    def get_run_id(self) -> str:
        """Answer as the handler does."""
        return str(self._handler.get_run_id())

    def shutdown(self) -> bool:
        """Shut the handler down."""
        return bool(self._handler.shutdown())


def job_rendezvous(handler: RendezvousHandler) -> JobRendezvous:
    """Return the ``handler`` as what an agent may ask."""
    return handler if isinstance(handler, JobRendezvous) else PlainRendezvous(handler)
