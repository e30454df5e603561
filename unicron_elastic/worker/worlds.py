"""The worker's part in the worlds of its job: what the agent says of them reaches the training loop.

The thread that answers the agent's questions also hears of new worlds. Where one ends what goes on in the world
before, it breaks the collectives of that at once, so that whoever waits in one goes on to the new world; the training
loop looks here whenever it may change.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unicron_elastic.base.world import World
from unicron_elastic.worker.channel import close_all
from unicron_elastic.worker.collectives.broken import break_collectives
from unicron_elastic.worker.collectives.stuck import end_if_stuck
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.instructions import (
    BePatient,
    FixedWorld,
    FreeToStop,
    Instruction,
    Invitation,
    MakeSnapshot,
    NewWorld,
    ServeState,
    SnapshotOffers,
)
from unicron_elastic.worker.notices import Notice, Saving, Served

Answer = TypeVar("Answer", bound=Instruction)


class Link:
    """Speaks with the agent about worlds; used by the training loop and by the thread that hears the agent."""

    def __init__(self, control: Control, listen: Callable[[], None]) -> None:
        self._control = control
        self._listen = listen
        self._changed = threading.Condition()
        self._world: World | None = None
        self._adopted: World | None = None
        self._words: dict[type[Instruction], Instruction] = {}
        self._why_freed = ""  # from what it waits for, as it was sent SIGTERM; "" while it was not
        self.on_serve: Callable[[str], dict[str, Any]] | None = (
            None  # begins to serve this replica's state; returns where
        )
        self.on_save: Callable[[], bool] | None = (
            None  # whether a snapshot will be made when the present step has ended
        )
        self.joins_end = False  # whether a world in which others have joined ends what goes on in the one before
        self.must_break: Callable[[World], bool] = self._ends_adopted  # a newer world, what goes on in the one before
        self.name = ""  # of this member
        self.patience_s = 0.0  # of the agent, which may wait as long for its store before it can decide

    # -- from the training loop ---------------------------------------------------------------------------------------

    def say(self, said: Notice) -> None:
        """Tells the agent. Raises ChannelClosed, TimeoutError or OSError if it cannot hear."""
        self._listen()
        self._control.send(said)

    def ask(
        self, said: Notice, answers: Sequence[type[Answer]], timeout_s: float, *, is_agreed_on: bool = False
    ) -> Answer:
        """Says this and waits for one of these ``answers``.

        ``is_agreed_on``: by all agents, for which this one may need its patience. Raises TimeoutError, RuntimeError if
        this process is to stop, and what ``say`` raises.
        """
        with self._changed:
            for kind in answers:
                self._drop(kind)
        self.say(said)
        asked_at = time.monotonic()
        with self._changed:
            while True:
                patience_s = max(timeout_s, self.patience_s) if is_agreed_on else timeout_s
                for kind in answers:
                    if isinstance(answer := self._words.pop(kind, None), kind):
                        return answer
                self._look_whether_freed()
                if not self._changed.wait(asked_at + patience_s - time.monotonic()):
                    raise TimeoutError(f"the agent did not answer within {patience_s:g} s")

    def newer_than(self, number: int) -> tuple[World, int | None] | None:
        """Return the newest world of which the agent told, and this process's rank there, if it is after this one."""
        if not self._has_newer(number):
            return None
        with self._changed:  # a world and the name in it come together
            assert self._world is not None
            return self._world, self._world.rank_of(self.name)

    def is_newer(self, number: int) -> bool:
        """Tell who waits for it whether there is a world after this one. Raises RuntimeError if it is to stop."""
        self._look_whether_freed()
        return self._has_newer(number)

    def _has_newer(self, number: int) -> bool:
        world = self._world
        return world is not None and world.number > number

    def _look_whether_freed(self) -> None:
        if self._why_freed:
            raise RuntimeError(f"this rank waits for the others no longer: {self._why_freed}")

    def is_left(self) -> bool:
        """Whether what went on in the adopted world has ended with a newer one: a member is gone, say."""
        world = self._world
        return world is not None and self._ends_adopted(world)

    def wait_for_newer(self, number: int, timeout_s: float) -> bool:
        """Waits for a world after this one; false if none came in time. Raises RuntimeError as ``is_newer``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_newer(number), timeout_s)

    def adopt(self, number: int | None = None) -> World | None:
        """The newest world; its connections are not broken for having come. There must be one.

        None if it is after the one of this ``number``, if that is wanted: then nothing is adopted.
        """
        with self._changed:  # the hearing thread may be breaking those of the world before
            assert self._world is not None
            if number is not None and self._world.number > number:
                return None
            self._adopted = self._world
            return self._world

    # -- from the thread that hears the agent -------------------------------------------------------------------------

    def heard(self, instruction: Instruction) -> None:
        """Takes what the agent said. Raises ChannelClosed or OSError if it does not hear the answer."""
        match instruction:
            case NewWorld():
                self._hear_world(instruction)
            case FreeToStop(reason=reason):
                self._free(reason)
            case Invitation() | FixedWorld() | SnapshotOffers():
                self._keep(instruction)
            case ServeState():
                self._serve(instruction)
            case MakeSnapshot():
                self._control.send(Saving(will_save=self.on_save is not None and self.on_save()))
            case BePatient(patience_s=patience_s):
                self._be_patient(patience_s)

    def _hear_world(self, instruction: NewWorld) -> None:
        world = instruction.world
        with self._changed:
            if not self._has_newer(world.number - 1):  # else it is told once more
                self._world, self.name = world, instruction.name
                if self._adopted is not None and self.must_break(world):
                    break_collectives(world.reason, is_quiet=True)
                    end_if_stuck(lambda: self._has_adopted(world), world.reason)
            self._keep(instruction)

    def _ends_adopted(self, world: World) -> bool:
        if self._adopted is None:
            return False
        return world.breaks(self._adopted) or (self.joins_end and world.number > self._adopted.number)

    def _has_adopted(self, world: World) -> bool:
        return self._adopted is not None and self._adopted.number >= world.number

    def _free(self, reason: str) -> None:
        with self._changed:
            self._why_freed = reason
            self._changed.notify_all()

    def _be_patient(self, patience_s: float) -> None:
        with self._changed:
            self.patience_s = patience_s
            self._changed.notify_all()

    def _keep(self, instruction: Instruction) -> None:
        with self._changed:
            self._drop(type(instruction))
            self._words[type(instruction)] = instruction
            self._changed.notify_all()

    def _drop(self, kind: type[Instruction]) -> None:
        """Forget the latest word of this kind, if nobody has taken it."""
        if (word := self._words.pop(kind, None)) is not None:
            close_all(word.fds)

    def _serve(self, instruction: ServeState) -> None:
        address = None
        if self.on_serve is not None:
            with contextlib.suppress(Exception):  # another replica may serve
                address = self.on_serve(instruction.key)
        self._control.send(Served(newcomer=instruction.newcomer, address=address))


_links: list[Link] = []


def offer(control: Control, listen: Callable[[], None]) -> None:
    """Lets the training loop of this process speak with the agent; ``listen`` begins to hear it."""
    _links[:] = [Link(control, listen)]


def link() -> Link | None:
    """The way to the agent; None if this process was not started by one."""
    return _links[0] if _links else None


def hear(instruction: Instruction) -> None:
    """Takes what the agent said to the training loop. Raises ChannelClosed or OSError as ``Link.heard``."""
    if (found := link()) is not None:
        found.heard(instruction)
    else:
        close_all(instruction.fds)
