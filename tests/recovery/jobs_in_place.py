"""A job whose workers can go on in their processes: it makes worlds and starts replacements when told to, as agents do.

The agents of several nodes write the worlds in one log. ``holds``: what this node wants there is kept in ``wanted`` and
comes later, by ``written``; ``world`` and ``others_agree`` are what another node has written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scenario import FIRST_RANK, GLOO_CLOSED, KILLED, Job

from unicron_elastic.base.world import Member, World
from unicron_elastic.faults import Failure
from unicron_elastic.recovery.commands import ChangeWorld, Command, ReplaceWorker
from unicron_elastic.recovery.events import (
    Event,
    MemberEntered,
    MemberLeft,
    MemberParted,
    MemberWentOn,
    StartedWorker,
    StateFetched,
    WorkerReplaced,
    WorldBroke,
    WorldChanged,
)
from unicron_elastic.recovery.state import Part
from unicron_elastic.recovery.worker_loss import REPLACE_AFTER_S

ELSEWHERE = (Member(name="0.0#z", node="n2#z", local_rank=0),)


class InPlace(Job):
    """`InPlace` is a node of a job whose workers ask for a part in a world, and go on when others are lost."""

    def __init__(
        self,
        workers: int = 3,
        *,
        entered: bool = True,
        elsewhere: tuple[Member, ...] = (),
        holds: bool = False,
        replica_size: int = 1,
        why_stay: str = "it is the only node of the job.",
        do_others_train: bool = False,
        **policy: Any,
    ) -> None:
        super().__init__(workers, **policy)
        self.elsewhere = elsewhere
        self.holds = holds
        self.replica_size = replica_size
        self.wanted: list[ChangeWorld] = []
        self.replaced: list[int] = []
        self._pids: dict[int, int] = {}
        self._number = 0
        self.start(why_stay=why_stay, do_others_train=do_others_train)
        if entered:
            for local_rank in range(workers):
                self.entered(local_rank)

    def feed(self, event: Event) -> list[Command]:
        commands = super().feed(event)
        for command in list(commands):
            if isinstance(command, ChangeWorld) and self.holds:
                self.wanted.append(command)
            elif isinstance(command, ChangeWorld):
                commands += self._change(command)
            elif isinstance(command, ReplaceWorker):
                commands += self._replace(command)
        return commands

    def hold(self) -> None:
        """Keep what is wanted of the log from now on, as another node is faster, or the store is away."""
        self.holds = True

    def written(self, change: ChangeWorld | None = None) -> list[Command]:
        """Write ``change``, or else what was wanted first and is not written yet."""
        if change is None:
            change = self.wanted.pop(0)
        elif change in self.wanted:
            self.wanted.remove(change)
        return self._change(change)

    def _change(self, command: ChangeWorld) -> list[Command]:
        if self.state.world is None:
            self._number += 1
            return self.world(self._number, *command.joined, *self.elsewhere)
        world = self.state.world.after(
            store="h:1",
            reason=command.reason,
            lost=command.lost,
            joined=command.joined,
            anew=command.of is not None,
            over=command.over,
            parted=command.parted,
            lost_in=command.lost_in,
        )
        return self.changed(world)

    def world(self, number: int, *members: Member) -> list[Command]:
        return self.changed(World(number=number, members=members, store="h:1"))

    def changed(self, world: World) -> list[Command]:
        self._number = world.number
        return self.feed(WorldChanged(at=self._at(None), world=world, generation=self.state.generation))

    def _replace(self, command: ReplaceWorker) -> list[Command]:
        self.replaced.append(command.local_rank)
        self._pids[command.local_rank] = 10_000 + len(self.replaced)
        started = StartedWorker(
            local_rank=command.local_rank,
            rank=FIRST_RANK + command.local_rank,
            pid=self._pids[command.local_rank],
        )
        return self.feed(
            WorkerReplaced(
                at=self._at(None),
                worker=started,
                restarts_used=command.restarts_used,
                generation=self.state.generation,
            )
        )

    def pid(self, local_rank: int, generation: int | None = None) -> int:
        return getattr(self, "_pids", {}).get(local_rank) or super().pid(local_rank, generation)

    def start(self, *args: Any, **kwargs: Any) -> list[Command]:
        self._pids = {}
        return super().start(*args, **kwargs)

    def entered(self, local_rank: int) -> list[Command]:
        at, size, generation = self._at(None), self.replica_size, self.state.generation
        return self.feed(MemberEntered(at=at, local_rank=local_rank, replica_size=size, generation=generation))

    def fetched(self, local_rank: int) -> list[Command]:
        event = StateFetched(at=self._at(None), local_rank=local_rank, state=7, generation=self.state.generation)
        return self.feed(event)

    def left(self, local_rank: int) -> list[Command]:
        return self.feed(MemberLeft(at=self._at(None), local_rank=local_rank, generation=self.state.generation))

    def went_on(self, local_rank: int, *, reused: int = 0, recomputed: int = 0) -> list[Command]:
        world = self.state.world.number if self.state.world is not None else 1
        event = MemberWentOn(
            at=self._at(None),
            local_rank=local_rank,
            world=world,
            reused=reused,
            recomputed=recomputed,
            generation=self.state.generation,
        )
        return self.feed(event)

    def parted(self, local_rank: int, world: int | None = None, total: int = 9) -> list[Command]:
        at, generation = self._at(None), self.state.generation
        event = MemberParted(at=at, local_rank=local_rank, world=world, total=total, generation=generation)
        return self.feed(event)

    def broke(self, local_rank: int, world: int | None = None, *, outlives_joins: bool = True) -> list[Command]:
        at = self._at(None)
        failure = Failure(
            at=at,
            rank=FIRST_RANK + local_rank,
            local_rank=local_rank,
            pid=self.pid(local_rank),
            exception_type="RuntimeError",
            message=GLOO_CLOSED,
        )
        if world is None:
            world = self.state.world.number if self.state.world is not None else 1
        event = WorldBroke(
            at=at, world=world, failure=failure, outlives_joins=outlives_joins, generation=self.state.generation
        )
        return self.feed(event)

    def begun_elsewhere(self) -> list[Command]:
        """Another node has written the first world, without the workers of this one."""
        return self.world(1, *ELSEWHERE)

    def others_agree(self, *, lost: str = "", joined: str = "", lost_in: int = 0, over: int = 0) -> list[Command]:
        """Another node has written the next world: without members, and with some of its own, by name."""
        assert self.state.world is not None
        members = [Member(name=name, node=f"n{name[0]}#z", local_rank=0) for name in joined.split()]
        return self.changed(
            self.state.world.after(
                store="h:2", reason="n2 says so.", lost=lost.split(), joined=members, lost_in=lost_in, over=over
            )
        )

    def left_out(self) -> list[Command]:
        """Others have made a world without this node's members."""
        assert self.state.world is not None
        return self.others_agree(lost=" ".join(m.name for m in self.state.world.members if m.node == self.state.node))

    def comes_and_goes(self, local_rank: int) -> list[Command]:
        """A worker is killed and replaced, and joins the others."""
        commands = self.exited(local_rank, KILLED) + self.later(REPLACE_AFTER_S)
        return commands + self.entered(local_rank) + self.fetched(local_rank)

    def part(self, local_rank: int) -> Part:
        worker = self.state.find(local_rank)
        assert worker is not None
        return worker.part

    def names(self) -> list[str]:
        """Of the present world's members, by rank."""
        assert self.state.world is not None
        return short(member.name for member in self.state.world.members)


def short(names: Iterable[str]) -> list[str]:
    """The rank, and of how many it takes the place: the end of each name."""
    return [".".join(name.partition("#")[0].split(".")[-2:]) for name in names]


class LateNode(InPlace):
    """`LateNode` is a node whose wish to be in the first world comes after that world."""

    def __init__(self, workers: int = 2, **policy: Any) -> None:
        super().__init__(workers, entered=False, holds=True, **policy)
        self.there = ELSEWHERE


class TwoLogs(InPlace):
    """`TwoLogs` is a node whose wishes are written later, as the log may have those of another node before them."""

    def __init__(self, workers: int, **policy: Any) -> None:
        super().__init__(workers, elsewhere=ELSEWHERE, **policy)
        self.hold()
