"""A fresh store for the workers of every generation, around any rendezvous handler."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

__all__ = ["FreshStoreRendezvous"]


class FreshStoreRendezvous(RendezvousHandler):  # type: ignore[misc]
    """Leaves the meeting of nodes to ``inner`` and replaces the store that the workers get.

    torch's dynamic handler gives every generation the same store with no prefix, so that new gloo groups read the
    addresses of dead processes and fail (pytorch#167288). Here the first node hosts a new store in each round and
    tells its address through the round's own keys. TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 keeps torch's behaviour.
    """

    def __init__(self, inner: RendezvousHandler, local_addr: str | None, timeout_s: float = 600.0) -> None:
        self._inner = inner
        self._local_addr = local_addr
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None

    @property
    def use_agent_store(self) -> bool:
        """As the inner handler says."""
        return bool(self._inner.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the other nodes, then gives the round a store of its own. Raises what the inner handler raises."""
        # torch's dynamic handler keeps what it told the first round's nodes and tells it only once: a node that joins
        # later would wait for it in vain.
        if hasattr(self._inner, "_bootstrap_store_info"):
            self._inner._bootstrap_store_info = None
        info = self._inner.next_rendezvous()
        if not self.use_agent_store or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") == "1":
            return info
        previous, self._store = self._store, None
        port = 0
        if info.rank == 0:
            self._store = TCPStore("0.0.0.0", 0, None, True, self._timeout, wait_for_workers=False)
            port = self._store.port
        del previous
        address = self._local_addr or socket.getfqdn()
        fresh = RendezvousStoreInfo.build(info.rank, PrefixStore("unicron/fresh", info.store), address, port)
        return RendezvousInfo(info.store, info.rank, info.world_size, fresh)

    def get_backend(self) -> str:
        """The inner handler's name."""
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        """As the inner handler says."""
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        """Closes the rendezvous for every node."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """As the inner handler says."""
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        """The job's id."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """Closes what both opened."""
        self._store = None
        return bool(self._inner.shutdown())
