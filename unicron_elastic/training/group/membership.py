"""How a process belongs to its job: told by unicron-run's agent, or fixed by torchrun's environment, or alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import HashStore, Store

from unicron_elastic.base.in_place import FORCE, is_forced
from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.training.group.meeting import connect_store
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.collectives.broken import break_collectives
from unicron_elastic.worker.instructions import FixedWorld, Instruction, Invitation, NewWorld
from unicron_elastic.worker.notices import Broke, Entered, Notice, Ready
from unicron_elastic.worker.worlds import Link, link

ANSWER_TIMEOUT_S = 60.0
# After a collective failed, at least: the agent decides within milliseconds, unless it waits for the store.
NEXT_WORLD_TIMEOUT_S = 120.0


class Membership(Protocol):
    """Of one process in its job. ``is_fixed``: there is one world, and it does not go on without a member."""

    @property
    def is_fixed(self) -> bool:
        """Known when it has entered."""

    def enter(self) -> Invitation | None:
        """Asks to be a member. None: the first world is there; else the state is to be fetched first."""

    def is_ready(self, state: int) -> None:
        """Says that this newcomer has the state after ``state`` optimizer steps, and waits for a world with it."""

    @property
    def next_world_timeout_s(self) -> float:
        """Return how long at least to wait for the next world after one has broken."""

    def newer_than(self, number: int) -> tuple[World, int | None] | None:
        """Return the newest world that this process has heard of, and its rank there, if that is after this one."""

    def is_newer(self) -> bool:
        """Whether a world has come after the one that was adopted."""

    def is_left(self) -> bool:
        """Whether what goes on in the adopted world has ended: a member is gone, or all are to connect anew.

        A newer world in which others have joined ends nothing: members go on to it together.
        """

    def adopt(self, number: int | None = None) -> tuple[World, int, Store]:
        """The newest world, this process's rank in it, and the store where its members meet.

        Raises Superseded if it is after the one of this ``number``, if that is wanted.
        """

    def wait_for_newer(self, timeout_s: float) -> bool:
        """Waits for a world after the one that was adopted; false if none came in time."""

    def wait_for_agreed(self, timeout_s: float) -> bool:
        """The same for a world that the agents must make, and for which they may have to wait for their store."""

    def wait_until_heard(self, number: int, timeout_s: float) -> bool:
        """Waits until this process has heard of the world ``number``, or of a newer one; whether it has, in time."""

    def broke(self, error: Exception) -> None:
        """The collectives of the adopted world failed. Returns when there is a newer one, else raises ``error``."""

    def tell_broken(self, error: Exception, *, outlives_joins: bool = True) -> None:
        """Lets the other members know that this world has failed for this one, and the agent.

        ``outlives_joins``: what goes on in it goes on when others join; else it ends with any newer world.
        """

    def tell(self, said: Notice) -> None:
        """Says something to the agent, if there is one that hears."""


class FixedMembership:
    """Under torchrun, or alone: one world, which lives as long as all its processes.

    ``why`` says to the user why it is so under unicron-run.
    """

    is_fixed = True
    next_world_timeout_s = 0.0

    def __init__(self, why: str = "") -> None:
        self._is_alone = "RANK" not in os.environ
        self._why = why

    def enter(self) -> None:
        """Find the first world there."""
        if self._why and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"unicron: {self._why}\n")
        self._why = ""

    def is_ready(self, state: int) -> None:
        """Nobody asks."""

    def newer_than(self, number: int) -> tuple[World, int] | None:
        """Return the world of the environment, if that is not known yet."""
        if number:
            return None
        if self._is_alone:
            return _fixed_world(1), 0
        size, rank = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK"))
        return _fixed_world(size), rank

    def is_newer(self) -> bool:
        """Never."""
        return False

    def is_left(self) -> bool:
        """Never."""
        return False

    def adopt(self, number: int | None = None) -> tuple[World, int, Store]:  # noqa: ARG002
        """The world of the environment. Raises what torch raises for a wrong one."""
        if self._is_alone:
            return _fixed_world(1), 0, HashStore()
        store, rank, world_size = next(dist.rendezvous("env://"))
        return _fixed_world(world_size), rank, store

    def wait_for_newer(self, timeout_s: float) -> bool:  # noqa: ARG002
        """None comes."""
        return False

    def wait_for_agreed(self, timeout_s: float) -> bool:  # noqa: ARG002
        """None comes."""
        return False

    def wait_until_heard(self, number: int, timeout_s: float) -> bool:  # noqa: ARG002
        """Return whether it is the only one."""
        return number <= 1

    def broke(self, error: Exception) -> None:
        """Raises it: the launcher restarts all."""
        raise error

    def tell_broken(self, error: Exception, *, outlives_joins: bool = True) -> None:  # noqa: ARG002
        """Raises it: the launcher restarts all."""
        raise error

    def tell(self, said: Notice) -> None:
        """Nobody hears."""


def _fixed_world(size: int) -> World:
    members = tuple(Member(name=str(each), node="here", local_rank=each) for each in range(size))
    return World(number=1, members=members, store="here:0")


class AgentMembership:
    """Under unicron-run: the agent says which world there is."""

    def __init__(
        self,
        to_agent: Link,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        next_world_timeout_s: float = NEXT_WORLD_TIMEOUT_S,
        *,
        replica_size: int = 1,
        break_off: Callable[[], object] | None = None,
    ) -> None:
        """Waits so long at least, and for as long as the agent says that it may need where all have to agree.

        ``replica_size``: of how many processes of this node the replica is; ``break_off`` breaks the connections with
        other replicas, and no more; by default all there are.
        """
        self._link = to_agent
        self._replica_size = replica_size
        self._break_off = break_off
        if break_off is not None:
            ends_adopted = to_agent.must_break

            def breaks_those_alone(world: World) -> bool:
                if ends_adopted(world):
                    break_off()
                return False

            to_agent.must_break = breaks_those_alone
        self._answer_timeout_s = answer_timeout_s
        self.next_world_timeout_s = next_world_timeout_s
        self._world: World | None = None
        self._store: tuple[str, Store] | None = None  # and its address
        self._fixed: FixedMembership | None = None  # where agents cannot agree on worlds

    @property
    def is_fixed(self) -> bool:
        """Where agents cannot agree on worlds."""
        return self._fixed is not None

    def enter(self) -> Invitation | None:
        """Asks the agent. Raises TimeoutError if it does not answer."""
        # Who is invited is a newcomer, also if it is in a world already.
        answers: tuple[type[Instruction], ...] = (Invitation, NewWorld, FixedWorld)
        answer = self._link.ask(
            Entered(replica_size=self._replica_size), answers, self._answer_timeout_s, is_agreed_on=True
        )
        if isinstance(answer, FixedWorld):
            self._fixed = FixedMembership()
        return answer if isinstance(answer, Invitation) else None

    def is_ready(self, state: int) -> None:
        """Raises TimeoutError if no world comes."""
        self._link.ask(Ready(state=state), (NewWorld,), self._answer_timeout_s, is_agreed_on=True)

    def newer_than(self, number: int) -> tuple[World, int | None] | None:
        """Return that of which the agent told."""
        return self._link.newer_than(number) if self._fixed is None else self._fixed.newer_than(number)

    def is_newer(self) -> bool:
        """Whether the agent told of one."""
        return self._link.is_newer(self._world.number if self._world is not None else 0)

    def is_left(self) -> bool:
        """Tell whether the member has left, as the agent's newest world has it."""
        return self._link.is_left()

    def adopt(self, number: int | None = None) -> tuple[World, int, Store]:
        """Raises RuntimeError if this process is not in it, Superseded, and DistError if the store is not there."""
        if self._fixed is not None:
            return self._fixed.adopt()
        world = self._link.adopt(number)
        if world is None:
            raise Superseded
        self._world = world
        rank = world.rank_of(self._link.name)
        if rank is None:
            raise RuntimeError(f"this process is not a member any more: {world.reason}")
        if self._store is None or self._store[0] != world.store:  # that of the node that made it
            self._store = (world.store, connect_store(world.store, self.is_newer))
        return world, rank, self._store[1]

    def wait_for_newer(self, timeout_s: float) -> bool:
        """Waits for the agent's word."""
        assert self._world is not None
        return self._link.wait_for_newer(self._world.number, timeout_s)

    def wait_for_agreed(self, timeout_s: float) -> bool:
        """Waits for the agent's word for as long as the agent may have to."""
        return self.wait_for_newer(max(timeout_s, self._link.patience_s))

    def wait_until_heard(self, number: int, timeout_s: float) -> bool:
        """Waits for the agent's word."""
        return self._link.wait_for_newer(number - 1, timeout_s)

    def broke(self, error: Exception) -> None:
        """Lets the other members know by breaking all connections to them, and the agent by its word.

        Raises at once what a signal handler of the script has raised.
        """
        if self._fixed is not None or is_of_script(error):
            raise error
        if not self._link.is_left():
            self.tell_broken(error)
        if not self.wait_for_agreed(self.next_world_timeout_s):
            raise error

    def tell_broken(self, error: Exception, *, outlives_joins: bool = True) -> None:
        """Breaks all connections to the other members, and tells the agent why."""
        assert self._world is not None
        if self._break_off is None:
            break_collectives(str(error), is_quiet=True)
        else:
            self._break_off()
        why = f"{type(error).__name__}: {error}"[:4000]
        self.tell(Broke(world=self._world.number, error=why, outlives_joins=outlives_joins))

    def tell(self, said: Notice) -> None:
        """Says something to the agent; that it cannot hear shows elsewhere."""
        try:
            self._link.say(said)
        except (ChannelClosed, OSError):
            pass


def membership(
    serve: Callable[[str], dict[str, Any]],
    backend: str,
    *,
    replica_size: int = 1,
    break_off: Callable[[], object] | None = None,
) -> Membership:
    """This process's. ``serve`` begins to offer its state to newcomers that know a key, and returns where.

    ``replica_size``, ``break_off``: see `AgentMembership`.

    Raises RuntimeError for the second time under unicron-run, and ValueError for a wrong UNICRON_IN_PLACE.
    """
    to_agent = link()
    if to_agent is None:
        return FixedMembership()
    if why := why_not_in_place(backend, os.environ):
        return FixedMembership(why)
    if to_agent.on_serve is not None:
        raise WrongUseError("a process has one Run: register what else there is with it, by name")
    to_agent.on_serve = serve
    return AgentMembership(to_agent, replica_size=replica_size, break_off=break_off)


def why_not_in_place(backend: str, environ: Mapping[str, str]) -> str:
    """Say why ranks do not go on in place over this ``backend``, in one sentence; "" if they do.

    gloo's sums are there when a collective ends, and others' are not: NCCL's come later, on the device. Raises
    ValueError for a wrong UNICRON_IN_PLACE.
    """
    is_wanted = is_forced(environ)
    parts = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    if is_wanted or parts == {"gloo"}:
        return ""
    return (
        f"on {backend} no rank goes on in place yet: after a loss all ranks begin again, from memory if the script "
        f"keeps snapshots (snapshot_every, run.restore()). {FORCE}=force tries it all the same, untested."
    )
