"""The agent's side of the worlds of its job: makes the next one, tells its members, invites newcomers."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, Store

from unicron_elastic.base.world import NO_END, Member, World
from unicron_elastic.launcher.agent.process.workers import WorkerProcess, WorkersContext
from unicron_elastic.launcher.agent.worlds.log import LogNotReady, StoreLog, WorldLog, WorldWatch
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.commands import ChangeWorld, InviteMember, TellWorld
from unicron_elastic.recovery.events import Event, WorldChanged
from unicron_elastic.rendezvous.job.bound_store import bound_store
from unicron_elastic.rendezvous.store.own_address import address_towards
from unicron_elastic.worker.instructions import BePatient, FixedWorld, Instruction, Invitation, NewWorld, ServeState

STORE_TIMEOUT_S = 300.0  # torch's own
# Of each agent, in the round's store: of the world from before, and who may come to be the first members.
_BEFORE, _FIRST = "unicron/before", "unicron/members"
_NOTHING: dict[str, Any] = {"number": 0, "claims": []}  # of who is gone

_ANYWHERE = ("", "0.0.0.0", "::")  # what a server binds that listens on all addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMeeting:
    """The agents that have met: this one's ``rank`` among ``size``, what its ``node`` is called, and their store.

    A node alone needs none, and must not hold it: the next round's may have to listen on the same port.
    ``log`` is where worlds are written if not in that store, as it may be lost with its node. ``master`` is where the
    others find the agent that hosts the store. ``nodes``: the agents, by rank, as the rendezvous tells of their loss.
    ``others_ended``: those who have not come have ended well, so that nothing of theirs was lost.
    """

    rank: int
    size: int
    node: str
    store: Any  # a Store; None of a node alone
    log: WorldLog | None = None
    master: str = ""
    nodes: tuple[str, ...] = ()
    others_ended: bool = False


class Worlds:
    """Of one agent. ``post`` takes events, in the loop."""

    def __init__(
        self, loop: Loop, post: Callable[[Event], None], say: Callable[[str], None], patience_s: float = 0.0
    ) -> None:
        """``patience_s``: so long agreement may wait for the store of the log, and with it the workers."""
        self._patience_s = patience_s
        self._loop = loop
        self._post = post
        self._say = say
        self._round: AgentMeeting | None = None
        self._watch: WorldWatch | None = None
        self._writes_still: threading.Thread | None = None  # of a watch that was stopped
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
        self._gone: frozenset[str] = frozenset()  # agents of this round that were lost or have left
        self._pending: list[ChangeWorld] = []  # changes that no world is known to have

    @property
    def log_outlives_store(self) -> bool:
        """Whether the worlds go on when the round's store is lost."""
        return self._world is not None and self._round is not None and self._round.log is not None

    def begin(
        self, generation: int, context: WorkersContext, store: Store | None, rank: int, *, is_fixed: bool = False
    ) -> None:
        """Forgets the worlds of the generation before. Numbers begin anew, and so do the stores where members meet.

        ``is_fixed``: agents cannot agree on any, which a worker may ask before they have met.

        Tells the other agents of ``store``, their round's, that this one has no world: they need not wait until its
        workers have started, which may take long. None: there are no others.
        """
        self.stop()
        self._generation, self._context, self._is_fixed = generation, context, is_fixed
        self._world = self._round = None
        self._stores = {}
        self._sources, self._asked = {}, {}
        self._leads = True
        self._pending = []
        if store is not None:
            with contextlib.suppress(DistError):  # if that store is gone this round is over
                store.set(f"{_BEFORE}/{rank}", _before(None, ()))

    def join(self, this_round: AgentMeeting | None, members: tuple[Member, ...], living: Collection[str] = ()) -> None:
        """The agents of a new generation have met; ``members`` may come to be of its workers here.

        None: they have no store of their own in which they could agree. Until a worker wants to be a member of a world
        nobody looks for any: jobs whose scripts do without cost their store nothing. ``living`` are the members here
        that were not lost.
        """
        self._round = this_round
        self._is_fixed = this_round is None
        self._gone = frozenset()
        pending, self._pending = self._pending, []
        if this_round is None:
            return
        own = () if self._world is None else self._world.members
        claims = tuple(each.name for each in own if each.node == this_round.node and each.name in living)
        if this_round.size == 1:
            self._join_alone(this_round, claims)
        else:
            self._follow(this_round, members, claims)
        for change in pending:
            self.change(change)

    def _join_alone(self, this_round: AgentMeeting, claims: Collection[str]) -> None:
        """The others have not come: those of them that were members are left out, if anybody is left."""
        world = None if self._world is None else self._without_unclaimed(this_round, self._world, claims)
        if world is not None:
            self._adopt(world, self._generation)

    def _follow(self, this_round: AgentMeeting, members: tuple[Member, ...], claims: Collection[str]) -> None:
        generation, before, has_world = self._generation, _before(self._world, claims), self._world is not None
        first = json.dumps([[member.name, member.node, member.local_rank] for member in members])

        def tell() -> None:
            this_round.store.set(f"{_BEFORE}/{this_round.rank}", before)
            this_round.store.set(f"{_FIRST}/{this_round.rank}", first)

        def do_others_train() -> bool:  # where that costs no question: what is written to this log comes by itself
            return this_round.log is not None and this_round.log.after(0) is not None

        def told(world: World) -> None:
            self._loop.call_soon(lambda: self._adopt(world, generation) if self._is_followed(this_round) else None)

        def trouble(reason: str) -> None:
            self._loop.call_soon(lambda: self._say(f"The worlds of the job cannot be read: {reason}"))

        def away(reason: str) -> None:
            self._loop.call_soon(lambda: self._say(self._what_waits(reason)))

        log = this_round.log or StoreLog(this_round.store)
        begin = partial(self._begin_log, this_round)
        # Nothing that the watch is given may hold it: the round's store, its threads and its sockets go when the watch
        # does, and nobody collects cycles in a process that is as still as this one.
        self._watch = WorldWatch(
            log,
            tell=tell,
            do_others_train=do_others_train,
            first=begin,
            make=self._make,
            on_world=told,
            on_trouble=trouble,
            on_away=away,
        )
        self._watch.start()
        if has_world:
            self._watch.want()

    def _what_waits(self, reason: str) -> str:
        """What cannot go on while the log is away, as a sentence; for an empty reason: that it is back."""
        if not reason:
            return "The store answers again: the nodes agree who trains."
        if any(change.lost or change.of is not None for change in self._pending):
            return f"Steps stand still until the store answers, in which the nodes agree who trains: {reason}"
        if self._pending and self._world is not None:
            return f"Who joins waits until the store answers, in which the nodes agree who trains: {reason}"
        return f"The store in which the nodes agree who trains does not answer: {reason}"

    def gone(self, nodes: Collection[str]) -> None:
        """These agents of the round were lost, or have left: what they have not said is not waited for."""
        self._gone |= frozenset(nodes)
        self.look()

    def stop(self) -> None:
        """Agrees on nothing any more; what was not agreed on yet is for the next round."""
        if self._watch is not None:
            self._writes_still, self._watch = self._watch.stop(), None

    def await_end(self) -> None:
        """Wait, after ``stop``, until the other agents can read that the training is over.

        Whoever waits for them in the same store holds its only connection, so that nothing more could be written.
        """
        if self._writes_still is not None:
            self._writes_still.join()

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
        """Have the agents agree on the next world."""
        self._pending.append(command)
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
        self._send(local_rank, BePatient(patience_s=self._patience_s))
        if self._is_fixed:
            self._send(local_rank, FixedWorld())
        elif self._watch is not None:
            self._watch.want()
        return not self._is_fixed

    def served(self, newcomer: int, address: Mapping[str, Any] | None) -> None:
        """Tell a newcomer where a member serves its state, or ask the next member if this one cannot."""
        if newcomer not in self._asked:
            return
        del self._asked[newcomer]
        if address is None:
            self._ask_next(newcomer)
        else:
            self._send(newcomer, Invitation(sources=(dict(address),), key=self._key))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_followed(self, this_round: AgentMeeting) -> bool:
        return self._watch is not None and self._round is this_round

    def _make(self, before: World | None, wanted: ChangeWorld) -> World | None:
        """The world after a change; None if another agent has made it so. Called from the watching thread, too."""
        assert self._round is not None
        if before is None:
            return self._make_first(wanted) if self._leads else None
        if _is_made(before, wanted) or (before.over and wanted.joined):
            return None
        if not wanted.joined and {member.name for member in before.members} <= set(wanted.lost):
            return None  # there is no world without anybody: who has lost its last members begins again
        return before.after(
            store=self._address(),
            reason=wanted.reason,
            lost=wanted.lost,
            joined=wanted.joined,
            restarts_used=wanted.restarts_used,
            anew=wanted.of is not None,
            over=wanted.over,
            parted=wanted.parted,
            lost_in=wanted.lost_in,
        )

    def _begin_log(self, this_round: AgentMeeting) -> World | None:
        """The world of before without those whose agents have not come, if this agent is the one to say so.

        Called from the watching thread. Raises DistError and LogNotReady.
        """
        told = [json.loads(text) if text else _NOTHING for text in self._said(this_round, _BEFORE)]
        numbers = [-1 if gone else each["number"] for gone, each in zip(self._are_gone(this_round), told, strict=True)]
        self._leads = numbers.index(max(numbers)) == this_round.rank
        world = self._world
        if world is None:
            return None
        if not self._leads:
            raise LogNotReady  # who leads may be lost before it has begun
        return self._without_unclaimed(this_round, world, {name for each in told for name in each["claims"]})

    def _without_unclaimed(self, this_round: AgentMeeting, world: World, claimed: Collection[str]) -> World:
        """The world without members whose agents do not speak for them; as it is, if nobody would be left."""
        gone = [member.name for member in world.members if member.name not in claimed]
        if not gone or len(gone) == world.size:
            return world
        reason = "The nodes have met, and members that have not come are left out."
        lost_in = 0 if this_round.others_ended else world.number
        return world.after(store=self._address(), reason=reason, lost=gone, lost_in=lost_in)

    def _said(self, this_round: AgentMeeting, what: str) -> list[str]:
        """What each agent has said, by rank; "" of one that is gone and has not. Raises DistError and LogNotReady."""
        keys = [f"{what}/{rank}" for rank in range(this_round.size)]
        if this_round.store.check(keys):
            return [bytes(text).decode() for text in this_round.store.multi_get(keys)]
        is_there = [this_round.store.check([key]) for key in keys]
        if not all(there or gone for there, gone in zip(is_there, self._are_gone(this_round), strict=True)):
            raise LogNotReady
        found = zip(keys, is_there, strict=True)
        return [bytes(this_round.store.get(key)).decode() if there else "" for key, there in found]

    def _are_gone(self, this_round: AgentMeeting) -> list[bool]:
        """Tell of each agent, by rank, whether it was lost or has left since they met."""
        nodes = this_round.nodes if len(this_round.nodes) == this_round.size else ("",) * this_round.size
        return [node in self._gone for node in nodes]

    def _make_first(self, wanted: ChangeWorld) -> World:
        assert self._round is not None
        members = list(wanted.joined)
        if self._round.size > 1:
            told = [json.loads(text) if text else [] for text in self._said(self._round, _FIRST)]
            members = [Member(name=n, node=d, local_rank=r) for each in told for n, d, r in each]
        return World(number=1, members=tuple(members), store=self._address(), restarts_used=wanted.restarts_used)

    def _adopt(self, world: World, generation: int) -> None:
        if generation == self._generation and (self._world is None or world.number >= self._world.number):
            self._world = world
            self._pending = [each for each in self._pending if not _is_made(world, each, is_over=True)]
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
                self._send(local_rank, NewWorld(world=self._world, name=member.name))

    def _ask_next(self, newcomer: int) -> None:
        """Asks the next source; a newcomer that hears of none asks again."""
        sources = self._sources.get(newcomer, [])
        self._asked.pop(newcomer, None)
        while sources and not self._is_up(sources[0]):
            sources.pop(0)
        if sources:
            self._asked[newcomer] = sources.pop(0)
            self._send(self._asked[newcomer], ServeState(newcomer=newcomer, key=self._key))
        else:
            self._send(newcomer, Invitation(key=self._key))

    def _is_up(self, local_rank: int) -> bool:
        worker = self._workers().get(local_rank)
        return worker is not None and worker.returncode is None and worker.control is not None

    def _send(self, local_rank: int, instruction: Instruction) -> None:
        worker = self._workers().get(local_rank)
        if worker is not None:
            worker.tell(instruction)

    def _workers(self) -> dict[int, WorkerProcess]:
        return self._context.workers if self._context is not None else {}


def nodes_of(store: Store, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return what the agents of these ranks are called in the worlds of the round, as far as they have said so.

    Raises DistError.
    """
    keys = [key for key in (f"{_FIRST}/{rank}" for rank in ranks) if store.check([key])]
    members = [json.loads(bytes(store.get(key)).decode()) for key in keys]
    return tuple(dict.fromkeys(node for each in members for _, node, _ in each))


def _is_made(world: World, wanted: ChangeWorld, *, is_over: bool = False) -> bool:
    """Whether a world has this change; one that changes no member is made by any world once it ``is_over``."""
    if wanted.of is not None and world.number > wanted.of:
        return True
    if wanted.over or wanted.parted.world:
        return world.over > 0 or world.parted >= wanted.parted > NO_END
    if not wanted.lost and not wanted.joined:
        return is_over
    names = {member.name for member in world.members}
    return names.isdisjoint(wanted.lost) and all(member.name in names for member in wanted.joined)


def _before(world: World | None, claims: Collection[str]) -> str:
    """What an agent says of the world from before its round: its number, and which of its members are here."""
    return json.dumps({"number": 0 if world is None else world.number, "claims": sorted(claims)})


def _own_address(this_round: AgentMeeting) -> str:
    """Where the other nodes reach this one: what it is called on the way to the store where they have met."""
    if this_round.size == 1:
        return "127.0.0.1"
    host, port = _where(this_round.store)
    if host in _ANYWHERE and this_round.master:
        return this_round.master  # this one hosts that store, and towards itself it would be called 127.0.0.1
    return address_towards(host, port)


def _where(store: Any) -> tuple[str, int]:
    """Return the place of a TCPStore, below the prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(store.host), int(store.port)
