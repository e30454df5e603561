"""What a worker tells its agent, one class a message: see `message`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unicron_elastic.worker.message import Descriptors, Message


class Notice(Message):
    """`Notice` is anything that a worker tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Notice):
    """`FirstStep` says that the first step is made; ``stack_fd`` is where stacks can be read, if anywhere."""

    step: int
    stack_fd: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending(Notice):
    """`Ending` says that the interpreter shuts down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised(Notice):
    """`Raised` tells of an exception; ``is_final`` if it ends the process."""

    exception: dict[str, str | None]
    is_final: bool
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsPerStep(Notice):
    """`FlopsPerStep` is the script's word on what a step of the whole job computes."""

    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionLimits(Notice):
    """`SectionLimits` are the script's own limits, in seconds; None: none."""

    first_heartbeat_s: float | None
    heartbeat_s: float | None
    out_of_section_s: float | None
    sections_s: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOverdue(Notice):
    """`SectionOverdue` says that a section is open for longer than its limit."""

    section: str
    open_s: float
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlWanted(Notice):
    """`ControlWanted` is an action for which the script asks through its RankMonitorClient."""

    action: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken(Notice):
    """`StateTaken` says that ``bytes_taken`` of state came within ``took_s`` from ``sources``."""

    bytes_taken: int
    took_s: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Notice):
    """`Restored` says from which step a script goes on that has asked for a state kept before, and what was taken."""

    step: int
    sentence: str
    bytes_taken: int = 0
    took_s: float = 0.0
    sources: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(Notice):
    """`Saving` answers the agent that asks for a snapshot: whether one will be made when the present step ends."""

    will_save: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered(Notice):
    """`Entered` says that the script trains in steps(), as a member of worlds.

    ``replica_size`` is how many processes of its node make one replica with it: they are lost together.
    """

    replica_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Notice):
    """`Ready` says that a newcomer has the state of step ``state``."""

    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Notice):
    """`Left` says that this rank is no member of any world any more, and connected with nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broke(Notice):
    """`Broke` says that the connections of this world are broken, for this ``error``.

    ``outlives_joins``: what goes on in it goes on when others join; else it ends with any newer world.
    """

    world: int
    error: str
    outlives_joins: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WentOn(Notice):
    """`WentOn` says that a step was made in this world, of micro-batches that were computed before or again."""

    world: int
    reused: int
    recomputed: int
    regrouped_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted(Notice):
    """`Parted` says that all steps are made, up to ``total``; ``world`` is where all parted, if they did together."""

    world: int | None = None
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Notice):
    """`Served` says at which ``address`` a newcomer finds this replica's state; None: it cannot serve it."""

    newcomer: int
    address: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotMade(Notice):
    """`SnapshotMade` says that a snapshot is whole in the file of this ``slot``, which comes along when it is new."""

    slot: int
    is_for_peer: bool
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsWanted(Notice):
    """`SnapshotsWanted` asks for the snapshots from which this rank could go on."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """`GroupCounts` are the collectives of one process group; ``ended`` is None where its back end does not count."""

    name: str
    begun: int
    ended: int | None
    op: str = ""  # what the main thread waits in there, if that is known: "all_reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position(Notice):
    """`Position` answers a ``question``: how far this worker has come in each process group, the whole job's first."""

    question: int
    groups: tuple[GroupCounts, ...]
    uses_gpu: bool
    is_at_prompt: bool  # of a debugger or a console


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestCollectives(Notice):
    """`LatestCollectives` answers when this worker began its collectives: number ``first`` and those after it.

    Times are microseconds of CLOCK_REALTIME, which all workers of a host share: the first is absolute, the others count
    from it; none where nothing is recorded. ``ops`` are the operations' names, and ``op`` says which of them each
    collective was, unless there is only one.
    """

    first: int = 0
    at_us: tuple[int, ...] = ()
    ops: tuple[str, ...] = ()
    op: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported(Notice):
    """`Imported` says what a worker has imported since its start: {name: file}.

    ``changed``: the variables that had changed by its first process group, and their values. ``seeded_before``: the
    first module whose import began after the script had seeded Python's random numbers, "" for none; None: it had not.
    ``after_group``: the first module whose import began when there was a process group; None: there is none. The
    variables ``changed_since`` have changed after that. ``has_other_type``: torch's default type is not float32.
    """

    modules: dict[str, str]
    changed: dict[str, str | None]
    seeded_before: str | None = None
    after_group: str | None = None
    changed_since: tuple[str, ...] = ()
    has_other_type: bool = False


NOTICES: tuple[type[Notice], ...] = (
    *(FirstStep, Ending, Raised, FlopsPerStep, SectionLimits, SectionOverdue, ControlWanted),
    *(StateTaken, Restored, Saving, Entered, Ready, Left, Broke, WentOn, Parted, Served),
    *(SnapshotMade, SnapshotsWanted, Position, LatestCollectives, Imported),
)
