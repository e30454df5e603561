"""The agent's shelf of snapshots: it keeps open what its workers have written, so that it survives them.

A new worker gets the files of its place to go on with. For ranks that begin on another node there are the copies that
each agent makes of a neighbouring node's snapshots.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.agent.worlds.neighbour_copies import NeighbourCopies
from unicron_elastic.launcher.common.kept_snapshots import SLOTS_MAX, NodeShelf
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.rendezvous.store.own_address import address_towards
from unicron_elastic.state.snapshot.exchange import Servers, SnapshotExchange
from unicron_elastic.state.snapshot.file import SnapshotFile
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.state.snapshot.newest_common import best_for
from unicron_elastic.state.snapshot.offers import Local, Remote
from unicron_elastic.worker.channel import close_all
from unicron_elastic.worker.instructions import MakeSnapshot, RemoteSnapshot, SnapshotOffers
from unicron_elastic.worker.notices import SnapshotMade

SAVE_S = 20.0  # so long the end of a step is waited for, of a job that is to wait for nodes
ANSWER_S = 2.0  # ... and a worker's word that it will make a snapshot then
OTHERS_MAX = 6  # newest ones of other places that a worker is told of


class Snapshots:
    """Of one agent, from one generation of its workers to the next. All but what threads do is in the loop."""

    def __init__(
        self,
        loop: Loop,
        say: Callable[[str], None],
        secret: Callable[[], str] = lambda: "",
        shelf: NodeShelf | None = None,
    ) -> None:
        """``secret``: of the cluster now, "" if there is none. ``shelf``: what outlives this agent as well, if any."""
        self._secret = secret
        self._loop = loop
        self._say = say
        self._own: dict[tuple[int, int], SnapshotFile] = {}  # by local rank and number
        self._copies = NeighbourCopies()
        self._servers = Servers()
        self._exchange: SnapshotExchange | None = None
        self._host = "127.0.0.1"
        self._remotes: list[Remote] | None = []  # of the other nodes; None: not known yet
        self._askers: list[tuple[WorkerProcess, int, int]] = []
        self._replaced: set[int] = set()
        self._does_round_go_on = False  # workers of it have the state: those that begin here are newcomers
        self._has_asked = self._is_copying = False
        self._said: set[str] = set()
        self._generations = 0
        # Of a job that is to wait: local ranks that have said they will make a snapshot, and that have not answered.
        self._saving, self._unheard = set[int](), set[int]()
        self._kept_now = False  # one of the former has
        self._shelf = shelf
        self.kept_at: float | None = None  # when one was last made that outlives this agent
        for (local_rank, slot), fd in ({} if shelf is None else shelf.take()).items():
            self._hold(local_rank, slot, fd)

    def begin(self, store: Any, rank: int, size: int, master: str | None) -> None:
        """A generation begins, of ``size`` agents that meet in ``store``; its host is ``master``."""
        self.stop()
        self._generations += 1
        self._askers, self._replaced = [], set()
        self._has_asked = self._is_copying = self._does_round_go_on = False
        self._remotes = []
        if size > 1 and store is not None:
            self._exchange = self._exchange_in(store, rank, size)
            self._remotes = None
            self._host = _own_host(master)

    def meet(self, store: Any, rank: int, size: int, master: str | None) -> None:
        """The agents have met again, and the workers of this one go on: newcomers elsewhere are told of that."""
        self.stop()
        self._is_copying = False
        self._does_round_go_on = True
        self._remotes = []
        if size > 1 and store is not None:
            self._exchange = self._exchange_in(store, rank, size)
            self._host = _own_host(master)
            tell = self._exchange.tell_going_on
            threading.Thread(target=_quietly, args=(tell,), name="unicron-shelf", daemon=True).start()
            if self._own or self._copies.files():  # else the script may have no snapshots at all
                self._offer(self._exchange)  # to who may be another neighbour now
        self._answer_all()

    def _exchange_in(self, store: Any, rank: int, size: int) -> SnapshotExchange:
        secret = self._secret()
        self._servers.use(secret)
        return SnapshotExchange(store, rank, size, secret)

    def stop(self) -> None:
        """Copies nothing more."""
        if self._exchange is not None:
            self._exchange.stop()
            self._exchange = None

    def close(self) -> None:
        """Ends with the agent."""
        self.stop()
        self._servers.close()
        if self._shelf is not None:
            self._shelf.close()

    def replaced(self, local_rank: int) -> None:
        """A worker was replaced while the others go on: it gets its state from them."""
        self._replaced.add(local_rank)

    # -- what workers say ---------------------------------------------------------------------------------------------

    def made(self, worker: WorkerProcess, said: SnapshotMade) -> None:
        """Keep what a worker has written; a script may say so, too, and of any file."""
        if 0 <= said.slot < SLOTS_MAX:
            self._keep(worker.local_rank, said.slot, said.fds, is_for_peer=said.is_for_peer)
        else:
            close_all(said.fds)

    def saving(self, worker: WorkerProcess, will_save: bool) -> None:
        """Take a worker's answer whether it makes a snapshot when its step ends."""
        if will_save:
            self._saving.add(worker.local_rank)
        self._unheard.discard(worker.local_rank)

    def _keep(self, local_rank: int, slot: int, fds: Sequence[int], *, is_for_peer: bool) -> None:
        if fds:
            close_all(fds[1:])
            if not self._hold(local_rank, slot, fds[0]):
                return
            if self._shelf is not None:
                self._shelf.keep((local_rank, slot), fds[0])
        if self._shelf is not None:
            self.kept_at = time.monotonic()
        self._kept_now |= local_rank in self._saving
        if is_for_peer and self._exchange is not None:
            self._offer(self._exchange)

    def _hold(self, local_rank: int, slot: int, fd: int) -> bool:
        """Takes a file over, if it is one."""
        try:
            file = SnapshotFile(fd)
        except ValueError as error:
            close_all([fd])
            self._say_once(f"A snapshot of local rank {local_rank} is not kept: {error}.")
            return False
        self._drop(self._own.pop((local_rank, slot), None))
        self._own[local_rank, slot] = file
        return True

    def _drop(self, file: SnapshotFile | None) -> None:
        if file is not None:
            self._servers.drop(file)
            file.close()

    # -- when the job is to wait --------------------------------------------------------------------------------------

    def is_to_save(self) -> bool:
        """Whether the agent of the node has said that the job is to wait, and its state to be kept."""
        return self._shelf is not None and self._shelf.is_to_save()

    def save(self, workers: Collection[WorkerProcess]) -> str:
        """Asks workers for a snapshot when their step ends, and waits for one; returns what is kept, as a sentence."""
        self._saving, self._kept_now = set(), False
        asked = [worker for worker in workers if worker.returncode is None and worker.control is not None]
        self._unheard = {worker.local_rank for worker in asked}
        for worker in asked:
            worker.tell(MakeSnapshot())

        def is_over() -> bool:
            return self._kept_now or all(worker.returncode is not None for worker in asked)

        now = time.monotonic()
        self._loop.run_until(lambda: bool(self._saving) or not self._unheard or is_over(), now + ANSWER_S)
        if self._saving:
            self._loop.run_until(is_over, now + SAVE_S)
        steps = [header.step for file in self._own.values() if (header := file.header()) is not None]
        if not steps:
            return (
                "The job is to wait, and no snapshot of it was made: it begins with what its script has saved itself."
            )
        where = f"The job is to wait, and goes on from step {max(steps)}, which the memory of its nodes keeps"
        if self._kept_now:
            return f"{where}."
        if not self._saving:
            return f"{where}: where ranks have states of their own, none makes a later snapshot for this."
        has_ended = all(worker.returncode is not None for worker in asked)
        why = "the ranks here ended before their step did" if has_ended else f"no step has ended within {SAVE_S:g} s"
        return f"{where}: {why}."

    # -- for the neighbour --------------------------------------------------------------------------------------------

    def _offer(self, exchange: SnapshotExchange) -> None:
        """Tells the neighbour of the newest snapshot of each worker that it is to copy, and copies the other's."""
        newest: dict[int, tuple[Header, SnapshotFile]] = {}
        for (local_rank, _), file in self._own.items():
            header = file.header()
            if header is not None and header.is_for_peer:
                before = newest.get(local_rank)
                if before is None or before[0].key < header.key:
                    newest[local_rank] = (header, file)
        try:
            fresh = [self._servers.told(file, header, self._host) for header, file in newest.values()]
        except OSError as error:
            self._say_once(f"No snapshots are given to other nodes: {error}.")
            return
        threading.Thread(target=_quietly, args=(exchange.offer, fresh), name="unicron-shelf", daemon=True).start()
        self._copy_neighbour(exchange)

    def _copy_neighbour(self, exchange: SnapshotExchange) -> None:
        """Copy the neighbour's snapshots from now on in this round, in a thread of its own."""
        if self._is_copying:
            return
        self._is_copying = True

        def take(remote: Remote) -> None:
            if said := self._copies.take(remote):
                self._loop.call_soon(partial(self._say_once, said))

        def done(ranks: set[int]) -> None:
            self._loop.call_soon(partial(self._drop_outdated, ranks))

        exchange.copy_neighbour(self._copies.has, take, done)

    def _drop_outdated(self, ranks: set[int]) -> None:
        for file in self._copies.outdated(ranks):
            self._drop(file)

    # -- after a restart ----------------------------------------------------------------------------------------------

    def wanted(self, worker: WorkerProcess, rank: int, world_size: int) -> None:
        """Tell a worker of the snapshots from which this rank could go on, once the other nodes have told of theirs."""
        self._askers.append((worker, rank, world_size))
        if self._exchange is not None:  # its neighbour may be lost before this worker has made a snapshot itself
            self._copy_neighbour(self._exchange)
        if self._exchange is not None and not self._has_asked and self._remotes is None:
            self._has_asked = True
            exchange = self._exchange

            def heard(remotes: list[Remote], does_one_go_on: bool, note: str) -> None:
                self._loop.call_soon(partial(self._heard, exchange, remotes, does_one_go_on, note))

            exchange.tell_and_hear(self._held(), heard)
        self._answer_all()

    def _held(self) -> list[dict[str, Any]]:
        """What other nodes may want: the two newest of each worker, and all copies."""
        told = []
        for local in self._locals():
            with contextlib.suppress(OSError):
                told.append(self._servers.told(local.file, local.header, self._host))
        return told

    def _locals(self) -> list[Local]:
        """All that is whole here."""
        files = [*self._own.values(), *self._copies.files()]
        return [Local(header, file) for file in files if (header := file.header()) is not None]

    def _heard(self, exchange: SnapshotExchange, remotes: list[Remote], does_one_go_on: bool, note: str) -> None:
        if exchange is not self._exchange:
            return
        self._remotes = remotes
        self._does_round_go_on |= does_one_go_on
        if note:
            self._say(note)
        self._answer_all()

    def _answer_all(self) -> None:
        if self._remotes is None:
            return
        askers, self._askers = self._askers, []
        for worker, rank, world_size in askers:
            self._answer(worker, rank, world_size, self._remotes)

    def _answer(self, worker: WorkerProcess, rank: int, world_size: int, remotes: list[Remote]) -> None:
        own = {slot: file for (local_rank, slot), file in self._own.items() if local_rank == worker.local_rank}
        others = [local for local in self._locals() if local.file not in own.values()]
        here = best_for(others, rank, world_size)
        near = sorted(here, reverse=True)[:OTHERS_MAX]
        there = best_for(remotes, rank, world_size)
        far = sorted(there, reverse=True)[:OTHERS_MAX]
        files = [*own.values(), *(here[key].file for key in near)]
        kept = SnapshotOffers(
            slots=(*own, *(None for _ in near)),
            remote=tuple(_told(there[key]) for key in far),
            is_restart=self._generations > 1,
            is_replacement=self._does_round_go_on or worker.local_rank in self._replaced,
            fds=tuple(file.fd for file in files),
        )
        worker.tell(kept)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)


def _told(remote: Remote) -> RemoteSnapshot:
    return RemoteSnapshot(header=asdict(remote.header), address=dict(remote.address), key=remote.key)


def _own_host(master: str | None) -> str:
    """This node's address as the others see it."""
    with contextlib.suppress(OSError):
        return address_towards(master, 1)
    return "127.0.0.1"


def _quietly(call: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(Exception):  # the store is lost: the watch of the other nodes tells of that
        call(*arguments)
