"""The agent's side of the worlds of its job: makes the next one, tells its members, invites newcomers."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore

from unicron_elastic.launcher.workers import WorkerProcess, WorkersContext
from unicron_elastic.recovery.commands import ChangeWorld, InviteMember, TellWorld
from unicron_elastic.recovery.events import Event, WorldChanged
from unicron_elastic.worker.channel import ChannelClosed, Message
from unicron_elastic.world import World

__all__ = ["Worlds"]


class Worlds:
    """Of one agent. ``post`` takes events."""

    def __init__(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._store: Any = None  # where members meet; it outlives them all
        self._key = secrets.token_hex(32)  # with which state is asked for
        self._generation = 0
        self._number = 0  # of the newest world; it grows from one generation to the next
        self._world: World | None = None
        self._context: WorkersContext | None = None
        self._sources: dict[int, list[int]] = {}  # by newcomer: who else could serve it

    def begin(self, generation: int, context: WorkersContext) -> None:
        """Forgets the world of the generation before."""
        self._generation, self._context = generation, context
        self._world = None
        self._sources = {}

    def do(self, command: TellWorld | InviteMember) -> None:
        """What the state machine decided."""
        match command:
            case TellWorld():
                self._tell(command.local_rank)
            case InviteMember():
                self._sources[command.local_rank] = list(command.sources)
                self._ask_next(command.local_rank)

    def serving(self, message: Message) -> None:
        """A member serves its state to a newcomer, or cannot."""
        newcomer = message.get("for")
        if not isinstance(newcomer, int) or newcomer not in self._sources:
            return
        if isinstance(message["serving"], dict):
            self._say(newcomer, {"join": {"sources": [message["serving"]], "key": self._key}})
        else:
            self._ask_next(newcomer)

    def change(self, command: ChangeWorld) -> None:
        """Makes the next world."""
        if self._world is None:
            world = World(number=self._number + 1, members=command.joined, store=self._address(), reason="")
        else:
            world = self._world.after(
                store=self._address(), reason=command.reason, lost=command.lost, joined=command.joined
            )
        self._world, self._number = world, world.number
        self._post(WorldChanged(at=time.monotonic(), world=world, generation=self._generation))

    def _address(self) -> str:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return f"127.0.0.1:{self._store.port}"

    def _tell(self, local_rank: int) -> None:
        assert self._world is not None
        name = next(member.name for member in self._world.members if member.local_rank == local_rank)
        self._say(local_rank, {"world": self._world.to_message(), "you": name})

    def _ask_next(self, newcomer: int) -> None:
        """Asks the next source; when there is none, the newcomer asks again after a while."""
        sources = self._sources.get(newcomer, [])
        if sources:
            self._say(sources.pop(0), {"serve": newcomer, "key": self._key})

    def _say(self, local_rank: int, message: Message) -> None:
        worker = self._workers().get(local_rank)
        if worker is not None and worker.control is not None:
            with contextlib.suppress(ChannelClosed, OSError):
                worker.control.send(message)

    def _workers(self) -> dict[int, WorkerProcess]:
        return self._context.workers if self._context is not None else {}
