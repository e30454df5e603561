"""Rendezvous of nodes that are counted beforehand, which meet anew for each generation of their workers."""

from __future__ import annotations

import time
from contextlib import suppress

from torch.distributed import DistError, DistStoreError, PrefixStore, Store

from unicron_elastic.base.text import counted
from unicron_elastic.compat.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from unicron_elastic.rendezvous.job.answer_in_time import answer_in_time
from unicron_elastic.rendezvous.job.job_rendezvous import PlainRendezvous
from unicron_elastic.rendezvous.job.rounds import RoundStoreError, arrive
from unicron_elastic.rendezvous.job.telling_who_waits import telling_who_waits
from unicron_elastic.rendezvous.torch.fresh_store import FreshStoreRendezvous

CLOSE_S = 1.0

_CLOSED = "unicron/closed"
_LATEST = "unicron/latest"  # the number of the round in which all have met last, if it is not the first


class StaticRendezvous(FreshStoreRendezvous):
    """`StaticRendezvous` numbers the rounds of torch's static ``inner`` handler, whose store outlives them.

    torch's returns at once: an agent whose workers fail starts new ones among those of before, and they find in the
    store what is of the dead. Here nodes wait for each other in each round but the first, in keys of that round alone,
    and its workers get a store that is new. In the first all is as torch has it, ``--master-port`` among it.
    """

    def __init__(self, inner: RendezvousHandler, place: tuple[str, int, int], timeout_s: float) -> None:
        """``place``: where the nodes meet, "host:port", this one's rank, and how many they are."""
        where, self._rank, self._nodes = place
        super().__init__(inner, where.rpartition(":")[0], timeout_s)
        self._shared: Store | None = None
        self._round = 0
        self._store_of_workers: tuple[str, int] | None = None

    @property
    def has_store_of_each_round(self) -> bool:
        """Each round has its own keys."""
        return True

    @property
    def needs_all_nodes(self) -> bool:
        """There are as many as were counted, or none."""
        return True

    @property
    def store_of_workers(self) -> tuple[str, int] | None:
        """Return where that of this round is, which is not on ``--master-port`` from the second one on."""
        return self._store_of_workers

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others. Raises what torch's handler raises, RendezvousClosedError and RendezvousTimeoutError."""
        info = super().next_rendezvous()
        where = info.bootstrap_store_info
        self._store_of_workers = (where.master_addr, where.master_port)
        return info

    def is_closed(self) -> bool:
        """Tell whether a node has closed the rendezvous."""
        return self._shared is not None and bool(self._shared.check([_CLOSED]))

    def set_closed(self) -> None:
        """End the rendezvous for all nodes."""
        self._close("The job has ended on another node.")

    def leave(self) -> None:
        """End the job: the others would wait for this node."""
        self._close(f"The launcher of node {self._rank} was told to end, and the job needs all {self._nodes} nodes.")

    def num_nodes_waiting(self) -> int:
        """Return 1 if a node waits in the next round, which may be one whose agent was started anew."""
        shared = self._shared
        return 0 if shared is None else int(_of_round(shared, self._round + 1).check(["begun"]))

    def shutdown(self) -> bool:
        """Close it: a node that has ended meets nobody any more."""
        self.set_closed()
        self._shared = None
        return super().shutdown()

    def _close(self, why: str) -> None:
        if (shared := self._shared) is not None:
            with suppress(DistError, TimeoutError):  # its host has ended, and with it the job
                answer_in_time(lambda: shared.compare_set(_CLOSED, "", why), CLOSE_S)  # the first reason stays

    def _is_to_replace_store(self) -> bool:
        return self._round > 1 and super()._is_to_replace_store()

    def _meet(self) -> RendezvousInfo:
        if self._shared is None:
            self._info = PlainRendezvous.next_rendezvous(self)  # which says for whom it waits
            self._shared = self._info.store
            is_first_agent = self._shared.add(f"unicron/agents/{self._rank}", 1) == 1
            self._round = 0 if is_first_agent else self._latest()
        number = self._round + 1
        if number > 1:
            self._wait_for_all(_of_round(self._shared, number))
            self._shared.set(_LATEST, str(number))
        self._round = number
        store = _of_round(self._shared, number) if number > 1 else self._shared
        return RendezvousInfo(store, self._rank, self._nodes, self._info.bootstrap_store_info)

    def _latest(self) -> int:
        """Return the round in which the others are, to which this node comes back with another agent."""
        assert self._shared is not None
        return int(self._shared.get(_LATEST)) if self._shared.check([_LATEST]) else 1

    def _wait_for_all(self, store: Store) -> None:
        """Raise RendezvousClosedError if another ends the job meanwhile, and RendezvousTimeoutError."""
        came_before = store.add(str(self._rank), 1) > 1
        store.set("begun", "")
        deadline = time.monotonic() + self._timeout.total_seconds()

        def look() -> bool:
            if self.is_closed():
                assert self._shared is not None
                raise RendezvousClosedError(bytes(self._shared.get(_CLOSED)).decode())
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(self._who_is_missing(store))
            return False

        try:
            with telling_who_waits(lambda: self._who_is_missing(store), self.silent_s):
                arrive(store, self._nodes, look, came_before=came_before)
        except RoundStoreError as error:
            raise DistStoreError(str(error)) from error

    def _who_is_missing(self, store: Store) -> str:
        missing = [str(rank) for rank in range(self._nodes) if not store.check([str(rank)])]
        which = f"{counted(len(missing), 'node', 'nodes')} of rank {', '.join(missing)}"
        return f"This node, of rank {self._rank}, waits for {which}: all start their workers again together."


def _of_round(shared: Store, number: int) -> Store:
    return PrefixStore(f"unicron/round/{number}", shared)
