"""Rendezvous of a job that can only ever have one node: nobody to wait for, a fresh store for every generation."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistNetworkError, PrefixStore, Store

from unicron_elastic.compat.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from unicron_elastic.rendezvous.job.bound_store import bound_store
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous
from unicron_elastic.rendezvous.store.own_address import address_of_this_host


class LocalRendezvous(JobRendezvous):
    """Stands in for torch's c10d or static handler when ``max_nodes`` is 1.

    A store of its own for each generation is what lets a new generation start at once: in a store that outlives its
    workers the new ones read the addresses of the dead (pytorch#167288). ``port`` 0 takes a free one each time.
    """

    def __init__(
        self, *, backend: str, run_id: str, host: str | None = None, port: int = 0, timeout_s: float = 600.0
    ) -> None:
        self._backend = backend
        self._run_id = run_id
        self._host = host or address_of_this_host()
        self._port = port
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None
        self._round = 0
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        """The workers use the store that this handler hosts."""
        return True

    @property
    def has_store_of_each_round(self) -> bool:
        """There is no other node to speak with."""
        return False

    def get_backend(self) -> str:
        """The name that the user gave, for events and logs."""
        return self._backend

    def next_rendezvous(self) -> RendezvousInfo:
        """Opens the next generation's store.

        Raises RendezvousConnectionError if a given port cannot be used and RendezvousClosedError after the end.
        """
        if self._closed:
            raise RendezvousClosedError(f"the rendezvous {self._run_id!r} is closed")
        self._store = None  # a store on a fixed port must be gone before the next one can bind it
        try:
            store = bound_store(self._host, self._timeout, self._port)
        except DistNetworkError as error:
            raise RendezvousConnectionError(
                f"port {self._port} cannot be listened on (--master-port): {str(error).partition(chr(10))[0]}"
            ) from error
        self._store = store
        self._round += 1
        info = RendezvousStoreInfo(self._host, store.port)
        return RendezvousInfo(PrefixStore(f"unicron/{self._round}", self._store), 0, 1, info)

    def is_closed(self) -> bool:
        """Whether ``set_closed`` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Ends the rendezvous."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Nobody can join."""
        return 0

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Closes the store."""
        self._closed = True
        self._store = None
        return True
