"""What an agent wants of its helpers, the keeper and the warm process, and what they answer: see `message`."""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.worker.message import Descriptors, Message


class HelperTask(Message):
    """`HelperTask` is anything that an agent wants of a helper; its ``number`` is repeated in the answer."""


class HelperAnswer(Message):
    """`HelperAnswer` is anything that a helper tells its agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess(HelperTask):
    """`StartProcess` has the keeper start a program; ``targets`` are the numbers that its ``fds`` have there."""

    number: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    targets: tuple[int, ...]
    ignored_signals: tuple[int, ...]
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepAll(HelperTask):
    """`SweepAll` has the keeper end all that workers have left behind; these processes stay."""

    number: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearAfter(HelperTask):
    """`ClearAfter` has the keeper end all that one worker has left, by its pid and the mark that it bore."""

    number: int
    worker: int
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember(HelperTask):
    """`Remember` says what the keeper clears away when the agent is gone.

    Carriers of the ``token``, temporary ``paths``, and what the ``farewell`` undoes on the terminal.
    """

    token: str = ""
    paths: tuple[str, ...] = ()
    farewell: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`Launch` is what a warm process is begun for, with all that its workers have of it from their start.

    ``standing`` is as in `unicron_elastic.worker.process.standing`, ``streams`` are the kinds of the standard streams.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    preload: str
    streams: tuple[str, ...]
    standing: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp(HelperTask):
    """`WarmUp` tells a new warm process what it should have become; ``sets``: variables that the script sets itself."""

    launch: Launch
    sets: tuple[str, ...]
    may_be_held: bool = False  # when the job has ended, for the next launch


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeUp(HelperTask):
    """`TakeUp` asks a warm process, held since its job ended, to serve another launch, and to bear this mark."""

    launch: Launch
    sets: tuple[str, ...]
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(HelperTask):
    """`Hold` has the keeper wait, with the ``warm`` process alone, for the next launch, and let its agent go.

    Its ``fds`` are the folder in which to wait, and the agent's end of the warm process's channel. ``code`` is what
    the files of ours are, by which the next launcher knows whether it has the same.
    """

    for_s: float
    warm: int
    code: str
    has_learned: bool
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStderr(HelperTask):
    """`TakeStderr` gives a keeper that was held the standard error of its new agent, ``fds``."""

    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorker(HelperTask):
    """`ForkWorker` has the warm process fork a worker, a child of the ``keeper``.

    Its ``fds`` are the control socket, the pulse page, and one for each of the ``streams``.
    """

    number: int
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    streams: tuple[int, ...]
    ignored_signals: tuple[int, ...]
    keeper: int
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Learn(HelperTask):
    """`Learn` has the warm process import what a worker has imported, {name: file}, for those that it will fork.

    ``env`` is that worker's, ``varying`` are the variables that are not for all workers, or not for ever, what they are
    in the warm process. The others are as in `Imported`.
    """

    modules: dict[str, str]
    env: dict[str, str]
    varying: tuple[str, ...]
    changed: dict[str, str | None]
    seeded_before: str | None
    after_group: str | None
    changed_since: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperReady(HelperAnswer):
    """`HelperReady` ends the silence of a helper that begins: it can be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit(HelperAnswer):
    """`Unfit` says why no worker can be forked from the warm process, which ends, with its keeper if that says it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLearned:
    """`NotLearned` says why a module is left to the workers."""

    module: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(HelperAnswer):
    """`Learned` ends a `Learn`: workers find so many ``modules`` imported, in so much more memory that they share."""

    modules: int = 0
    grown_bytes: int = 0
    left_out: tuple[NotLearned, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten(HelperAnswer):
    """`Forgotten` says why what was learned is not used any more; it may be learned anew."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldWarm(HelperAnswer):
    """`HeldWarm` is a held keeper's first word to the next launcher; ``fds`` is the channel of its warm process."""

    since: float  # seconds of the wall clock
    warm: int
    code: str
    has_learned: bool
    fds: Descriptors = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted(HelperAnswer):
    """`ProcessStarted` answers a request for a process; where it could not be started there is an ``errno``."""

    number: int
    pid: int = 0
    errno: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded(HelperAnswer):
    """`ProcessEnded` tells how any process that the keeper had to collect has ended; a negative code is a signal."""

    pid: int
    exit_code: int
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept(HelperAnswer):
    """`Swept` says that nothing is left of what was to be cleared away."""

    number: int


KEEPER_TASKS: tuple[type[HelperTask], ...] = (StartProcess, SweepAll, ClearAfter, Remember, Hold, TakeStderr)
KEEPER_ANSWERS: tuple[type[HelperAnswer], ...] = (HelperReady, ProcessStarted, ProcessEnded, Swept, HeldWarm, Unfit)
WARM_TASKS: tuple[type[HelperTask], ...] = (WarmUp, ForkWorker, Learn, TakeUp)
WARM_ANSWERS: tuple[type[HelperAnswer], ...] = (HelperReady, Unfit, ProcessStarted, Learned, Forgotten)
