"""The members of a world, assembled: they have met, agreed on where they are, and can reduce gradients together.

Whatever happens on the way, another loss included, begins again with the newest world.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from torch.distributed import DistError

from unicron_elastic.base.text import counted, one_line
from unicron_elastic.base.world import NO_END, World
from unicron_elastic.engine.protocol.agreement import Agreement, agree, reports_to_give
from unicron_elastic.engine.protocol.said import MismatchError, Said, read, written
from unicron_elastic.engine.transport.completion import Completion
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.group.collective_order import CollectiveOrder, OutgrownError
from unicron_elastic.training.group.meeting import Meeting, MissingError
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.group.reports import Reports
from unicron_elastic.training.group.signs import Signs
from unicron_elastic.training.step.gradients import Gradients
from unicron_elastic.worker.collectives.broken import break_collectives, has_met_others
from unicron_elastic.worker.notices import Left
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import MEET, SPARE

_WHY_CHARACTERS = 300
AT_WORK_S = 3600.0  # so long a collective waits for a rank at work; then members connect anew, and wait again
BROKEN = (RuntimeError, ValueError)  # as which torch raises what befalls a collective; DistError is a RuntimeError


class OnRegroupError(Exception):
    """The script's ``on_regroup`` has raised what says nothing of a collective: this rank has not what it needs."""


class OverError(RuntimeError):
    """Others have made their last steps and gone on or ended: there is nobody to meet."""


class Assembly:
    """Meets the members of each world in turn and keeps its process group. ``terms`` must be the same for all."""

    def __init__(
        self,
        membership: Membership,
        transport: Transport,
        gradients: Gradients,
        reports: Reports,
        *,
        signs: Signs,
        timeout_s: float,
    ) -> None:
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
        self.parts_in = NO_END  # at which this one waits
        self.said: list[Said] = []  # by rank, in the latest meeting
        self.holdings: list[frozenset[int]] = []  # by rank, the micro-batches of this step that it has or will compute
        self._order: CollectiveOrder | None = None
        transport.on_look = self._look
        self.on_connect: Callable[[], None] = lambda: None
        self.tell_apart: Callable[[frozenset[int]], str] = lambda _trained: "trains other parameters"

    @property
    def world_size(self) -> int:
        """How many members there are; 1 before the first meeting."""
        return 1 if self.world is None else self.world.size

    def needs_meeting(self) -> bool:
        """Whether this world is left for another one, or has not connected."""
        return not self._transport.is_connected or self._transport.is_broken or self._membership.is_left()

    def is_over(self) -> bool:
        """Whether nobody comes to meet this one: others have begun to end, or have left the end that it is at."""
        return self._membership.is_over() or self._membership.has_parted(self.parts_in)

    def meet(self, say: Callable[[], Said], *, is_new: bool = False) -> Agreement:
        """Meets the members of the newest world; ``say`` tells where this one is.

        ``is_new``: it was in no world before. Afterwards the group is connected, and buckets that some had and others
        need are filled. Raises NoStateLeft, MismatchError, OverError, MissingError, or what broke a world after which
        none came; and RuntimeError if the script has made a process group with others before.
        """
        if self._meeting is None and not self._membership.is_fixed and has_met_others():
            raise RuntimeError(
                "run.steps() makes the process group by itself, anew after each loss, and this script has made one "
                "before: take its init_process_group out, as a process that takes a lost rank's place would wait there "
                "for ranks that train and do not come"
            )
        while True:
            if self.is_over():
                raise OverError("other ranks have made their last step and ended: all ranks must ask for as many steps")
            try:
                return self._meet(say, is_new)
            except Superseded:
                continue
            except MismatchError:
                raise
            except BROKEN as error:
                self._broke(error)

    def _meet(self, say: Callable[[], Said], is_new: bool) -> Agreement:
        if self._meeting is None or self._membership.is_newer():
            self._outgrow()
            self._transport.leave()
            self.world, self.rank, store = self._membership.adopt()
            self._meeting = Meeting(store, self.world, self.rank, self._membership.is_newer)
            self._order = CollectiveOrder(self._meeting.store, self.rank)
            if not self._membership.is_fixed:
                self._signs.watch(self._meeting.store)
                self._meeting.patience = self._signs
        assert self.world is not None
        said = say()
        self._meeting.say(written(said, self.terms), is_new=is_new)
        if is_new:
            with phase(SPARE):
                self._meeting.wait_for_others(self._timeout_s)
        with phase(MEET), self._signs.waiting():
            heard = self._meeting.hear(self._timeout_s)
        if self._order is not None:
            self._order.meet()
        micro_batches = self._gradients.micro_batches
        everybody = [read(text, self.terms, micro_batches, rank) for rank, text in enumerate(heard)]
        self._compare(said, everybody)
        agreement = agree(everybody, micro_batches=micro_batches)
        self.said, self.holdings = everybody, [each.held for each in everybody]
        if self.rank in agreement.leave:
            return agreement
        if agreement.leave:
            self._await_world_without(agreement.leave)
        if not self._transport.is_connected:
            self._connect()
        self._give_gradients(agreement)
        self._fill(agreement)
        self._give_reports()
        return agreement

    def _compare(self, said: Said, everybody: list[Said]) -> None:
        """Raises MismatchError if a member does something else in the step that this one, who ``said`` so, is in."""
        for rank, each in enumerate(everybody):
            if each.state == said.state is not None and each.until == said.until and each.trained != said.trained:
                raise MismatchError(f"in step {said.state} rank {rank} {self.tell_apart(each.trained)}")
            ours, theirs = said.asks, each.asks or each.report
            if ours is not None and theirs is not None and ours.key == theirs.key and ours.kind != theirs.kind:
                raise MismatchError(f"rank {rank} asks for {theirs.label}, and this rank for {ours.label}")
            if each.start is not None is not said.start and each.until != said.until:
                raise MismatchError(f"rank {rank} trains until step {each.until}, and this rank until {said.until}")

    def _await_world_without(self, newcomers: Sequence[int]) -> NoReturn:
        """They say that they leave. Raises Superseded, or MissingError."""
        if not self._membership.wait_for_agreed(self._timeout_s):
            ranks = ", ".join(map(str, newcomers))
            raise MissingError(f"no world has come without rank {ranks}, which had come too early or too late")
        raise Superseded

    # -- the process group --------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        assert self._meeting is not None
        device = self._gradients.buckets[-1].local.device
        is_fixed = self._membership.is_fixed
        timeout_s = self._timeout_s if is_fixed else max(self._timeout_s, AT_WORK_S)
        with phase(MEET), self._signs.waiting():
            self._transport.connect(
                self._meeting.store, self.rank, self.world_size, timeout_s=timeout_s, device=device, is_fixed=is_fixed
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
                f"{counted(self.world_size, 'rank', 'ranks')}: "
                f"{one_line(str(error), _WHY_CHARACTERS)}. This rank cannot train on without"
            ) from error

    def leave(self) -> None:
        """Leave: be no member of this world any more, not connected with the others."""
        self._membership.tell(Left())

    def _outgrow(self) -> None:
        """Tell a rank that has not heard of the newer world in time, and waits for this one in the old one."""
        if self._order is not None and not self._transport.is_broken and not self._membership.is_left():
            with contextlib.suppress(DistError):  # without its store the world is broken
                self._order.outgrow()

    # -- collectives --------------------------------------------------------------------------------------------------

    def reduce(self, step: int, *, is_awaited: bool) -> bool:
        """Reduces all buckets that are not done; false if the world broke on the way, and a newer one has come."""
        begun: dict[int, Completion] = {}
        self._begin(f"the gradients of step {step}")
        try:
            with self._signs.waiting():
                self._reduce(begun, is_awaited=is_awaited)
        except MismatchError:
            raise
        except BROKEN as error:
            self._broke(error, *begun.values())
            return False
        self._end()
        self._transport.retire()
        return True

    def _reduce(self, begun: dict[int, Completion], *, is_awaited: bool) -> None:
        gradients = self._gradients
        for numbers in gradients.rounds:
            left = [number for number in numbers if number not in gradients.done]
            for number in left:
                completion = gradients.reduce(number, self.holdings, is_awaited=is_awaited)
                if completion is not None:
                    begun[number] = completion
            for number in left:
                if number in begun:
                    begun[number].wait()
                gradients.done.add(number)

    def _give_gradients(self, agreement: Agreement) -> None:
        """Those who are late get the reduced gradients of the step that others have made already."""
        for source, destination in agreement.gradients:
            for number in range(len(self._gradients.buckets)):
                if self.rank == source:
                    self._transport.send(self._gradients.room(number), destination)
                elif self.rank == destination:
                    self._gradients.forget(number)  # if it has come once before: what breaks on the way leaves anything
                    self._transport.receive(self._gradients.room(number), source)
                    self._gradients.done.add(number)

    def _fill(self, agreement: Agreement) -> None:
        if agreement.fill:
            self._gradients.has_last = False
        for number, source in agreement.fill:
            if self.rank != source:  # whoever had it, too: what breaks on the way leaves anything
                self._gradients.forget(number)
            self._transport.broadcast(self._gradients.room(number), source)
            self._gradients.done.add(number)

    def _give_reports(self) -> None:
        """Those who have not got the result of a reduction between steps get it from another who has."""
        for source, destination in reports_to_give(self.said):
            if self.rank == source:
                self._transport.send(self._reports.result, destination)
            elif self.rank == destination:
                report = self.said[source].report
                assert report is not None
                result = self._reports.room()
                self._transport.receive(result, source)
                self._reports.take(report, result)

    def exchange(self, text: str) -> list[str] | None:
        """What each member says at this point, by rank; None if the world broke, and a newer one has come."""
        assert self._meeting is not None
        try:
            with phase(MEET), self._signs.waiting():
                return self._meeting.exchange(text, self._timeout_s)
        except Superseded:
            return None
        except BROKEN as error:
            self._broke(error)
            return None

    def together(self, collective: Callable[[], None], what: str, *, is_work: bool = False) -> bool:
        """Does ``what`` all members do; false if the world broke on the way, and a newer one has come.

        ``is_work``: some do, and the others wait for them.
        """
        self._begin(what)
        try:
            with contextlib.nullcontext() if is_work else self._signs.waiting():
                collective()
        except MismatchError:
            raise
        except BROKEN as error:
            self._broke(error)
            return False
        self._end()
        return True

    def _begin(self, what: str) -> None:
        if self._order is not None:
            self._order.begin(what)

    def _end(self) -> None:
        if self._order is not None:
            self._order.end()

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

    def _broke(self, error: Exception, *begun: Completion) -> None:
        """Breaks with this world, and returns when a newer one has come and what was ``begun`` has ended, else raises.

        Until they have ended they may write into their tensors; those of one that does not end are not used again.
        """
        self._compare_places()
        if not isinstance(error, OutgrownError):
            self._membership.broke(error)
        elif not self._membership.wait_for_agreed(self._timeout_s):
            raise MissingError("another rank has gone on to a larger world, of which this one is not told") from error
        if not self._transport.give_up(error, begun):
            self._gradients.renew()


def _is_from_torch(error: BaseException) -> bool:
    """Return whether torch.distributed has raised it, as where a peer is lost in a collective of the script."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(name.startswith("torch.distributed") for name in names)
