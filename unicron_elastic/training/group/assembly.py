"""The members of a world, assembled: they meet, connect, and hand over and reduce gradients together.

Each method does one thing that the protocol has decided, and returns the event that it ended with; if it broke, that.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import DistError

from unicron_elastic.base.text import counted, one_line
from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Connected,
    Gathered,
    GroupBroke,
    Handed,
    Outgrown,
    PatienceOver,
    Reduced,
    ReplicaEvent,
    RoundLeft,
)
from unicron_elastic.engine.protocol.said import MismatchError, Said, read, written
from unicron_elastic.engine.transport.completion import UnderWay
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.group.collective_order import CollectiveOrder, OutgrownError
from unicron_elastic.training.group.handover import NotTakenError
from unicron_elastic.training.group.mean_share import check_same, few, message
from unicron_elastic.training.group.meeting import Meeting, MissingError
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.group.reports import Reports
from unicron_elastic.training.group.signs import Signs
from unicron_elastic.training.step.comparison import differ
from unicron_elastic.training.step.gradients import Gradients
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.worker.collectives.broken import break_collectives, has_met_others
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import MEET, SPARE

_WHY_CHARACTERS = 300
AT_WORK_S = 3600.0  # so long a collective waits for a rank at work; then members connect anew, and wait again
BROKEN = (RuntimeError, ValueError)  # as which torch raises what befalls a collective; DistError is a RuntimeError


class OnRegroupError(Exception):
    """The script's ``on_regroup`` has raised what says nothing of a collective: this rank has not what it needs."""


class OverError(RuntimeError):
    """Others have made their last steps and gone on or ended: there is nobody to meet."""


@dataclass(frozen=True, slots=True)
class TextsHeard(ReplicaEvent):
    """`TextsHeard`: all members have spoken in this round; the ``texts`` of what they say, by rank."""

    texts: tuple[str, ...]


class Assembly:
    """`Assembly` meets the members of one world after another and keeps its process group.

    ``terms`` must be the same for all. ``said`` is what all have said in the latest meeting, by rank.
    """

    def __init__(
        self,
        membership: Membership,
        transport: Transport,
        gradients: Gradients,
        reports: Reports,
        *,
        signs: Signs,
        timeout_s: float,
        has_own_groups: bool = False,
    ) -> None:
        """``has_own_groups``: the script's process groups stay as they are, and none is made for a world."""
        self._has_own_groups = has_own_groups
        self._membership = membership
        self._transport = transport
        self._gradients = gradients
        self._reports = reports
        self._signs = signs
        self._timeout_s = timeout_s
        self.terms = ""
        self._meeting: Meeting | None = None
        self.world: World | None = None
        self.rank = 0
        self.said: list[Said] = []
        self._order: CollectiveOrder | None = None
        self._early: dict[int, UnderWay] = {}  # buckets that are being reduced while the script computes
        self._early_error: Exception | None = None  # of the one that did not begin
        self._broken: tuple[Exception, list[UnderWay]] | None = None  # why this world is, and what had begun in it
        self._last_resort: tuple[float, Exception] | None = (
            None  # so long the next world has to come; then this is raised
        )
        transport.on_look = self._look
        self.on_connect: Callable[[], None] = lambda: None
        self.tell_apart: Callable[[frozenset[int]], str] = lambda _trained: "trains other parameters"

    # -- meetings -----------------------------------------------------------------------------------------------------

    def say(self, number: int, said: Said, *, is_silent: bool = False) -> ReplicaEvent | None:
        """Speak in the next round of the meeting of the world ``number``, and hear all.

        ``is_silent``: another process of this replica speaks, and hears. Raises MissingError, what broke a world
        without another one, and RuntimeError if the script has made a process group with others before.
        """
        if self._meeting is None and not self._membership.is_fixed and not self._has_own_groups and has_met_others():
            raise WrongUseError(
                "run.steps() makes the process group by itself, anew after each loss, and this script has made one "
                "before: take its init_process_group out, as a process that takes a lost rank's place would wait there "
                "for ranks that train and do not come"
            )
        is_newer = self.world is None or self.world.number < number
        if is_newer:
            self._outgrow()  # before this one's own part in the old one is given up, if there was any
        self._give_up()
        try:
            if is_newer:
                self._adopt(number)
            return None if is_silent else TextsHeard(tuple(self._speak(said)))
        except Superseded:
            return RoundLeft()
        except MismatchError:
            raise
        except BROKEN as error:
            return self._broke(error)

    def understand(self, said: Said, heard: TextsHeard) -> AllSaid:
        """Return what all have said, where this one has ``said`` so.

        Raises MismatchError, or NotTakenError in a newcomer.
        """
        if self._order is not None:
            self._order.meet()
        try:
            everybody = read(heard.texts, self.terms, said)
        except MismatchError as error:
            if said.is_new:
                raise NotTakenError(f"{error}: the others train on without it") from None
            raise
        self._compare(said, everybody)
        self.said = everybody
        return AllSaid(tuple(everybody))

    def _speak(self, said: Said) -> list[str]:
        assert self._meeting is not None
        self._meeting.say(written(said, self.terms), is_new=said.is_new)
        if said.is_new:
            with phase(SPARE):
                self._meeting.wait_for_others(self._timeout_s)
        with phase(MEET), self._signs.waiting():
            return self._meeting.hear(self._timeout_s)

    def _adopt(self, number: int) -> None:
        self._transport.leave()
        self.world, self.rank, store = self._membership.adopt(number)
        self._meeting = Meeting(store, self.world, self.rank, self._membership.is_newer)
        self._order = CollectiveOrder(self._meeting.store, self.rank)
        if not self._membership.is_fixed:
            self._signs.watch(self._meeting.store)
            self._meeting.patience = self._signs

    def _compare(self, said: Said, everybody: list[Said]) -> None:
        """Raises MismatchError if a member does something else in the step that this one, who ``said`` so, is in."""
        for rank, each in enumerate(everybody):
            is_in_same = each.state == said.state is not None and each.until == said.until
            may_still_freeze = each.is_between or said.is_between  # some parameters, before it comes to that step
            if is_in_same and not may_still_freeze and each.trained != said.trained:
                raise MismatchError(f"in step {said.state} rank {rank} {self.tell_apart(each.trained)}")
            ours, theirs = said.asks, each.asks or each.report
            if ours is not None and theirs is not None and ours.key == theirs.key and ours.label != theirs.label:
                raise MismatchError(f"rank {rank} asks for {theirs.label}, and this rank for {ours.label}")
            if None in (each.start, said.start):
                continue
            if each.start != said.start:
                raise MismatchError(f"rank {rank} begins with step {each.start}, and this rank with step {said.start}")
            if each.until != said.until:
                raise MismatchError(f"rank {rank} trains until step {each.until}, and this rank until {said.until}")

    def exchange(self, text: str) -> list[str] | ReplicaEvent:
        """Return what each member says at this point, by rank; or that this round was left, or the world broke."""
        assert self._meeting is not None
        try:
            with phase(MEET), self._signs.waiting():
                return self._meeting.exchange(text, self._timeout_s)
        except Superseded:
            return RoundLeft()
        except BROKEN as error:
            return self._broke(error)

    # -- the next world -----------------------------------------------------------------------------------------------

    def await_agreed(self) -> None:
        """Wait for the next world, which the agents must make. Raises why this one has ended if none comes."""
        limit_s, error = self._last_resort or (
            self._timeout_s,
            MissingError("some newcomers have come too early or too late, and the agents have made no world without"),
        )
        self._last_resort = None
        if not self._membership.wait_for_agreed(limit_s):
            raise error
        self._give_up()

    def await_newcomer(self, patience_s: float) -> PatienceOver | None:
        """Wait for the next world, with a newcomer, but not for long."""
        return None if self._membership.wait_for_newer(patience_s) else PatienceOver()

    def expect_next(self, limit_s: float, error: Exception) -> None:
        """Let ``await_agreed`` wait so long, and raise this error then."""
        self._last_resort = (limit_s, error)

    def tell_broken(self) -> None:
        """Tell all others that this world has broken."""
        assert self._broken is not None
        self._membership.tell_broken(self._broken[0])

    def break_too(self, why: str) -> None:
        """Take it that this world is broken, as it is for another process of this replica. Raises it if it is fixed."""
        self._broke(DistError(f"for another process of this replica: {why}"))

    def _broke(self, error: Exception, *begun: UnderWay) -> ReplicaEvent:
        """Return that it broke. Raises MismatchError, and the error if no other world ever comes after it."""
        self._compare_places()
        self._broken = (error, list(begun))
        if isinstance(error, OutgrownError):
            why = MissingError("another rank has gone on to a larger world, of which this one is not told")
            self.expect_next(self._timeout_s, why)
            return Outgrown()
        if self._membership.is_fixed or is_of_script(error):
            raise error
        self.expect_next(self._membership.next_world_timeout_s, error)
        return GroupBroke(f"{type(error).__name__}: {error}")

    def _give_up(self) -> None:
        """Wait for the end of what had begun when a world broke: until then it may write into its tensors.

        Those of one that does not end are not used again.
        """
        early, _ = self._take_early()
        if early and self._broken is None:
            self._broken = (Superseded("a newer world has come while this rank computed"), list(early.values()))
        if self._broken is not None:
            error, begun = self._broken
            self._broken = None
            if not self._transport.give_up(error, begun):
                self._gradients.renew()

    def _outgrow(self) -> None:
        """Tell a rank that has not heard of the newer world in time, and waits for this one in the old one."""
        if self._order is not None and not self._transport.is_broken and not self._membership.is_left():
            with contextlib.suppress(DistError):  # without its store the world is broken
                self._order.outgrow()

    # -- the process group --------------------------------------------------------------------------------------------

    def connect(self) -> ReplicaEvent:
        """Make this world's process group."""
        try:
            self._connect()
        except Superseded:
            return RoundLeft()
        except MismatchError:
            raise
        except BROKEN as error:
            return self._broke(error)
        return Connected()

    def _connect(self) -> None:
        assert self._meeting is not None
        assert self.world is not None
        device = self._gradients.buckets[-1].local.device
        is_fixed = self._membership.is_fixed
        timeout_s = self._timeout_s if is_fixed else max(self._timeout_s, AT_WORK_S)
        with phase(MEET), self._signs.waiting():
            self._transport.connect(
                self._meeting.store, self.rank, self.world.size, timeout_s=timeout_s, device=device, is_fixed=is_fixed
            )
        self._call_script()

    def _call_script(self) -> None:
        """Raises OnRegroupError for a mistake of the script: if it counted as a break it would be tried for ever."""
        assert self.world is not None
        try:
            self.on_connect()
        except Superseded:  # a group that the script makes there is given up when a member is lost meanwhile
            raise
        except Exception as error:
            if is_of_script(error) or (isinstance(error, RuntimeError) and _is_from_torch(error)):
                raise
            name = getattr(self.on_connect, "__qualname__", type(self.on_connect).__qualname__)
            raise OnRegroupError(
                f"{name}(), which is this script's on_regroup, raised {type(error).__name__} for the process group of "
                f"{counted(self.world.size, 'rank', 'ranks')}: "
                f"{one_line(str(error), _WHY_CHARACTERS)}. This rank cannot train on without"
            ) from error

    # -- collectives --------------------------------------------------------------------------------------------------

    def begin_reduce(self, bucket: int, holdings: Sequence[frozenset[int]]) -> None:
        """Begin to reduce a bucket in the middle of a backward pass: what befalls it there is raised in ``reduce``."""
        if self._early_error is None:
            try:
                completion = self._gradients.reduce(bucket, holdings, is_awaited=False)
            except BROKEN as error:
                self._early_error = error
            else:
                assert completion is not None
                self._early[bucket] = completion

    def _take_early(self) -> tuple[dict[int, UnderWay], Exception | None]:
        """Return what was begun early, and the error of what was not, and forget both."""
        taken = (self._early, self._early_error)
        self._early, self._early_error = {}, None
        return taken

    def reduce(
        self, step: int, buckets: Sequence[int], holdings: Sequence[frozenset[int]], *, is_awaited: bool
    ) -> list[ReplicaEvent]:
        """Reduce these buckets; ``holdings`` are the micro-batches that each rank has computed."""
        events: list[ReplicaEvent] = []
        begun, error = self._take_early()

        def reduce() -> None:
            if error is not None:
                raise error
            for numbers in self._gradients.rounds:
                some = [bucket for bucket in numbers if bucket in buckets]
                for bucket in (each for each in some if each not in begun):
                    completion = self._gradients.reduce(bucket, holdings, is_awaited=is_awaited)
                    if completion is not None:
                        begun[bucket] = completion
                self._finish(some, begun, events)

        broke = self.together(reduce, f"the gradients of step {step}", begun=begun)
        if broke is not None:
            return [*events, broke]
        self._transport.retire()
        return events

    def _finish(self, buckets: Sequence[int], begun: Mapping[int, UnderWay], events: list[ReplicaEvent]) -> None:
        """Wait for these buckets, which are there when the last one is. Raises what a collective raises."""
        completions = [begun[bucket] for bucket in buckets if bucket in begun]
        for each in completions[:-1]:
            each.follow()
        for each in completions[-1:]:
            each.wait()
        events += map(self._reduced, buckets)

    def _reduced(self, bucket: int) -> Reduced:
        if not self._gradients.has_notes(bucket):
            return Reduced(bucket)
        is_awaited, must_repeat = self._gradients.flags()
        is_different = differ(self._gradients.digests())
        return Reduced(bucket, is_awaited=is_awaited, differs=is_different, must_repeat=must_repeat)

    def hand_over(self, bucket: int, source: int, to: int | None) -> ReplicaEvent:
        """Give, or take, a reduced bucket."""

        def hand_over() -> None:
            is_source = self.rank == source
            room = self._gradients.buckets[bucket].reduced if is_source else self._gradients.room(bucket)
            if to is None:
                self._transport.broadcast(room, source)
            elif is_source:
                self._transport.send(room, to)
            else:
                self._transport.receive(room, source)

        return self._try(hand_over) or Handed()

    def compare(self, what: str) -> None:
        """Tell each other ``what`` all do now. Raises MismatchError if they differ, and what a collective raises."""
        device = self._gradients.buckets[-1].local.device
        check_same(self._transport.all_gather(message(what, torch.empty(0, dtype=torch.float64, device=device))))

    def hand_over_mean(self, source: int, to: int) -> ReplicaEvent:
        """Give, or take, the result of a mean."""

        def hand_over() -> None:
            if self.rank == source:
                self._transport.send(self._reports.result, to)
                return
            report = self.said[source].report
            assert report is not None
            result = self._reports.room(report)
            self._transport.receive(result, source)
            self._reports.take(report, result)

        return self._try(hand_over) or Handed()

    def gather(self, until: int, *, is_awaited: bool) -> ReplicaEvent:
        """Wait for all members at the end of the call ``until``; ``is_awaited``: this rank knows of a newcomer."""
        end = f"the end of run.steps(total={until})"
        awaited: list[bool] = []

        def gather() -> None:
            device = self._gradients.buckets[-1].local.device
            told = self._transport.all_gather(
                message(end, torch.tensor([is_awaited], dtype=torch.float64, device=device))
            )
            check_same(told)
            awaited.extend(bool(few(each, 1) > 0) for each in told)

        return self.together(gather, end) or Gathered(is_awaited=any(awaited))

    def together(
        self,
        collective: Callable[[], None],
        what: str,
        *,
        is_work: bool = False,
        begun: dict[int, UnderWay] | None = None,
    ) -> ReplicaEvent | None:
        """Do ``what`` all members do; return how it broke, or None.

        ``is_work``: some do, and the others wait for them. ``begun`` is filled with what has begun.
        """
        if self._order is not None:
            self._order.begin(what)
        with contextlib.nullcontext() if is_work else self._signs.waiting():
            broke = self._try(collective, begun)
        if broke is None and self._order is not None:
            self._order.end()
        return broke

    def _try(self, collective: Callable[[], None], begun: dict[int, UnderWay] | None = None) -> ReplicaEvent | None:
        try:
            collective()
        except MismatchError:
            raise
        except BROKEN as error:
            return self._broke(error, *(begun or {}).values())
        return None

    def _look(self) -> None:
        if self._order is None:
            return
        try:
            with contextlib.suppress(DistError):  # under torchrun the store ends with rank 0, which may be done already
                self._order.look()
        except MismatchError as error:
            break_collectives(str(error), is_quiet=True)  # else nobody could end before their time is over
            raise

    def _compare_places(self) -> None:
        """Raises MismatchError if what broke the world is that others were elsewhere in the script."""
        if self._order is not None:
            with contextlib.suppress(DistError):
                self._order.compare()
            self._order.end()


def _is_from_torch(error: BaseException) -> bool:
    """Return whether torch.distributed has raised it, as where a peer is lost in a collective of the script."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("torch.distributed") for name in names)
