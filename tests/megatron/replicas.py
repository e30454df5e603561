"""Whole jobs of the real Run, Members and Buckets over fake groups and agents; one thread runs at a time, as drawn.

A gradient has an element for each micro-batch, so that a sum says what is in it; one more element, of the first bucket,
stands for what the members of a replica sum up among themselves. A process may be killed wherever it is, what comes
from the agent comes at any time, and a collective that breaks when all have given their part ends for some of them.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from replica_buckets import BucketGroup, total
from torch import Tensor

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.megatron import buckets, members, run
from unicron_elastic.worker.notices import Notice, Parted

if TYPE_CHECKING:
    from replica_jobs import Job

BUCKETS = 3
COLLECTIVE = "a collective"
BROKEN = -7.0  # a broken collective leaves anything
here = threading.local()


class Died(BaseException):
    """This thread's process is no more, or the job is over."""


class Violation(AssertionError):
    """What must never happen; with the story."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a job is like. ``troubles``: how often connections break though nobody is gone. ``reports``: each step."""

    tensor: int
    pipeline: int
    replicas: int
    deaths: int
    troubles: int = 0
    newcomers: bool = True
    overlap: bool = False
    reports: bool = False
    steps: int = 3
    micro_batches: int = 5


class Rank:
    """One process, and its thread. Stands for its link to the agent, too."""

    def __init__(self, job: Job, name: str, local_rank: int) -> None:
        self.job, self.name, self.local_rank = job, name, local_rank
        self.is_dead = self.has_ended = self.has_parted = False
        self.turn = threading.Lock()
        self.turn.acquire()
        self.condition: Callable[[], bool] | None = None
        self.waits_for = ""
        self.heard: World | None = None
        self.adopted = 0
        self.connection: Connection | None = None
        self.members: members.Members | None = None
        self.run: run.MegatronRun | None = None
        self.version, self.parameters, self.tokens = 0, 1, 0
        self.seat = job.shape.seat_of(local_rank, job.size)[0]
        if not self.is_newcomer:
            peers = job.connections.setdefault(1, {})
            peers[local_rank] = self.connection = Connection(self, 1, local_rank, peers, job.size)
        self.groups = [BucketGroup(self, number) for number in range(BUCKETS)]
        self.thread = threading.Thread(target=self._live, daemon=True)

    @property
    def is_newcomer(self) -> bool:
        """Whether it takes the place of another."""
        return "'" in self.name

    @property
    def is_gone(self) -> bool:
        """Whether its connections are closed."""
        return self.is_dead or self.has_ended

    def is_newer(self) -> bool:
        return self.heard is not None and self.heard.number > self.adopted

    def hear(self, world: World) -> None:
        """As Link does it."""
        if self.is_dead or self.has_ended or (self.heard is not None and self.heard.number >= world.number):
            return
        self.heard = world
        if self.adopted and self.members is not None and self.members.must_break(world):
            self.break_collectives()

    def break_collectives(self, *_: Any, **__: Any) -> None:
        if self.connection is not None and not self.is_dead:
            self.connection.is_broken = True

    # -- as Membership ------------------------------------------------------------------------------------------------

    is_fixed = False
    next_world_timeout_s = 60.0

    def enter(self) -> dict[str, Any] | None:
        if self.is_newcomer:
            return {}
        self.job.wait("the first world", lambda: self.heard is not None)
        return None

    def is_ready(self, _state: int) -> None:
        member = Member(name=self.name, node="n", local_rank=self.local_rank)
        self.job.later(lambda: self.job.change(joined=(member,)))
        self.job.wait("a world with it", lambda: self.heard is not None)

    def newer_than(self, number: int) -> tuple[World, int | None] | None:
        if self.heard is None or self.heard.number <= number:
            return None
        return self.heard, self.heard.rank_of(self.name)

    def adopt(self, number: int | None = None) -> tuple[World, int, Any]:
        assert self.heard is not None
        if number is not None and self.heard.number > number:
            raise Superseded
        self.adopted = self.heard.number
        index = self.heard.rank_of(self.name)
        if index is None:
            raise RuntimeError(f"{self.name} is not a member any more")
        return self.heard, index, None

    def wait_for_newer(self, _timeout_s: float) -> bool:
        self.job.wait("a newer world", lambda: self.is_newer() or bool(self.job.over))
        return self.is_newer()

    def wait_for_agreed(self, _timeout_s: float) -> bool:
        self.job.wait("a newer world, after a break", self.is_newer)
        return True

    def tell_broken(self, _error: Exception, *, outlives_joins: bool) -> None:
        assert not outlives_joins
        number = self.adopted
        self.break_collectives()
        self.job.later(lambda: self.job.connect_anew(number))

    def tell(self, message: Notice) -> None:
        if isinstance(message, Parted) and not self.has_parted:
            self.has_parted = True
            self.job.say(f"{self.name} has parted")
            if self.adopted != self.job.newest.number:
                self.job.later(self.job.change)

    # -- its script ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        self.turn.acquire()
        try:
            if not self.is_dead and not self.job.is_over:
                here.rank = self
                self._train()
                self.job.check_end(self)
        except Died:
            pass
        except NoStateLeft:
            self.job.give_up()
        except SystemExit:
            self.job.say(f"{self.name} ends as a spare")
        except BaseException as error:
            if not self.is_dead:
                self.job.fail(f"{self.name}: {error!r}\n{traceback.format_exc()}")
        self.has_ended = True
        self.job.pass_on(self)

    def _train(self) -> None:
        case = self.job.case
        self.members = members.Members(self, FakeGroups(self), case.micro_batches)  # type: ignore[arg-type]
        self.run = run.MegatronRun(
            members=self.members,
            buckets=buckets.Buckets([SimpleNamespace(bucket_groups=self.groups)], self.members.waiter),
            state=self,  # type: ignore[arg-type]
            finish=self._finish,
            counts_tokens=self.seat == case.tensor * (case.pipeline - 1),
            step=0,
            steps=case.steps,
            device=torch.device("cpu"),
        )
        while not self.run.is_over:
            for group in self.groups:
                group.reset()
            self.run.train(self._passes)
            self.job.point()
            if not self.run.is_over:
                self.run.scale([self])
            self.run.make_step(self._make)
            if case.reports:
                total = int(self.run.total(torch.ones(1)))
                size = self.connection.size if self.connection is not None and not self.run.is_partial else 1
                if total != size:
                    self.job.fail(f"{self.name} hears of {total} ranks, and there are {size}")
            self.job.point()

    def scale_gradients(self, factor: Tensor) -> None:
        self.tokens = round(1 / float(factor))

    def load_state_dict(self, state: list[int], _behind: int) -> None:
        """As State."""
        self.version, self.parameters = state

    def load_rest(self) -> None:
        """As State."""

    def mates(self) -> list[int]:
        """The ranks of its replica, by seat."""
        assert self.connection is not None
        shape, size = self.job.shape, self.connection.size
        number = shape.seat_of(self.connection.rank, size)[1]
        return [shape.rank_of(seat, number, size // shape.seats) for seat in range(shape.seats)]

    def column(self) -> list[int]:
        """The ranks in its seat, by replica."""
        assert self.connection is not None
        shape, replicas = self.job.shape, self.connection.size // self.job.shape.seats
        return [shape.rank_of(self.seat, number, replicas) for number in range(replicas)]

    def _passes(self, indices: list[int]) -> tuple[list[Any], int]:
        assert self.run is not None
        step = self.run.step
        self.job.say(f"{self.name} computes {indices} of step {step}")
        if self.version != step:
            self.job.fail(f"{self.name} has the state {self.version} in step {step}")
        for index in indices:
            self.job.point()
            self._with_its_replica(1000 * step + index)
            for group in self.groups:
                group.add(index, step + 1, is_last=index == indices[-1])
        return [], sum(100 + index for index in indices)

    def _with_its_replica(self, what: int) -> None:
        """Forward and backward through the stages, and a sum between the ranks of a stage."""
        mates, seat, tensor = self.mates(), self.seat, self.job.case.tensor
        before, after = seat - tensor, seat + tensor
        for source, destination in ((before, after), (after, before)):
            if 0 <= source < len(mates):
                given = torch.zeros(1)
                self.job.receive(self, given, mates[source]).wait()
                self._same(int(given), what)
            if tensor > 1:
                stage = mates[seat - seat % tensor :][:tensor]
                found = torch.tensor([float(what)])
                self.job.collective(self, stage, "stage", found, total).wait()
                self._same(int(found), what * tensor)
            if 0 <= destination < len(mates):
                self.job.send(self, torch.tensor([float(what)]), mates[destination]).wait()

    def _same(self, found: int, wanted: int) -> None:
        if found != wanted:
            self.job.fail(f"{self.name} computes {wanted} with a replica that computes {found}")

    def _finish(self) -> None:
        if self.job.shape.seats > 1:
            shared = self.groups[0].buckets[0].grad_data[-1:]
            self.job.collective(self, self.mates(), "finish", shared, total).wait()

    def _find_norm(self) -> float:
        norm = torch.stack([group.buckets[0].grad_data.sum() for group in self.groups]).sum()[None]
        if self.job.shape.seats > 1:
            self.job.collective(self, self.mates(), "norm", norm, total).wait()
        return float(norm)

    def _make(self) -> bool:
        assert self.run is not None
        assert self.members is not None
        norm = self.run.norm(self._find_norm)
        self.job.point()
        self.job.check_step(self, self.run.step, norm)
        self.parameters = hash((self.parameters, self.run.step)) % 2**31
        self.version += 1
        return True


# -- in the place of torch.distributed ---------------------------------------------------------------------------------


@dataclass(eq=False)
class Connection:
    """One process's, in one world. ``peers`` has those of all, by rank."""

    owner: Rank
    world: int
    rank: int
    peers: dict[int, Connection]
    size: int
    is_broken: bool = False
    counts: dict[Any, int] = field(default_factory=dict)
    work: Work | None = None  # the latest

    def notice(self) -> bool:
        """Whether it notices that others are gone: at the latest when nobody is left who could tell it by going on."""
        work = self.work
        if work is None or work.ended_well is not None or work.notices:
            return False
        others = [self.peers[each] for each in work.others]
        work.notices = all(each.owner.is_gone or each.owner.waits_for == COLLECTIVE for each in others)
        return work.notices


class Work:
    """A collective that was begun. It ends when all have given their part, or breaks."""

    def __init__(
        self,
        mine: Connection,
        others: Sequence[int],
        tensor: Tensor | None,
        is_ready: Callable[[], bool],
        find: Callable[[], Any],
    ) -> None:
        self.mine, self.others, self.tensor, self.is_ready, self.find = mine, others, tensor, is_ready, find
        self.notices = mine.owner.job.dice.random() < 0.7 or len(others) < 2  # the loss of another, without being told
        self.was_broken_before = mine.is_broken
        mine.work = self
        self.ended_well: bool | None = None

    def _is_broken(self) -> bool:
        theirs = (self.mine.peers[each] for each in self.others)
        return self.mine.is_broken or (self.notices and any(each.is_broken or each.owner.is_gone for each in theirs))

    def wait(self, _timeout: Any = None) -> None:
        """Raises RuntimeError if it broke, and then anything is in the tensor."""
        job = self.mine.owner.job
        if self.ended_well is None:
            job.wait(COLLECTIVE, lambda: self._is_broken() or self.is_ready())
            can_end = self.is_ready() and not self.was_broken_before
            self.ended_well = can_end and (not self._is_broken() or job.dice.random() < 0.5)
            if self.tensor is not None:
                self.tensor.copy_(self.find() if self.ended_well else torch.tensor(BROKEN))
        if not self.ended_well:
            raise RuntimeError("Connection closed by peer")


class FakeGroups:
    """As Groups."""

    backend = "gloo"
    unit = 1
    timeout_s = 60.0

    def __init__(self, rank: Rank) -> None:
        self.rank, self.shape = rank, rank.job.shape

    def leave(self) -> None:
        self.rank.connection = None

    def enter(self, meeting: FakeMeeting, rank: int, size: int) -> None:
        self.rank.job.point()
        peers = self.rank.job.connections.setdefault(meeting.number, {})
        if rank in peers:
            self.rank.job.fail(f"rank {rank} twice in world {meeting.number}")
        mine = peers[rank] = Connection(self.rank, meeting.number, rank, peers, size)
        self.rank.job.wait("connections", lambda: len(peers) == size or meeting.is_superseded())
        self.rank.connection = mine
        if len(peers) < size or (meeting.is_superseded() and self.rank.job.dice.random() < 0.5):
            raise Superseded
        if meeting.is_superseded():  # it came while there was nothing to break, and what is begun breaks by itself
            mine.is_broken = True

    def drop_former(self) -> None:
        """Nothing is kept."""

    keep = drop_former


class FakeMeeting:
    def __init__(self, _store: Any, world: World, index: int, is_superseded: Callable[[], bool]) -> None:
        self.job, self.index, self.number, self.size = here.rank.job, index, world.number, world.size
        self.is_superseded = is_superseded
        self.round = 0

    def exchange(self, said: str, _limit_s: float) -> list[str]:
        self.round += 1
        self.job.point()
        heard = self.job.said.setdefault((self.number, self.round), {})
        heard[self.index] = said
        self.job.wait(f"round {self.number}.{self.round}", lambda: len(heard) == self.size or self.is_superseded())
        if len(heard) < self.size:
            raise Superseded
        self.job.meeting_of[here.rank.name] = (self.number, self.round)
        return [heard[index] for index in range(self.size)]

    def announce(self, _word: str) -> None:
        self.job.over.add(self.number)

    def is_announced(self, _word: str) -> bool:
        return bool(self.job.over)
