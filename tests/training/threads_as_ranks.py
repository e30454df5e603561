"""Ranks that are threads: the real run and engine over fake agents, stores and collectives, with losses anywhere.

A rank dies at one of the points it passes, which are counted. Whether another's collective then fails or still succeeds
is drawn, as it is chance in real life. All gradients are whole numbers in float64, so that sums are exact.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from unicron_elastic.base.world import NO_END, EndOfSteps, Member, World
from unicron_elastic.engine.protocol.replica_phase import (
    Arriving,
    Finished,
    InMeeting,
    Outside,
    Passing,
    Standing,
    Stepping,
)
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.training import engine
from unicron_elastic.training.engine import MissedStepError
from unicron_elastic.training.group import arrival
from unicron_elastic.training.group.mean_share import FEW
from unicron_elastic.training.group.sendable import Stateful
from unicron_elastic.training.run import Run
from unicron_elastic.training.step import gradients
from unicron_elastic.worker.instructions import Invitation
from unicron_elastic.worker.notices import Left, Notice, Parted

STEP_S = 0.01  # of those who are not to end before a newcomer can begin, on a busy machine
DEADLINE_S = 30.0
LOOK_S = 0.02
HEARS_LATE_S = 0.6  # longer than a rank waits for the next world if it knows of a newcomer
FEATURES = 5


Changes = dict[int, dict[str, bool]]  # by step and parameter: whether it is trained from then on
Counts = Callable[[int], int]  # by step: of how many micro-batches


class Died(BaseException):
    """This thread's process is no more."""


class Group:
    """The collectives of one world; whoever waits in one that cannot end gets an exception."""

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world = job, world
        self.arrived: dict[tuple[Any, int], dict[int, Tensor]] = {}
        self.left: set[str] = set()  # members that have gone on to another world

    def is_broken(self) -> bool:
        """Whether somebody is gone or has left, or a newer world ends it."""
        gone = self.job.dead | self.left
        is_anyone_gone = any(member.name in gone for member in self.world.members)
        return is_anyone_gone or self.job.newest.breaks(self.world) or self.world.number in self.job.broken

    def arrive(self, key: tuple[Any, int], rank: int, tensor: Tensor) -> None:
        """Come to a collective of this kind and number. Raises RuntimeError."""
        with self.job.changed:
            if self.is_broken():
                raise RuntimeError("Connection closed by peer")
            self.arrived.setdefault(key, {})[rank] = tensor.clone()
            self.job.changed.notify_all()

    def wait(self, key: tuple[Any, int], size: int, look: Callable[[], None]) -> dict[int, Tensor]:
        """What ``size`` ranks gave to it. Raises RuntimeError.

        ``look`` is called while it waits, as the product's own wait does.
        """
        with self.job.changed:
            slot = self.arrived[key]
            while not self.job.changed.wait_for(lambda: len(slot) == size or self.is_broken(), LOOK_S):
                self.job.check_time()
                look()
            if len(slot) < size or (self.is_broken() and self.job.dice.random() < 0.5):
                raise RuntimeError("Connection closed by peer")
            return dict(slot)


class Begun:
    """`Begun` is a collective that was begun: until ``finish`` has returned there is garbage in the ``tensor``."""

    def __init__(self, tensor: Tensor, finish: Callable[[], Tensor]) -> None:
        self.tensor = tensor.fill_(77)
        self.finish = finish
        self.error: RuntimeError | None = None
        self.is_done = False

    def follow(self) -> None:
        """As Completion.follow."""
        self.wait()

    def wait(self) -> None:
        """Raises how it ended."""
        if not self.is_done:
            self.is_done = True
            try:
                self.tensor.copy_(self.finish())
            except RuntimeError as error:
                self.error = error
        if self.error is not None:
            raise self.error

    def has_ended(self) -> bool:
        """It has, as it was broken off."""
        return True


class Rank:
    """One thread: its membership, and its part of the collectives."""

    is_fixed = False
    next_world_timeout_s = DEADLINE_S

    def __init__(self, job: Job, name: str, local_rank: int, dies_at: int | None) -> None:
        self.job, self.name, self.local_rank, self.dies_at = job, name, local_rank, dies_at
        self.points = 0
        self.breaks_at = job.draw() if job.is_shaky else None  # its connections, at one of these points
        self.hears_late = job.dice.random() < 0.5 if job.is_slow_to_hear else False
        self.heard_at: dict[int, float] = {}  # by the number of a world
        self.world: World | None = None
        self.told: World | None = None  # the newest of which it has heard
        self.group: Group | None = None
        self.counts: dict[Any, int] = {}
        self.run: Run | None = None
        self.error: BaseException | None = None
        self.fetches = 0
        self.trained: list[int] = []  # steps
        self.parameters: list[list[float]] = []

    def point(self) -> None:
        """One of the places where this rank may die."""
        self.points += 1
        if self.points == self.dies_at:
            self.job.die(self)
        if self.points == self.breaks_at and self.world is not None:
            self.job.broke(self.world)

    # -- membership ---------------------------------------------------------------------------------------------------

    def enter(self) -> Invitation | None:
        with self.job.changed:
            self.live()
            self.job.over.discard(self.name)
            return None if self.job.newest.rank_of(self.name) is not None else Invitation(sources=({},))

    def live(self) -> None:
        """Raises Died if the agent has ended this process."""
        if self.name in self.job.dead:
            raise Died

    def is_ready(self, _state: int) -> None:
        self.point()
        self.job.change(joined=(Member(name=self.name, node="n", local_rank=self.local_rank),))

    def is_newer(self) -> bool:
        """Whether this rank has heard of a newer world: of one in which others have only joined it may hear late."""
        self.live()
        with self.job.changed:
            return self._is_newer()

    def newer_than(self, number: int) -> tuple[World, int | None] | None:
        """The newest world of which this rank has heard, which is the one that it can adopt."""
        self.live()
        with self.job.changed:
            if not self._has_heard_after(number):
                return None
            self.told = self.job.newest
            return self.told, self.told.rank_of(self.name)

    def _has_heard_after(self, number: int) -> bool:
        """All hear at once of a world that ends theirs."""
        newest = self.job.newest
        is_over = newest.over > 0 or newest.parted > NO_END
        is_late = self.world is not None and self.world.number < newest.number and not self._is_newer()
        is_heard = not is_late or is_over or (self.world is not None and newest.breaks(self.world))
        return newest.number > number and is_heard

    def _is_newer(self) -> bool:
        newest = self.job.newest
        if self.world is None or newest.number <= self.world.number:
            return newest.number > 0 and self.world is None
        heard_at = self.heard_at.setdefault(newest.number, time.monotonic())
        return not self.hears_late or newest.breaks(self.world) or time.monotonic() - heard_at > HEARS_LATE_S

    def is_left(self) -> bool:
        self.live()
        with self.job.changed:
            return self.world is not None and self.job.newest.breaks(self.world)

    def adopt(self, number: int | None = None) -> tuple[World, int, Any]:
        self.point()
        with self.job.changed:
            if number is not None and self._has_heard_after(number):
                raise Superseded
            assert self.told is not None
            world = self.world = self.told
        rank = world.rank_of(self.name)
        assert rank is not None, (self.name, world)
        return world, rank, self.job.store

    def wait_for_newer(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        with self.job.changed:
            while not self.job.changed.wait_for(self.is_newer, min(LOOK_S, max(0.0, end - time.monotonic()))):
                if time.monotonic() >= end:
                    return False
        return True

    def wait_for_agreed(self, timeout_s: float) -> bool:
        return self.wait_for_newer(max(timeout_s, 2 * HEARS_LATE_S))

    def tell_broken(self, _error: Exception) -> None:
        assert self.world is not None
        self.job.broke(self.world)

    def tell(self, message: Notice) -> None:
        self.job.told.append((self.name, message))
        if isinstance(message, Parted):
            self.job.parted(self)
        if isinstance(message, Left):
            self.job.change(lost=(self.name,))
            self.name += "~"

    # -- collectives --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """As Transport.connect."""
        self.point()
        assert self.world is not None
        if self.is_left():
            raise Superseded
        self.group = self.job.group_of(self.world)
        self.counts = {}

    def leave_group(self) -> None:
        if self.group is None:
            return
        with self.job.changed:
            if self.job.newest.breaks(self.group.world):  # else it stays open for two more reductions
                self.group.left.add(self.name)
            self.job.changed.notify_all()
        self.group = None

    def come(self, key: Any, size: int, tensor: Tensor) -> Callable[[], dict[int, Tensor]]:
        """Come to the next collective of this kind; return what waits for what all have given."""
        self.point()
        group = self.group
        assert group is not None
        count = self.counts[key] = self.counts.get(key, 0) + 1
        group.arrive((key, count), self.in_group(), tensor)

        def wait() -> dict[int, Tensor]:
            result = group.wait((key, count), size, self.look)
            self.point()
            return result

        return wait

    def exchange(self, key: Any, size: int, tensor: Tensor) -> dict[int, Tensor]:
        return self.come(key, size, tensor)()

    def look(self) -> None:
        """Whether the others are elsewhere, without the product's patience before it asks."""
        assembly = self.run._engine._assembly if self.run is not None else None
        if assembly is not None and assembly._order is not None:
            assembly._order._next = 0.0
            assembly._look()

    def in_group(self) -> int:
        assert self.group is not None
        rank = self.group.world.rank_of(self.name)
        assert rank is not None
        return rank

    def begin(self, tensor: Tensor, key: Any, result: Callable[[dict[int, Tensor]], Tensor]) -> Begun:
        assert self.group is not None
        wait = self.come(key, self.group.world.size if key == "all" else 2, tensor)
        return Begun(tensor, lambda: result(wait()))


here = threading.local()


def put_threads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each thread that trains be a rank, and its gradients be in several buckets."""
    monkeypatch.setattr(engine, "Transport", ThreadTransport)
    monkeypatch.setattr(engine, "membership", lambda *_, **__: here.rank)
    monkeypatch.setattr(arrival, "fetch_state", fetch_state)
    make = gradients.Gradients.__init__
    monkeypatch.setattr(
        gradients.Gradients,
        "__init__",
        lambda self, *given, **others: make(self, *given, **{**others, "bucket_bytes": 40}),
    )


class ThreadTransport:
    """`ThreadTransport` is a `Transport` between threads of one process; each has its own."""

    def __init__(self, *_: Any) -> None:
        self.is_connected = self.is_broken = False
        self.on_look: Callable[[], None] = lambda: None

    @property
    def rank(self) -> int:
        """As Transport has it."""
        return int(here.rank.in_group())

    @property
    def size(self) -> int:
        """As Transport has it."""
        return int(here.rank.group.world.size)

    def connect(self, *_: Any, **__: Any) -> None:
        here.rank.connect()
        self.is_connected, self.is_broken = True, False

    def leave(self) -> None:
        self.is_connected = False
        here.rank.leave_group()

    def retire(self) -> None:
        """Nothing is kept."""

    def give_up(self, _error: Exception, _begun: Any) -> bool:
        self.is_broken = True
        return True

    def reduce(self, tensor: Tensor) -> Begun:
        return here.rank.begin(tensor, "all", lambda given: torch.stack(list(given.values())).sum(0))

    def sum(self, tensor: Tensor) -> None:
        self.reduce(tensor).wait()

    def share(self, tensor: Tensor, source: int) -> Begun:
        mine = tensor.clone() if self.rank == source else tensor
        return here.rank.begin(mine, "all", lambda given: given[source])

    def exchange(self, came: Tensor, gone: Tensor, counts: Sequence[int], given: Sequence[int]) -> Begun:
        rank, size = self.rank, self.size

        def mine(of_all: dict[int, Tensor]) -> Tensor:
            parts = []
            for sender, counted in zip(range(size), counts, strict=True):
                sizes, data = of_all[sender][:size].long().tolist(), of_all[sender][size:]
                parts.append(data[sum(sizes[:rank]) :][: sizes[rank]])
                assert parts[-1].numel() == counted
            return torch.cat(parts)

        told = torch.cat([torch.tensor(given, dtype=torch.float64), gone.double()])
        wait = here.rank.come("all", size, told)
        return Begun(came, lambda: mine(wait()))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        given = here.rank.exchange("all", here.rank.group.world.size, tensor)
        return [given[rank] for rank in range(len(given))]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if tensor.numel():
            self.share(tensor, source).wait()

    def send(self, tensor: Tensor, destination: int) -> None:
        if tensor.numel():
            here.rank.begin(tensor.clone(), (self.rank, destination), lambda _: tensor).wait()

    def receive(self, tensor: Tensor, source: int) -> None:
        if tensor.numel():
            here.rank.begin(tensor, (source, self.rank), lambda given: given[source]).wait()


class Job:
    """Some ranks and their agent."""

    def __init__(
        self,
        seed: int,
        *,
        ranks: int,
        deaths: int,
        newcomers: bool,
        steps: int,
        micro_batches: int | Counts,
        steps_behind: int = 0,
        changes: Changes | None = None,
        totals: Sequence[int] = (),
        reports: int = 0,
        is_shaky: bool = False,
        is_outrun: bool = False,
        is_torn: bool = False,
        is_slow_to_hear: bool = False,
        begins_at: int = 0,
    ) -> None:
        """``steps_behind``: how many steps the others make while a newcomer takes over the state that it has copied.

        ``changes``: what the script freezes (False) and unfreezes at the beginning of a step. ``totals``: of its calls
        of ``run.steps()``, if there are several. ``reports``: how many reductions follow each step and each call.
        ``is_shaky``: connections break though nobody is lost. ``is_outrun``: whenever a newcomer begins to copy the
        state of somebody, that one is in the next call already. ``is_torn``: what is copied is changed meanwhile.
        ``begins_at``: the step of the state that each script has loaded. ``is_slow_to_hear``: some ranks hear too late
        that others have joined. With an odd ``seed`` the model does not use its parameters in its own order; half of
        the seeds have reproducible sums.
        """
        self.dice = random.Random(seed)
        self.steps_behind, self.is_shaky, self.is_outrun, self.is_torn = steps_behind, is_shaky, is_outrun, is_torn
        self.is_slow_to_hear = is_slow_to_hear
        self.changes = changes or {}
        self.totals, self.reports = tuple(totals) or (steps,), reports
        self.is_mixed = seed % 2 == 1
        self.is_other_order, self.is_reproducible, self.is_weighted = seed % 2 == 1, seed % 4 > 1, seed % 8 > 3
        self.counts: Counts = micro_batches if callable(micro_batches) else lambda _: micro_batches
        self.begins_at = begins_at
        self.begin_of: Callable[[Rank], int] = lambda _: begins_at
        self.plain = Plain(self.totals, self.counts, self.changes, begins_at)
        self.steps, self.micro_batches = steps, micro_batches
        self.reported: dict[Any, dict[str, tuple[float | str, bool]]] = {}  # by rank
        self.newcomers = newcomers
        self.changed = threading.Condition(threading.RLock())
        self.store = HashStore()
        self.dead: set[str] = set()
        self.over: set[str] = set()  # who has parted, and has not begun once more
        self.parted_in: dict[str, EndOfSteps] = {}  # by name
        self.ended: set[str] = set()
        self.broken: set[int] = set()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.groups: dict[int, Group] = {}
        self.deaths_left = deaths
        self.end = time.monotonic() + DEADLINE_S
        self.ranks = [Rank(self, str(number), number, self.draw()) for number in range(ranks)]
        members = tuple(Member(name=rank.name, node="n", local_rank=rank.local_rank) for rank in self.ranks)
        self.newest = World(number=1, members=members, store="h:1")
        self.threads: list[threading.Thread] = []

    def draw(self) -> int | None:
        """At which of its points something befalls a rank, if at all."""
        most = 90 * len(self.totals) * (1 + self.reports)
        return self.dice.randint(1, most) if self.dice.random() < 0.7 else None

    def wait(self, condition: Callable[[], bool]) -> None:
        """With the lock held. Raises TimeoutError when the test is over its time."""
        if not self.changed.wait_for(condition, max(0.0, self.end - time.monotonic())):
            raise TimeoutError("this job does not go on")

    def check_time(self) -> None:
        """Raises TimeoutError when the test is over its time."""
        if time.monotonic() > self.end:
            raise TimeoutError("this job does not go on")

    def await_call(self, rank: Rank, until: int) -> None:
        """Waits until it is in this call of ``run.steps()``, or gone."""
        assert rank.run is not None
        while rank.run._engine.until < until and rank.name not in self.dead | self.over:
            assert time.monotonic() < self.end, f"rank {rank.name} does not go on"
            time.sleep(0.0005)

    def group_of(self, world: World) -> Group:
        with self.changed:
            return self.groups.setdefault(world.number, Group(self, world))

    def change(self, *, lost: tuple[str, ...] = (), joined: tuple[Member, ...] = (), anew: bool = False) -> None:
        """As the agent: the next world, of which all hear at once.

        Raises Died in a newcomer that nobody needs any more.
        """
        with self.changed:
            if self.ended or not any(member.name not in lost for member in self.newest.members):
                self.dead |= {member.name for member in joined}
                if joined:
                    raise Died
                return
            ends = [self.parted_in[name] for name in self.over] if lost or anew else []
            parted = max(ends, default=NO_END)
            self.newest = self.newest.after(
                store="h:1", reason="so", lost=lost, joined=joined, anew=anew, parted=parted
            )
            self.changed.notify_all()

    def parted(self, rank: Rank) -> None:
        """As the agent: if that world is broken, others are told that all had come to its end."""
        with self.changed:
            assert rank.world is not None
            self.over.add(rank.name)
            assert rank.run is not None
            parted = self.parted_in[rank.name] = EndOfSteps(rank.world.number, rank.run._engine.until)
            if self.newest.breaks(rank.world):
                self.newest = self.newest.after(store="h:1", reason="so", parted=parted)
                self.changed.notify_all()

    def end_well(self, rank: Rank) -> None:
        """As the agent: who has not come before the others made their last step is not needed any more.

        The next world says that some have ended: who waits for them in this one hears of it.
        """
        with self.changed:
            if not self.ended and (parted_in := self.parted_in.get(rank.name)):
                self.newest = self.newest.after(store="h:1", reason="", over=parted_in.world)
            self.ended.add(rank.name)
            known = {member.name for member in rank.world.members} if rank.world is not None else set()
            self.dead |= {each.name for each in self.ranks} - known - self.ended
            self.changed.notify_all()

    def broke(self, world: World) -> None:
        """As the agent: the same members connect anew, if nobody is gone."""
        with self.changed:
            self.broken.add(world.number)
            self.changed.notify_all()
            if not self.newest.breaks(world):
                self.change(anew=True)

    def die(self, rank: Rank) -> None:
        """Unless the job could not go on then."""
        with self.changed:
            left = [each for each in self.ranks if each.name not in self.dead | self.ended | {rank.name}]
            alive = [each for each in left if self.newest.rank_of(each.name) is not None]
            others = [each for each in alive if each.run is not None and _has_state(each.run)]
            if not others or not self.deaths_left or self.ended:  # else all would begin again
                return
            self.deaths_left -= 1
            self.lose(rank, is_replaced=self.newcomers)
        raise Died

    def lose(self, rank: Rank, *, is_replaced: bool) -> None:
        """Has the others go on without it."""
        with self.changed:
            self.dead.add(rank.name)
            self.change(lost=(rank.name,))
            if is_replaced:
                self._start(Rank(self, rank.name + "'", rank.local_rank, self.draw()))

    def _start(self, rank: Rank) -> None:
        if rank not in self.ranks:
            self.ranks.append(rank)
        self.threads.append(threading.Thread(target=train, args=(rank,), daemon=True))
        self.threads[-1].start()

    def finish(self) -> None:
        """Runs all to the end. Raises what a rank raised, or AssertionError if one does not end."""
        for rank in list(self.ranks):
            self._start(rank)
        for thread in self.threads:  # grows meanwhile
            thread.join(max(0.1, self.end + 1.0 - time.monotonic()))
            if thread.is_alive():
                errors = {rank.name: rank.error for rank in self.ranks if rank.error is not None}
                raise AssertionError(f"a rank does not end; errors {errors}:\n{self._give_up()}")
        for rank in self.ranks:
            if rank.error is not None:
                raise AssertionError(f"rank {rank.name}: {rank.error!r}") from rank.error
        for key, values in self.reported.items():
            found = {value for name, value in values.items() if name not in self.dead}
            if key[0] == "before":  # others may have begun that step: then each has its own share, and says so
                found = {each for each in found if not each[1]}
            assert len(found) < 2, f"{key}: {values}"

    def _give_up(self) -> str:
        """Ends all ranks, so that they do not go on beside other tests; where they were."""
        frames = sys._current_frames()
        alive = [frames[thread.ident] for thread in self.threads if thread.ident in frames]
        with self.changed:
            self.dead |= {rank.name for rank in self.ranks}
            self.changed.notify_all()
        return "\n".join("".join(traceback.format_stack(frame)) for frame in alive)


class Fetched:
    """As ``pull`` returns it: the source stays in its step until this is released."""

    bytes, took_s, sources = 0, 0.0, ()

    def __init__(self, source: Rank) -> None:
        self.source = source

    def release(self) -> None:
        assert self.source.run is not None
        self.source.run._engine._gate.release()


def _has_state(run: Run) -> bool:
    """Whether others may rely on its parameters."""
    record = run._engine._driver.replica.record
    record = getattr(record, "meeting", record)
    return record.has_state if isinstance(record, InMeeting) else not isinstance(record, Outside | Arriving | Passing)


def _is_elsewhere(run: Run) -> bool:
    """Whether the others do not ask for the mean for which it asks."""
    record = run._engine._driver.replica.record
    apart = {Standing.APART, Standing.AMONG}
    return isinstance(record, Passing) or (isinstance(record, Stepping | Finished) and record.standing in apart)


def fetch_state(run: Stateful, _invitation: Invitation) -> Fetched | None:
    """Copies the state of somebody who lives, tensor by tensor while that one may go on."""
    rank = here.rank
    job = rank.job
    with job.changed:
        alive = [
            each
            for each in job.ranks
            if each.name not in job.dead | job.over
            and job.newest.rank_of(each.name) is not None
            and each.run is not None
        ]
        if not alive:
            return None
        source = job.dice.choice(alive)
    rank.fetches += 1
    rank.point()
    if job.is_outrun:
        until = source.run._engine.until
        job.await_call(source, min(each for each in (*job.totals, until) if each > until or each == max(job.totals)))
    gate, expired = source.run._engine._gate, []
    gate.on_expire = lambda: expired.append(True)
    try:
        gate.hold(0.5)
    except TimeoutError:
        return None
    try:
        state = source.run._engine._registered.state_dict()
        rank.point()
        time.sleep(job.dice.choice([0.0, 0.002]))
        state = copy.deepcopy(state)
        is_whole = source.name not in job.dead and not expired
        if job.is_torn:
            _tear(state["run"]["state"], job.dice)
        elif is_whole and (wrong := job.plain.wrong(state)):
            raise AssertionError(f"rank {rank.name} was given a state of no step's beginning: {wrong}")
    except (Died, AssertionError):  # its connection is closed then
        gate.release()
        raise
    if source.name in job.dead or expired:
        gate.release()
        return None
    run.load_state_dict(state)
    if job.steps_behind:
        return Late(source, int(state["run"]["steps"]))
    return Fetched(source)


def _tear(state: dict[str, Any], dice: random.Random) -> None:
    """As if the script changed something within a micro-batch, and put it back after it was copied."""
    match dice.choice(["weights", "settings", "trail"]):
        case "weights":
            state["model"]["second"].add_(1.0)
        case "settings":
            state["optimizer"]["param_groups"][0]["lr"] *= 2
        case "trail":
            state["trail"]["places"].append("within a micro-batch")


class Late(Fetched):
    """The source did not wait: it has made some steps since."""

    def __init__(self, source: Rank, state: int) -> None:
        super().__init__(source)
        super().release()
        wanted = min(state + source.job.steps_behind, source.job.steps - 1)
        assert source.run is not None
        while source.run.step < wanted and source.name not in source.job.dead:
            assert time.monotonic() < source.job.end, "the source does not go on"
            time.sleep(0.001)

    def release(self) -> None:
        """Done."""


def coefficients(step: int, index: int) -> Tensor:
    """The gradient of one micro-batch: (2, FEATURES) whole numbers."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(-50, 50, (2, FEATURES), generator=generator).double()


class Moves(nn.BatchNorm1d):
    """Running statistics that move by whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.num_batches_tracked is not None
        self.running_mean += x
        self.num_batches_tracked += 1
        return x


class Buffered(nn.Module):
    """Buffers that each forward pass changes; one of them is replaced, and ``state_dict`` leaves it out."""

    book: Tensor
    count: Tensor

    def __init__(self, counts: Counts, first: int) -> None:
        super().__init__()
        self.counts, self.first = counts, first
        self.norm = Moves(1, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("book", torch.zeros(3), persistent=False)

    def change(self, step: int, index: int) -> None:
        """Of one micro-batch, in step ``step``."""
        self.check(step)
        self.norm(torch.tensor(float(8 * index)))
        self.count.data.mul_(3).add_(index + step)
        self.book = self.book + index + 1

    def check(self, steps: int) -> None:
        """Raises AssertionError if they are not what they must be after ``steps`` steps."""
        count = 0
        for step in range(self.first, steps):
            count = 3 * count + step
        counts = [*map(self.counts, range(self.first, steps))]
        moved = sum(4.0 * (each - 1) for each in counts)  # each by the mean of what its micro-batches make
        found = [self.norm.running_mean, self.norm.num_batches_tracked, self.count, self.book]
        expected = [[moved], sum(counts), count, [1.0 * len(counts)] * 3]
        assert [each.tolist() for each in found if each is not None] == expected, f"buffers after {steps} steps"


class Model(nn.Module):
    """Two parameters whose gradients are the data; ``is_other_order``: the second one is used first."""

    def __init__(self, counts: Counts, first: int = 0, *, is_other_order: bool = False) -> None:
        super().__init__()
        self.is_other_order = is_other_order
        self.first = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
        self.buffered = Buffered(counts, first).requires_grad_(False)

    def loss(self, step: int, index: int) -> Tensor:
        """Of one micro-batch."""
        values = coefficients(step, index)
        if self.is_other_order:
            return (self.second * values[1]).sum() + (self.first * values[0]).sum()
        return (self.first * values[0]).sum() + (self.second * values[1]).sum()

    def gradients(self) -> list[list[float] | None]:
        """What autograd has left."""
        return [None if each.grad is None else each.grad.tolist() for each in (self.first, self.second)]

    def change(self, changes: dict[str, bool]) -> None:
        """Freezes and unfreezes."""
        for name, is_trained in changes.items():
            self.get_parameter(name).requires_grad_(is_trained)


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    """It moves a parameter whose gradient is zeros, and leaves one alone that has none; all its numbers are exact."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, weight_decay=0.5)


def before_step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """What a script may do before a step, by its number: it depends on what was before."""
    if number == 1:
        optimizer.param_groups[0]["weight_decay"] *= 0.5


class Trail:
    """Registered: all changes that the script has made outside of its steps, in their order."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"places": list(self.places)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.places = list(state["places"])

    def change(self, optimizer: torch.optim.Optimizer, place: str) -> None:
        """Changes all that is registered: twice would be another state."""
        self.places.append(place)
        optimizer.param_groups[0]["lr"] = 0.75 - optimizer.param_groups[0]["lr"]


def after_call(optimizer: torch.optim.Optimizer) -> None:
    """What a script does after each of its epochs."""
    optimizer.param_groups[0]["weight_decay"] *= 0.5


class Plain:
    """What plain torch makes of the same steps in one process: all gradients, and the parameters in the end."""

    def __init__(self, totals: Sequence[int], counts: Counts, changes: Changes, first: int = 0) -> None:
        model = Model(counts)
        optimizer = optimizer_of(model)
        self.gradients: list[list[list[float] | None]] = []
        self.begun: list[tuple[int, list[list[float]], dict[str, Any], list[str]]] = []  # what each step begins with
        self.gradients += [[]] * first
        self.begun += [(0, [], {}, [])] * first
        trail = Trail()
        for total in totals:
            for step in range(len(self.gradients), total):
                model.change(changes.get(step, {}))
                before_step(optimizer, step)
                trail.change(optimizer, f"before {step}")
                self.begun.append((total, _numbers(model), _settings(optimizer), list(trail.places)))
                optimizer.zero_grad()
                for index in range(counts(step)):
                    (model.loss(step, index) / counts(step)).backward()
                self.gradients.append(model.gradients())
                optimizer.step()
                trail.change(optimizer, f"after {step}")
            after_call(optimizer)
            trail.change(optimizer, f"call {total}")
        self.parameters = _numbers(model)

    def wrong(self, given: dict[str, Any]) -> str:
        """What is not as it was at the beginning of a step, in a state that was given to another process."""
        state = given["run"]["state"]
        until, parameters, settings, places = self.begun[min(given["run"]["steps"], len(self.begun) - 1)]
        found = {
            "the call": (given["until"], until),
            "the parameters": ([state["model"][name].tolist() for name in ("first", "second")], parameters[:2]),
            "the optimizer": ({name: state["optimizer"]["param_groups"][0][name] for name in settings}, settings),
            "the changes": (state["trail"]["places"], places),
        }
        return "; ".join(f"{what} {one}, not {other}" for what, (one, other) in found.items() if one != other)


def _numbers(model: Model) -> list[list[float]]:
    return [parameter.tolist() for parameter in model.parameters()]


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.param_groups[0][name] for name in ("lr", "weight_decay")}


def train(rank: Rank) -> None:
    """What a script does, with all that it sees checked."""
    here.rank = rank
    try:
        _train(rank)
        rank.job.end_well(rank)
    except Died:
        pass
    except MissedStepError:
        rank.job.lose(rank, is_replaced=True)
    except BaseException as error:
        if rank.name not in rank.job.dead:
            rank.error = error


def _report(rank: Rank, run: Run, key: Any) -> None:
    """The mean of what each rank has of a sum; whoever asks for it with the others gets the same."""
    for number in range(rank.job.reports):
        weight = 1 + crc32(repr((*key, number)).encode()) % 97  # another result for each
        whole = weight * sum(range(12))
        share = weight * sum(range(12)[run.rank :: run.world_size]) * run.world_size
        is_elsewhere = _is_elsewhere(run)
        value = _asked(rank, run, number, key, share)
        rank.point()
        has_missed_it = (
            run.is_partial and rank.job.ended
        )  # of the last one, whose result the others had when they ended
        if is_elsewhere or _is_elsewhere(run) or has_missed_it:
            assert run.is_partial or value in {whole, "0"}
            continue
        assert run.is_partial or value in {whole, "0"}, f"{key}: {value}"
        rank.job.reported.setdefault((*key, number), {})[rank.name] = (value, run.is_partial)


def _asked(rank: Rank, run: Run, number: int, key: Any, share: float) -> float | str:
    """What a rank gets for its share of a mean; or of its sum, as integers; or whose object it gets."""
    call = number + crc32(repr(key).encode()) % 6 if rank.job.is_mixed else 0
    count = (1, 2 * FEW)[call // 3 % 2]
    match call % 3:
        case 0:
            return float(run.mean(torch.tensor(float(share))))
        case 1:
            assert share % run.world_size == 0
            found = run.all_reduce(torch.full((count,), int(share) // run.world_size))
            assert (found.dtype, found.unique().numel()) == (torch.int64, 1)
            return float(found[0])
    told = run.broadcast_object({"by": str(run.rank), "key": [*key, number], "more": "." * 8 * count})
    assert told["key"] == [*key, number]
    assert len(told["more"]) == 8 * count
    return str(told["by"])


def _train(rank: Rank) -> None:
    job = rank.job
    model = Model(job.counts, job.begins_at, is_other_order=job.is_other_order)
    optimizer = optimizer_of(model)
    trail = Trail()
    run = rank.run = Run(
        model=model,
        optimizer=optimizer,
        trail=trail,
        seed=None,
        join_patience_s=0.3,
        reproducible=job.is_reproducible,
    )
    if job.begins_at:
        run.begin_at(job.begin_of(rank))
    for total in job.totals:
        for step in run.steps(total, job.counts if callable(job.micro_batches) else job.micro_batches):
            time.sleep(STEP_S if job.is_outrun else 0.0)
            rank.point()
            number = step.number
            model.change(job.changes.get(number, {}))
            before_step(optimizer, number)
            if number:  # else shares are those that a launcher dealt, and there is none
                _report(rank, run, ("before", number))
            trail.change(optimizer, f"before {number}")
            rank.point()
            for index in step:
                begun = (total, _numbers(model), _settings(optimizer), trail.places)
                assert begun == job.plain.begun[number], f"step {number} begins with {begun}"
                rank.point()
                model.buffered.change(number, index)
                if job.is_weighted:  # in all twice as much as there are micro-batches
                    step.backward(2 * model.loss(number, index), weight=4 * (index % 2))
                else:
                    step.backward(model.loss(number, index))
                rank.point()
            assert number == step.number == run.step, f"step {number}, {step.number} is step {run.step}"
            model.buffered.check(number + 1)
            assert model.gradients() == job.plain.gradients[number], f"gradients of step {number}"
            optimizer.step()
            rank.trained.append(number)
            rank.point()
            _report(rank, run, ("step", number))
            trail.change(optimizer, f"after {number}")
            rank.point()
        _report(rank, run, ("call", total))
        after_call(optimizer)
        trail.change(optimizer, f"call {total}")
        rank.point()
    rank.parameters = _numbers(model)
