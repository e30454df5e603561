"""A job of ranks that are threads, of which one runs at a time: who is next, what the agent does, what must hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from replicas import Case, Connection, Died, Rank, Violation, Work, here
from torch import Tensor

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid, ReplicaAgreement
from unicron_elastic.engine.protocol.replica_layout import ReplicaShape

DECISIONS_MAX = 30_000


class Job:
    """One seed's."""

    def __init__(self, seed: int, case: Case, *, tells: bool = False) -> None:
        self.seed, self.case, self.tells = seed, case, tells
        self.shape = ReplicaShape(tensor=case.tensor, pipeline=case.pipeline)
        self.dice = random.Random(seed)
        self.story: list[str] = []
        self.violation: str | None = None
        self.is_over = self.is_lost = False
        self.decisions = self.newcomers = 0
        self.ended = threading.Event()
        self.over: set[int] = set()  # worlds in which the end was announced
        self.connections: dict[int, dict[int, Connection]] = {}
        self.calls: dict[Any, dict[Any, Any]] = {}
        self.said: dict[tuple[int, int], dict[int, str]] = {}
        self.meeting_of: dict[str, tuple[int, int]] = {}
        self.agreed: dict[tuple[int, int], ReplicaAgreement] = {}
        self.steps: dict[int, tuple[int, float]] = {}  # tokens and norm of each step that was made
        self.events: list[Callable[[], object]] = []
        self.size = case.replicas * self.shape.seats
        self.ranks = [Rank(self, str(number), number) for number in range(self.size)]
        self.newest = World(
            number=1,
            members=tuple(Member(name=rank.name, node="n", local_rank=rank.local_rank) for rank in self.ranks),
            store="h:1",
        )
        length = 40 * case.steps * self.size
        self.faults = sorted(
            (self.dice.randint(1, length), kind)
            for kind, count in (("death", case.deaths), ("trouble", case.troubles))
            for _ in range(count)
        )
        self.changes = self.dice.choice((0.05, 0.3, 0.8))  # how often the thread changes though it need not
        self.hurry = self.dice.choice((0.02, 0.1, 0.4))  # how soon the agent is
        self._announce()

    # -- the agent ----------------------------------------------------------------------------------------------------

    def later(self, event: Callable[[], object]) -> None:
        """Some time."""
        self.events.append(event)

    def say(self, what: str) -> None:
        """Part of the story."""
        if self.tells:
            self.story.append(f"{self.decisions:5} {what}")

    def _announce(self) -> None:
        world = self.newest
        self.later(self.change)  # who has parted does not come to it
        for rank in self.ranks:
            if world.rank_of(rank.name) is not None:
                self.later(lambda rank=rank: rank.hear(world))  # type: ignore[misc]

    def change(self, *, lost: Sequence[str] = (), joined: tuple[Member, ...] = ()) -> None:
        """The next world, without those who have parted; none if nobody would be in it."""
        parted = {rank.name for rank in self.ranks if rank.has_parted}
        for rank in self.ranks:  # newcomers end
            is_in = self.newest.rank_of(rank.name) is not None
            rank.is_dead |= bool(parted) and rank.heard is None and not is_in
        joined = tuple(each for each in joined if not self._is_dead(each.name))
        gone, names = {*lost, *parted}, {member.name for member in self.newest.members}
        if (not names & gone and not joined) or not names - gone:
            return
        self.newest = self.newest.after(store="h:1", reason="so", lost=sorted(gone), joined=joined)
        self.say(f"world {self.newest.number}: {' '.join(member.name for member in self.newest.members)}")
        self._announce()

    def _is_dead(self, name: str) -> bool:
        return any(rank.is_dead for rank in self.ranks if rank.name == name)

    def connect_anew(self, number: int) -> None:
        """The same members, unless there is another world by now."""
        if self.newest.number == number:
            self.newest = self.newest.after(store="h:1", reason="so", anew=True)
            self.say(f"world {self.newest.number}: the same")
            self._announce()

    def _fault(self, kind: str) -> None:
        alive = [rank for rank in self.ranks if not rank.is_dead and not rank.has_ended]
        if kind == "trouble":
            rank = self.dice.choice(alive)
            if rank.connection is not None:
                self.say(f"{rank.name} loses its connections")
                rank.connection.is_broken = True
                number = rank.adopted
                self.later(lambda: self.connect_anew(number))
            return
        many = 1 if self.dice.random() < 0.7 else 2
        for rank in self.dice.sample(alive, min(many, len(alive))):
            top = max(each.version for each in alive)
            left = [each for each in alive if each is not rank and not each.is_dead and each.version >= top - 1]
            seats = {each.seat for each in left if each.run is not None and each.run.has_state}
            if len(seats) == self.shape.seats and not rank.has_parted:
                self._kill(rank)

    def _kill(self, rank: Rank) -> None:
        self.say(f"{rank.name} dies, waiting for {rank.waits_for or 'nothing'}")
        rank.is_dead = True
        self.later(lambda: self.change(lost=(rank.name,)))
        if self.case.newcomers:
            self.newcomers += 1
            newcomer = Rank(self, f"{rank.local_rank}{chr(39) * self.newcomers}", rank.local_rank)
            self.later(lambda: self.later(lambda: self._start(newcomer)))

    def _start(self, rank: Rank) -> None:
        self.say(f"{rank.name} starts")
        self.ranks.append(rank)
        rank.thread.start()

    # -- who is next --------------------------------------------------------------------------------------------------

    def point(self) -> None:
        """Another may go on here."""
        if self.dice.random() < self.changes:
            self.pass_on(here.rank)
        elif here.rank.is_dead or self.is_over:
            raise Died

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Until then others go on."""
        rank: Rank = here.rank
        rank.condition, rank.waits_for = condition, what
        self.pass_on(rank)
        rank.condition, rank.waits_for = None, ""

    def pass_on(self, rank: Rank) -> None:
        """Lets go on who is next. Raises Died."""
        chosen = None if self.is_over else self._next()
        if chosen is None:
            self.stop()
        if chosen is rank and not rank.is_dead:
            return
        if chosen is not None:
            chosen.turn.release()
        if rank.has_ended:
            return
        if not self.is_over:
            rank.turn.acquire()
        if rank.is_dead or self.is_over:
            raise Died

    def _next(self) -> Rank | None:
        """None when all have ended, or none ever will."""
        while True:
            self.decisions += 1
            if self.decisions > DECISIONS_MAX:
                self.fail("the job does not end")
                return None
            while self.faults and self.faults[0][0] <= self.decisions and self.ranks_alive():
                self._fault(self.faults.pop(0)[1])
            if self.events and self.dice.random() < self.hurry:
                self.events.pop(self.dice.randrange(len(self.events)))()
            alive = self.ranks_alive()
            self.dice.shuffle(alive)
            for rank in alive:
                if rank.condition is None or rank.condition():
                    return rank
            if self.events:
                self.events.pop(self.dice.randrange(len(self.events)))()
            elif any(rank.connection.notice() for rank in alive if rank.connection is not None):
                continue
            elif alive:
                self.fail("nobody goes on: " + "; ".join(f"{rank.name} waits for {rank.waits_for}" for rank in alive))
                return None
            else:
                return None

    def ranks_alive(self) -> list[Rank]:
        """Whose threads can run."""
        return [rank for rank in self.ranks if not rank.is_dead and not rank.has_ended]

    def stop(self) -> None:
        """All threads end."""
        self.is_over = True
        self.ended.set()

    def give_up(self) -> None:
        """All begin again from a checkpoint."""
        if any(rank.has_parted for rank in self.ranks):
            self.fail(f"{here.rank.name} fails after the end")
        self.say("the state is lost")
        self.is_lost = True
        self.stop()

    def fail(self, what: str) -> None:
        """Something happened that must not. Raises Died in the thread of a rank."""
        self.say(f"VIOLATION: {what}")
        self.violation = self.violation or what
        self.stop()

    def play(self) -> Job:
        """To the end. Raises Violation."""
        for rank in self.ranks:
            rank.thread.start()
        first = self._next()
        assert first is not None
        first.turn.release()
        assert self.ended.wait(60.0), f"seed {self.seed} does not end"
        for rank in self.ranks:
            if rank.turn.locked():
                rank.turn.release()
        for rank in self.ranks:
            rank.thread.join(10.0)
            assert not rank.thread.is_alive()
        trained = {rank.seat for rank in self.ranks if rank.version == self.case.steps}
        if self.violation is None and not self.is_lost and len(trained) < self.shape.seats:
            self.fail("all have ended, and not one replica has made all steps")
        if self.violation is not None:
            raise Violation(f"seed {self.seed}, {self.case}: {self.violation}\n" + "\n".join(self.story))
        return self

    # -- collectives --------------------------------------------------------------------------------------------------

    def collective(
        self, rank: Rank, group: Sequence[int], what: str, tensor: Tensor, combine: Callable[[dict[int, Tensor]], Any]
    ) -> Work:
        """Begins one of these ranks. What is combined takes the place of ``tensor``."""
        self.point()
        mine: Connection = rank.connection  # type: ignore[assignment]
        call = self._call(mine, (tuple(group), what if what in ("stage", "finish", "norm", "all") else ""))
        if call.setdefault("what", what) != what:
            self.fail(f"{rank.name} begins {what}, and others of its group {call['what']}")
        given = call.setdefault("given", {})
        if not mine.is_broken:
            given[mine.rank] = tensor.clone()
        others = [each for each in group if each != mine.rank]
        return Work(mine, others, tensor, lambda: len(given) == len(group), lambda: combine(given))

    def send(self, rank: Rank, tensor: Tensor, destination: int) -> Work:
        """Ends at once."""
        self.point()
        mine: Connection = rank.connection  # type: ignore[assignment]
        call = self._call(mine, (mine.rank, destination, "send"))
        if not mine.is_broken:
            call["given"] = tensor.clone()
        return Work(mine, [destination], None, lambda: True, lambda: None)

    def receive(self, rank: Rank, tensor: Tensor, source: int) -> Work:
        """Ends when it was sent."""
        self.point()
        mine: Connection = rank.connection  # type: ignore[assignment]
        number = mine.counts[source, "received"] = mine.counts.get((source, "received"), 0) + 1
        call = self.calls.setdefault((mine.world, (source, mine.rank, "send"), number), {})
        return Work(mine, [source], tensor, lambda: "given" in call, lambda: call["given"])

    def _call(self, mine: Connection, key: Any) -> dict[str, Any]:
        number = mine.counts[key] = mine.counts.get(key, 0) + 1
        return self.calls.setdefault((mine.world, key, number), {})

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check_agreement(self, agreed: ReplicaAgreement) -> None:
        """All members of a world agree on the same, and on one layout."""
        world, number = self.meeting_of[here.rank.name]
        if (world, number) not in self.agreed:
            self.say(f"round {world}.{number}: {_in_short(agreed)}")
        first = self.agreed.setdefault((world, number), agreed)
        if first != agreed or self.agreed[world, 1].layout.replicas != agreed.layout.replicas:
            self.fail(f"round {world}.{number} agrees on {agreed}, and on {first}")

    def check_lost(self, said: Sequence[MemberSaid]) -> None:
        """Nobody gives up while there is a whole replica, or all steps are made."""
        step = max(each.heads_for for each in said)
        norm = any(each.norm is not None for each in said if each.heads_for == step)
        have = {each.seat for each in said if each.state == step}
        ready = {each.seat for each in said if each.state == step - 1 and each.is_finished}
        every = set(range(self.shape.seats))
        if step < self.case.steps and (every in (have, ready) or (norm and have | ready == every)):
            self.fail(f"nobody has the state, they say, but: {said}")

    def check_step(self, rank: Rank, step: int, norm: float) -> None:
        """The gradients that are applied have each micro-batch once, and the sum over the replica."""
        case, seats = self.case, self.shape.seats
        tokens = sum(100 + index for index in range(case.micro_batches))
        self.say(f"{rank.name} makes step {step}")
        if rank.version != step:
            self.fail(f"{rank.name} with the state {rank.version} makes step {step}")
        if rank.tokens != tokens:
            self.fail(f"{rank.name} divides step {step} by {rank.tokens} tokens: there are {tokens}")
        for group in rank.groups:
            data = group.buckets[0].grad_data
            shared = case.micro_batches * seats if group.number == 0 else 0
            wanted = torch.tensor([1.0] * case.micro_batches + [float(shared)]) * (step + 1)
            if not torch.equal(data, wanted.double()):
                self.fail(f"{rank.name} applies {data.tolist()} in step {step}, bucket {group.number}")
        if self.steps.setdefault(step, (tokens, norm)) != (tokens, norm):
            self.fail(f"{rank.name} has the norm {norm} in step {step}, others {self.steps[step]}")

    def check_end(self, rank: Rank) -> None:
        """A script ends with all steps made, or as a spare."""
        assert rank.members is not None
        parameters = 1
        for step in range(rank.version):
            parameters = hash((parameters, step)) % 2**31
        if rank.parameters != parameters:
            self.fail(f"{rank.name} has other parameters after {rank.version} steps than anybody should")
        if rank.version != self.case.steps and not self.over:
            self.fail(f"{rank.name} ends after {rank.version} steps")
        if not rank.has_parted:
            self.later(lambda: self.change(lost=(rank.name,)))


def _in_short(agreed: ReplicaAgreement) -> str:
    layout = agreed.layout
    trains = f"{layout.replicas}{f' and spares {layout.spares}' if layout.spares else ''}, step {agreed.step}"
    if agreed.is_even:
        return f"{trains}, fill {agreed.fill}, held {[sorted(each) for each in agreed.held]}, dealt {agreed.dealt}"
    return f"{trains}, advance {agreed.advance}, pull {agreed.pull} from {agreed.sources}"
