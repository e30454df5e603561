"""The agent's side of the worlds of its job: makes the next one, tells its members, invites newcomers."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Store

from unicron_elastic.launcher.loop import Loop
from unicron_elastic.launcher.workers import WorkerProcess, WorkersContext
from unicron_elastic.launcher.world_log import StoreLog, WorldLog, WorldWatch
from unicron_elastic.recovery.commands import ChangeWorld, InviteMember, TellWorld
from unicron_elastic.recovery.events import Event, WorldChanged
from unicron_elastic.rendezvous.bound_store import bound_store
from unicron_elastic.rendezvous.towards import address_towards
from unicron_elastic.worker.channel import ChannelClosed, Message
from unicron_elastic.world import Member, World

__all__ = ["Round", "Worlds"]

STORE_TIMEOUT_S = 300.0  # torch's own
_MEMBERS = "unicron/members"  # of each node, in the round's store

_ANYWHERE = ("", "0.0.0.0", "::")  # what a server binds that listens on all addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The agents that have met: this one's ``rank`` among ``size``, what its ``node`` is called, and their store.

    ``log`` is where worlds are written if not in that store, as it may be lost with its node. ``master`` is where the
    others find the agent that hosts the store.
    """

    rank: int
    size: int
    node: str
    store: Store
    log: WorldLog | None = None
    master: str = ""


class Worlds:
    """Of one agent. ``post`` takes events, in the loop."""

    def __init__(self, loop: Loop, post: Callable[[Event], None], say: Callable[[str], None]) -> None:
        self._loop = loop
        self._post = post
        self._say = say
        self._round: Round | None = None
        self._watch: WorldWatch | None = None
        # Where members meet, by the address on which each listens: they outlive them all.
        self._stores: dict[str, Any] = {}
        self._key = secrets.token_hex(32)  # with which state is asked for
        self._generation = 0
        self._world: World | None = None
        self._context: WorkersContext | None = None
        self._sources: dict[int, list[int]] = {}  # by newcomer: who else could serve it
        self._asked: dict[int, int] = {}  # by newcomer: who is to serve it, and has not answered
        self._is_fixed = False
        self._leads = True  # begins the log of this round
        self._told_of: list[dict[str, Any]] = []  # by each agent of the round, when they met

    @property
    def log_outlives_store(self) -> bool:
        """Whether the worlds go on when the round's store is lost."""
        return self._world is not None and self._round is not None and self._round.log is not None

    def begin(self, generation: int, context: WorkersContext) -> None:
        """Forgets the worlds of the generation before. Numbers begin anew, and so do the stores where members meet."""
        self.stop()
        self._generation, self._context = generation, context
        self._world = self._round = None
        self._stores = {}
        self._sources, self._asked = {}, {}
        self._leads = True

    def join(self, this_round: Round | None, members: tuple[Member, ...]) -> None:
        """The agents of a new generation have met; ``members`` may come to be of its workers here.

        None: they have no store of their own in which they could agree. Until a worker wants to be a member of a world
        nobody looks for any: jobs whose scripts do without cost their store nothing.
        """
        self._round = this_round
        self._is_fixed = this_round is None
        if this_round is None or this_round.size == 1:
            return
        claims = [] if self._world is None else [m.name for m in self._world.members if m.node == this_round.node]
        told_of = {
            "first": [[member.name, member.node, member.local_rank] for member in members],
            "claims": claims,
            "world": None if self._world is None else self._world.to_message(),
        }
        generation = self._generation

        def tell() -> None:
            this_round.store.set(f"{_MEMBERS}/{this_round.rank}", json.dumps(told_of))

        def told(world: World) -> None:
            self._loop.call_soon(lambda: self._adopt(world, generation))

        def trouble(reason: str) -> None:
            self._loop.call_soon(lambda: self._say(f"The worlds of the job cannot be read: {reason}"))

        log = this_round.log or StoreLog(this_round.store)
        begin = partial(self._begin_log, this_round)
        self._watch = WorldWatch(log, tell=tell, first=begin, make=self._make, on_world=told, on_trouble=trouble)
        self._watch.start()
        if self._world is not None:
            self._watch.want()

    def stop(self) -> None:
        """Agrees on nothing any more."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def close(self) -> None:
        """Lets go of the round's store, and of its own: their ports must be free when the agent has ended."""
        self.stop()
        self._round = None
        self._stores = {}

    def look(self) -> None:
        """Something may have changed in the log."""
        if self._watch is not None:
            self._watch.look()

    def change(self, command: ChangeWorld) -> None:
        """Has the agents agree on the next world."""
        if self._watch is not None:
            self._watch.change(command)
        else:
            world = self._make(self._world, command)
            if world is not None:
                self._adopt(world, self._generation)

    def do(self, command: TellWorld | InviteMember) -> None:
        """What the state machine decided."""
        if isinstance(command, TellWorld):
            self._tell(command.local_rank)
        else:
            self._sources[command.local_rank] = list(command.sources)
            self._ask_next(command.local_rank)

    def may_enter(self, local_rank: int) -> bool:
        """Whether a worker may be a member; where agents cannot agree it is told that the world is fixed."""
        if self._is_fixed:
            self._send(local_rank, {"fixed": True})
        elif self._watch is not None:
            self._watch.want()
        return not self._is_fixed

    def serving(self, message: Message) -> None:
        """A member serves its state to a newcomer, or cannot."""
        newcomer = message.get("for")
        if not isinstance(newcomer, int) or newcomer not in self._asked:
            return
        del self._asked[newcomer]
        if isinstance(message["serving"], dict):
            self._send(newcomer, {"join": {"sources": [message["serving"]], "key": self._key}})
        else:
            self._ask_next(newcomer)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _make(self, before: World | None, wanted: ChangeWorld) -> World | None:
        """The world after a change; None if another agent has made it so. Called from the watching thread, too."""
        assert self._round is not None
        if before is None:
            return self._make_first(wanted) if self._leads else None
        if wanted.of is not None and before.number > wanted.of:
            return None
        names = {member.name for member in before.members}
        is_new = bool(names & set(wanted.lost)) or any(member.name not in names for member in wanted.joined)
        if (wanted.lost or wanted.joined) and not is_new:
            return None
        return before.after(
            store=self._address(),
            reason=wanted.reason,
            lost=wanted.lost,
            joined=wanted.joined,
            restarts_used=wanted.restarts_used,
        )

    def _begin_log(self, this_round: Round) -> World | None:
        """The world of before without those whose agents have not come, if this agent is the one to say so.

        Called from the watching thread. Raises DistError.
        """
        keys = [f"{_MEMBERS}/{rank}" for rank in range(this_round.size)]
        self._told_of = [json.loads(bytes(text)) for text in this_round.store.multi_get(keys)]
        numbers = [each["world"]["number"] if each["world"] else 0 for each in self._told_of]
        self._leads = numbers.index(max(numbers)) == this_round.rank
        world = self._world
        if not self._leads or world is None:
            return None
        claimed = {name for each in self._told_of for name in each["claims"]}
        gone = [member.name for member in world.members if member.name not in claimed]
        if not gone:
            return world
        reason = "Other nodes have met, and members whose nodes have not come are left out."
        return world.after(store=self._address(), reason=reason, lost=gone)

    def _make_first(self, wanted: ChangeWorld) -> World:
        assert self._round is not None
        members = list(wanted.joined)
        if self._round.size > 1:
            members = [Member(name=n, node=d, local_rank=r) for each in self._told_of for n, d, r in each["first"]]
        return World(number=1, members=tuple(members), store=self._address(), restarts_used=wanted.restarts_used)

    def _adopt(self, world: World, generation: int) -> None:
        if generation == self._generation and (self._world is None or world.number >= self._world.number):
            self._world = world
            for newcomer, source in tuple(self._asked.items()):
                if not self._is_up(source):  # it cannot answer any more
                    self._ask_next(newcomer)
            self._post(WorldChanged(at=time.monotonic(), world=world, generation=generation))

    def _address(self) -> str:
        assert self._round is not None
        address = _own_address(self._round)  # another one once a node that was alone has met others
        if address not in self._stores:
            self._stores[address] = bound_store(address, timedelta(seconds=STORE_TIMEOUT_S))
        return f"{address}:{self._stores[address].port}"

    def _tell(self, local_rank: int) -> None:
        assert self._world is not None
        assert self._round is not None
        for member in self._world.members:
            if (member.node, member.local_rank) == (self._round.node, local_rank):
                self._send(local_rank, {"world": self._world.to_message(), "you": member.name})

    def _ask_next(self, newcomer: int) -> None:
        """Asks the next source; a newcomer that hears of none asks again."""
        sources = self._sources.get(newcomer, [])
        self._asked.pop(newcomer, None)
        while sources and not self._is_up(sources[0]):
            sources.pop(0)
        if sources:
            self._asked[newcomer] = sources.pop(0)
            self._send(self._asked[newcomer], {"serve": newcomer, "key": self._key})
        else:
            self._send(newcomer, {"join": {"sources": [], "key": self._key}})

    def _is_up(self, local_rank: int) -> bool:
        worker = self._workers().get(local_rank)
        return worker is not None and worker.returncode is None and worker.control is not None

    def _send(self, local_rank: int, message: Message) -> None:
        worker = self._workers().get(local_rank)
        if worker is not None and worker.control is not None:
            with contextlib.suppress(ChannelClosed, OSError):
                worker.control.send(message)

    def _workers(self) -> dict[int, WorkerProcess]:
        return self._context.workers if self._context is not None else {}


def _own_address(this_round: Round) -> str:
    """Where the other nodes reach this one: what it is called on the way to the store where they have met."""
    if this_round.size == 1:
        return "127.0.0.1"
    host, port = _where(this_round.store)
    if host in _ANYWHERE and this_round.master:
        return this_round.master  # this one hosts that store, and towards itself it would be called 127.0.0.1
    return address_towards(host, port)


def _where(store: Any) -> tuple[str, int]:
    """Of a TCPStore, below the prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(store.host), int(store.port)
