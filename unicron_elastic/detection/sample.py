"""What the caller saw of its ranks at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.detection.arrivals import Arrivals, Beats

TRAIN = "train"  # the phase of a worker that says nothing
SPARE = "spare"  # of one that waits until there is a place for it, while others train
MEET = "meet"  # of one that waits for all others, who are to train with it in a new world


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """How far a rank has come in one process group; ``ended`` is None where the back end does not tell."""

    name: str
    begun: int
    ended: int | None
    op: str = ""  # what it waits in there, if that is known: "all_reduce"

    @property
    def waits(self) -> bool | None:
        """Whether the latest collective has not ended; None if that is not known."""
        return None if self.ended is None else self.begun > self.ended


def waits(groups: tuple[GroupPosition, ...]) -> bool | None:
    """Whether in some group the latest collective has not ended; None if that is not known."""
    found = [group.waits for group in groups]
    return None if not found or None in found else any(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """One rank. Times are monotonic seconds of this host. What is not known is None.

    The first fields come from the worker's pulse page and from its CPU clock, which cost about a microsecond, and are
    wanted at every look. Those of the last group cost a read of /proc or a call of the driver, and are wanted only
    when ``needs_evidence`` says so; ``stopped`` also of a rank without a step for the policy's ``stopped_s``. "The
    worker" includes its descendants: data loaders and compilers work for it.
    """

    rank: int
    step: int | None = None  # optimizer steps done since the worker started
    step_at: float | None = None  # end of the latest step
    step_time_s: float | None = None  # duration of the latest step
    phase: str = TRAIN
    phase_since: float | None = None
    phase_limit_s: float | None = None  # what the script itself says that the phase may take
    cpu_time_s: float | None = None  # of the worker, cumulative
    collective: int | None = None  # collectives begun, counted alike on all ranks of the sample
    waiting: bool | None = None  # whether that collective has not ended

    stopped: bool = False  # state T
    silent: bool = False  # asked which collectives it has begun, it does not answer: its interpreter does not run
    runnable: bool | None = None  # some thread of the worker runs or waits for a CPU (state R)
    in_io: bool | None = None  # some thread waits for a disk, a network file system or a driver (state D)
    uses_gpu: bool = False  # then a collective may wait for a long computation
    gpu_utilisation: float | None = None  # 0 to 1
    person: str = ""  # at what it waits for a person: "debugger", "terminal"
    groups: tuple[GroupPosition, ...] = ()  # the whole job's first; none if they are not known
    arrivals: Arrivals | None = None  # in the whole job's collectives, when ``needs_arrivals``; None: no answer yet
    beats: Beats | None = None  # the same of its steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRank:
    """One rank of another node, by that node's word. Its times are of another clock, and left out."""

    node: str
    seen: RankSample
    # What it was doing between the latest two reports, as words that follow "it"; "": nothing; None: there was one.
    working: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All ranks that the caller watches, at one moment; a rank that has ended is left out.

    ``elsewhere`` is either empty or holds all other ranks of the job, as they were a moment ago.
    """

    at: float
    ranks: tuple[RankSample, ...]
    remote_ranks: tuple[RemoteRank, ...] = ()

    @property
    def everybody(self) -> tuple[RankSample, ...]:
        """The ranks here and elsewhere."""
        return (*self.ranks, *(rank.seen for rank in self.remote_ranks)) if self.remote_ranks else self.ranks
