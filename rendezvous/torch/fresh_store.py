"""A fresh store for the workers of every generation, around any rendezvous handler."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import PrefixStore, Store

from unicron_elastic.compat import rendezvous as torchs
from unicron_elastic.compat.errors import SignalException
from unicron_elastic.compat.expectations import Feature, lacks
from unicron_elastic.compat.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from unicron_elastic.membership.wait_news import who_is_here
from unicron_elastic.rendezvous.job.bound_store import bound_store
from unicron_elastic.rendezvous.job.job_rendezvous import PlainRendezvous
from unicron_elastic.rendezvous.job.silent_nodes import SilentNodes
from unicron_elastic.rendezvous.job.telling_who_waits import telling_who_waits

LEAVE_TIMEOUT_S = 5.0
_LEAVING = "unicron/leaving"  # how many nodes of the round wanted to

logger = logging.getLogger(__name__)


class FreshStoreRendezvous(PlainRendezvous):
    """Leaves the meeting of nodes to ``inner`` and replaces the store that the workers get.

    torch's dynamic handler gives every generation the same store with no prefix, so that new gloo groups read the
    addresses of dead processes and fail (pytorch#167288). Here the first node hosts a new store in each round and
    tells its address through the round's own keys. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 keeps torch's behaviour.
    """

    def __init__(self, inner: RendezvousHandler, address: str, timeout_s: float = 600.0) -> None:
        """Take the ``address`` under which the other nodes find this one."""
        super().__init__(inner)
        self._address = address
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None
        self._meeting: Store | None = None
        self._has_left = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other nodes, then gives the round a store of its own. Raises what the inner handler raises."""
        info = self._meet()
        self._silent = SilentNodes()
        self._meeting = info.store
        if not self._is_to_replace_store():
            return info
        previous, self._store = self._store, None
        port, address = 0, self._address
        if info.rank == 0:
            store = bound_store(address, self._timeout)
            self._store, port = store, store.port
        del previous
        fresh = RendezvousStoreInfo.build(info.rank, PrefixStore("unicron/fresh", info.store), address, port)
        return RendezvousInfo(info.store, info.rank, info.world_size, fresh)

    def _meet(self) -> RendezvousInfo:
        """Meet the other nodes; the store has keys of this round alone."""
        torchs.forget_first_round(self._handler)
        settings = getattr(self._handler, "settings", None)
        is_alone = settings is None or settings.max_nodes == 1
        with nullcontext() if is_alone else telling_who_waits(lambda: self._who_is_here(settings), self.silent_s):
            return self._handler.next_rendezvous()

    def _is_to_replace_store(self) -> bool:
        return self.use_agent_store and os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def _who_is_here(self, settings: Any) -> str:
        hosts = torchs.hosts_that_wait(self._handler)
        return who_is_here(hosts, settings.min_nodes, settings.max_nodes) if hosts else ""

    def why_stay(self, nodes: int) -> str:
        """Why the job, of ``nodes`` now, cannot go on without this one; "" if it can."""
        settings = getattr(self._handler, "settings", None)
        if settings is None or lacks(Feature.LEAVE):
            return super().why_stay(nodes)
        if nodes <= settings.min_nodes:
            return f"the job needs all {nodes} of its nodes."
        return "the job's rendezvous is hosted on it." if self._hosts_meeting() else ""

    def take_leave(self, nodes: int) -> str:
        """Takes one of the places of this round that the job can spare; why there is none, or "" if there was one."""
        try:
            assert self._meeting is not None
            taken = self._meeting.add(_LEAVING, 1)
            spare = nodes - self._handler.settings.min_nodes
        except SignalException:
            raise
        except Exception as error:
            return f"the other nodes could not be asked whether they can spare it ({error})."
        return "" if taken <= spare else "other nodes leave already, and the job needs the rest."

    def leave(self) -> None:
        """Takes this node out of the rendezvous, which stays open for the others; then only ``shutdown`` may follow."""
        self._has_left = True
        try:
            torchs.leave(self._handler, LEAVE_TIMEOUT_S)
        except SignalException:
            raise
        except Exception as error:  # the others find out by its missing heartbeat
            logger.warning("the rendezvous could not be told that this node leaves: %s", error)

    def shutdown(self) -> bool:
        """Closes what both opened; once this node has left, the rendezvous itself is the others'."""
        self._store = None
        return True if self._has_left else bool(self._handler.shutdown())

    def _hosts_meeting(self) -> bool:
        """Whether this process is the server of the store in which the nodes meet."""
        port = torchs.port_of_meeting(self._handler)
        try:
            connections = psutil.Process().net_connections("tcp")
        except SignalException:
            raise
        except Exception:  # not known, and to leave could end the job
            return True
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
