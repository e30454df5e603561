"""Where a replica is: one phase at a time, with what belongs to it and nothing else, so no other states can be written.

Seats are the processes of one replica: all are in one phase, as what each does with others is done when all seats say
that it is. A replica that has lost a seat is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple, TypeAlias

from unicron_elastic.base.world import World


class ReplicaPhase(Enum):
    """`ReplicaPhase` names where a replica is."""

    OUTSIDE = "outside"  # before its first call of run.steps()
    ARRIVING = "arriving"  # asks the agent, copies the state, waits for a world
    PASSING = "passing"  # is in no call that the others are in: they have that call behind them
    MEETING = "meeting"
    COMPUTING = "computing"
    REDUCING = "reducing"
    COMPARING = "comparing"  # all states with each other, as the notes behind the gradients say that they differ
    COMMITTED = "committed"  # every gradient of the step is whole here, and all know; others may still copy the state
    STEPPING = "stepping"  # the script's own code
    AVERAGING = "averaging"  # a mean, for which the script asks between two steps or calls
    PARTING = "parting"  # at the end of a call, until nobody needs it any more
    FINISHED = "finished"
    MAKING = "making"  # the optimizer's step, with the other members of its replica
    EVALUATING = "evaluating"  # passes between two steps, with the other members of its replica
    SPARE = "spare"  # waits for others of whom a replica could be made
    ENDED = "ended"  # the script was told an error


class Spot(Enum):
    """`Spot` names where the script stands while its replica meets the others."""

    ARRIVING = "arriving"  # a newcomer's, in its call of run.steps()
    FIRST = "first"  # one's that was there from the beginning, in its first call
    WITHIN = "within"  # in a step: it has asked for the first micro-batch
    BETWEEN = "between"  # two steps, or behind a call: it asks for a mean
    END = "end"  # of its call
    MAKING = "making"  # in the optimizer's step, which members make together


class Standing(Enum):
    """`Standing` says what a replica must do before it does anything with others."""

    EVEN = "even"  # nothing: it has met them in its world
    MET = "met"  # begin the step before which it has met them: what it holds and has of it stays
    AMONG = "among"  # the same, but the others are in that step already, and do not ask for the means before it
    APART = "apart"  # meet them: it is late, or has not met them yet
    NEW = "new"  # meet them, and take their state


@dataclass(frozen=True, slots=True)
class Outside:
    """`Outside`: the script has made no call yet."""

    phase: ClassVar = ReplicaPhase.OUTSIDE


class Errand(Enum):
    """`Errand` is what an arriving replica waits for."""

    ANSWER = "answer"
    COPY = "copy"
    WORLD = "world"


@dataclass(frozen=True, slots=True)
class Arriving:
    """`Arriving`: on its way into the job, with a copy of the state or without. ``others_until`` is known of theirs."""

    errand: Errand = Errand.ANSWER
    has_copy: bool = False
    copies: int = 0
    others_until: int = 0

    phase: ClassVar = ReplicaPhase.ARRIVING


@dataclass(frozen=True, slots=True)
class Passing:
    """`Passing`: between calls that the others have behind them; ``kept``: a copy of a later call, and its step."""

    copies: int
    others_until: int
    kept: tuple[int, int] | None = None

    phase: ClassVar = ReplicaPhase.PASSING


class Talk(Enum):
    """`Talk` is what a replica waits for in a meeting."""

    WORLD = "world"  # a newer one: this one broke, or newcomers leave it
    ALL = "all"  # what all say
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class InMeeting:
    """`InMeeting`: at a ``spot`` of the script. ``agreement`` is there once all have spoken.

    ``by`` are the seats that have connected. ``has_state``: others may rely on its parameters. ``parts_in`` is the
    world in which it waited at the end of its call; 0: it has not. ``copies`` and ``others_until`` are a newcomer's.
    ``is_copy``: its state was copied while others trained, who compare it with what they have.
    ``back`` is to what one returns that asks for a mean; ``has_mean``: a member has given it. ``is_among``: others have
    begun the step before which it is. ``have_parted``: others have left the end at which it is.
    """

    spot: Spot
    talk: Talk
    has_state: bool
    agreement: Any = None  # `Agreement`, or `ReplicaAgreement` where a replica has several members
    by: frozenset[int] = frozenset()
    parts_in: int = 0
    copies: int = 0
    others_until: int = 0
    is_copy: bool = False
    back: Stepping | Finished | None = None
    has_mean: bool = False
    is_among: bool = False
    have_parted: bool = False

    phase: ClassVar = ReplicaPhase.MEETING


@dataclass(frozen=True, slots=True)
class Handing:
    """`Handing`: in a meeting, reduced buckets are handed over, as (bucket, source, to) in their order.

    None as a bucket is the result of a mean.
    """

    meeting: InMeeting
    left: tuple[tuple[int | None, int, int | None], ...]
    by: frozenset[int] = frozenset()

    phase: ClassVar = ReplicaPhase.MEETING


@dataclass(frozen=True, slots=True)
class Moving:
    """`Moving`: in a meeting, the state is given or taken; ``by`` are the seats that have done it.

    ``left`` are a member's (source, destination) that are still to come, where each seat has its own.
    """

    meeting: InMeeting
    by: frozenset[int] = frozenset()
    left: tuple[tuple[int, int], ...] = ()

    phase: ClassVar = ReplicaPhase.MEETING


@dataclass(frozen=True, slots=True)
class Computing:
    """`Computing`: the script computes; ``left`` are the micro-batches that it is still to compute.

    ``begun``: so many buckets, the first ones, are being summed already.
    """

    left: frozenset[int]
    begun: int = 0

    phase: ClassVar = ReplicaPhase.COMPUTING


@dataclass(frozen=True, slots=True)
class Reducing:
    """`Reducing`: these (bucket, seat) are being summed.

    ``whole`` are sums that do not count before the notes, which may say that they ``must_repeat``.
    """

    left: frozenset[tuple[int, int]]
    whole: frozenset[int] = frozenset()
    must_repeat: bool = False

    phase: ClassVar = ReplicaPhase.REDUCING


@dataclass(frozen=True, slots=True)
class Comparing:
    """`Comparing`: the ranks find out whose state is not that of most."""

    phase: ClassVar = ReplicaPhase.COMPARING


class WaitFor(Enum):
    """`WaitFor` is for what a replica stays, though it could go on."""

    NEWCOMER = "newcomer"  # a world with one that is on its way
    HOLDERS = "holders"  # those who copy its state
    HOLDERS_LATE = "holders, late"  # the same, of one that is late, which no new world keeps here


@dataclass(frozen=True, slots=True)
class Committed:
    """`Committed`: the gradients are whole; it waits before the script may change the state."""

    wait: WaitFor

    phase: ClassVar = ReplicaPhase.COMMITTED


@dataclass(frozen=True, slots=True)
class Stepping:
    """`Stepping`: the script's own code; ``is_behind``: the gradients of the present step are in place."""

    standing: Standing
    is_behind: bool

    phase: ClassVar = ReplicaPhase.STEPPING


@dataclass(frozen=True, slots=True)
class Parting:
    """`Parting`: waits for all at the end of the call; ``wait``: they are there, and it waits for newcomers.

    ``by`` are the seats that have heard of all.
    """

    by: frozenset[int] = frozenset()
    is_awaited: bool = False
    wait: WaitFor | None = None

    phase: ClassVar = ReplicaPhase.PARTING


@dataclass(frozen=True, slots=True)
class Finished:
    """`Finished`: behind the end of a call. The script may make one more."""

    standing: Standing

    phase: ClassVar = ReplicaPhase.FINISHED


@dataclass(frozen=True, slots=True)
class Averaging:
    """`Averaging`: the shares of a mean are summed; then the script goes ``back``. ``by``: the seats that have it."""

    back: Stepping | Finished
    by: frozenset[int] = frozenset()

    phase: ClassVar = ReplicaPhase.AVERAGING


@dataclass(frozen=True, slots=True)
class Ended:
    """`Ended`: the script was told an error of this ``kind``."""

    kind: str

    phase: ClassVar = ReplicaPhase.ENDED


Record: TypeAlias = (
    Outside
    | Arriving
    | Passing
    | InMeeting
    | Handing
    | Moving
    | Computing
    | Reducing
    | Comparing
    | Committed
    | Stepping
    | Parting
    | Finished
    | Averaging
    | Ended
)


class Work(NamedTuple):
    """`Work` is what is done of the present step. It and `Replica` change all the time: a named tuple does so fastest.

    ``held`` are the micro-batches that this replica has ``computed`` or will; ``holdings`` the same of all, by rank.
    ``done`` are the buckets whose sum is whole in all seats. ``has_last``: the sums of the step before are still there.
    ``is_shut``: nobody may begin to copy the state in this step any more. ``is_awaited``: all know of a newcomer.
    ``differs``: the notes say that states differ, and it is not known yet whose is wrong.
    """

    held: frozenset[int] = frozenset()
    computed: frozenset[int] = frozenset()
    holdings: tuple[frozenset[int], ...] = ()
    done: frozenset[int] = frozenset()
    has_last: bool = False
    is_shut: bool = False
    is_awaited: bool = False
    differs: bool = False


class Replica(NamedTuple):
    """`Replica` is what one replica knows, of a step with so many ``micro_batches``, ``buckets`` and ``seats``.

    ``step`` counts the optimizer steps behind its parameters, ``until`` is the total of its call. It was told of the
    world ``heard``, in which it has the rank ``heard_rank``, and meets, or met last, in the world ``met``, as ``rank``;
    if it ``is_connected`` its process group there is whole. ``holders`` copy its state.
    """

    micro_batches: int
    buckets: int
    seats: int = 1
    record: Record = Outside()
    until: int = 0
    step: int = 0
    work: Work = Work()
    heard: World | None = None
    heard_rank: int | None = None
    met: World | None = None
    rank: int = 0
    is_connected: bool = False
    holders: int = 0

    @property
    def phase(self) -> ReplicaPhase:
        """Return where it is."""
        return self.record.phase

    @property
    def knows_newer(self) -> bool:
        """Tell whether it has heard of a newer world than that in which it met last."""
        return self.heard is not None and (self.met is None or self.heard.number > self.met.number)

    @property
    def is_left(self) -> bool:
        """Tell whether what goes on in its world has ended with a newer one."""
        return self.heard is not None and self.met is not None and self.heard.breaks(self.met)

    @property
    def needs_meeting(self) -> bool:
        """Tell whether its world is left for another one, or its process group is not whole."""
        return not self.is_connected or self.is_left

    @property
    def is_complete(self) -> bool:
        """Tell whether all buckets of the present step are reduced."""
        return len(self.work.done) == self.buckets

    @property
    def may_be_copied(self) -> bool:
        """Tell whether somebody may begin to copy the state.

        That is from the moment when the script asks for the first micro-batch of a step until the first reduction.
        """
        record = self.record
        if isinstance(record, Handing | Moving):
            record = record.meeting
        is_within = isinstance(record, InMeeting) and record.spot is Spot.WITHIN
        return not self.work.is_shut and (is_within or isinstance(record, Computing))
