"""What an agent tells its workers, one class a message: see `message`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unicron_elastic.base.world import World
from unicron_elastic.worker.message import Descriptors, Message


class Instruction(Message):
    """`Instruction` is anything that an agent tells a worker: a question, a wish, or news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPosition(Instruction):
    """`AskPosition` asks how far the worker has come in its collectives; ``question`` is repeated in the answer."""

    question: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskCollectives(Instruction):
    """`AskCollectives` asks when the worker began its latest collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskImported(Instruction):
    """`AskImported` asks what the worker has imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectBreaks(Instruction):
    """`ExpectBreaks` says that connections will break, as a node departs: that is no failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeToStop(Instruction):
    """`FreeToStop` lets a worker that was sent SIGTERM leave the others for whom it waits, for this ``reason``."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeSnapshot(Instruction):
    """`MakeSnapshot` wishes for a snapshot at the end of the present step, as the job is to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeState(Instruction):
    """`ServeState` has a member serve its state to a newcomer, which shows this ``key``."""

    newcomer: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation(Instruction):
    """`Invitation` tells a newcomer where it gets the state, with this ``key``; no sources: nobody gives it now."""

    sources: tuple[dict[str, Any], ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedWorld(Instruction):
    """`FixedWorld` says that worlds do not change here, since the agents have no store in which they could agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BePatient(Instruction):
    """`BePatient` says how long the agents may wait for their store before they agree, and workers with them."""

    patience_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWorld(Instruction):
    """`NewWorld` says who trains together from now on; ``name`` is what this worker is called there."""

    world: World
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSnapshot:
    """`RemoteSnapshot` is one in the memory of another node's agent, which gives it to who shows the ``key``."""

    header: dict[str, Any]
    address: dict[str, Any]
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOffers(Instruction):
    """`SnapshotOffers` answers which snapshots there are: files of this node, and where other nodes have more.

    ``slots`` say of each file which of this worker's own it is; None: it is another's. ``is_restart``: workers of this
    job had begun on this node before. ``is_replacement``: those who train have the state.
    """

    slots: tuple[int | None, ...] = ()
    remote: tuple[RemoteSnapshot, ...] = ()
    is_restart: bool = False
    is_replacement: bool = False
    fds: Descriptors = ()


INSTRUCTIONS: tuple[type[Instruction], ...] = (
    *(AskPosition, AskCollectives, ExpectBreaks, FreeToStop, MakeSnapshot, ServeState, Invitation, FixedWorld),
    *(BePatient, NewWorld, SnapshotOffers, AskImported),
)
