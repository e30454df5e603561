"""The launcher's part of a hold: it takes up the keeper and the warm process of the job before, or says why not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import unicron_elastic
from unicron_elastic.launcher.agent.held.meeting_place import MeetingPlace, peer
from unicron_elastic.worker.channel import Channel, ChannelClosed, close_all
from unicron_elastic.worker.helper_tasks import (
    Forgotten,
    HeldWarm,
    HelperAnswer,
    HelperReady,
    Learned,
    TakeStderr,
    TakeUp,
    Unfit,
)
from unicron_elastic.worker.message import Odd

DEADLINE_S = 2.0
_SILENT = "it does not answer"


class Declined(Exception):
    """`Declined` says, as a clause, why what is held is not used."""

    def __init__(self, why: str, since: float | None = None) -> None:
        super().__init__(why)
        self.since = since  # seconds of the wall clock, if it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """`Taken` is what was taken up: a keeper and its warm process, with the agent's ends of their channels."""

    keeper: Channel
    keeper_pid: int
    warm: Channel
    warm_pid: int
    since: float
    has_learned: bool


def take_up(folder: int, asked: TakeUp, code: str, deadline_s: float = DEADLINE_S) -> Taken | None:
    """Return what waits in this folder, if it serves what is ``asked``; None if nothing waits there.

    What is not used ends. Raises Declined.
    """
    end = time.monotonic() + deadline_s
    with contextlib.ExitStack() as channels:
        try:
            sock = MeetingPlace(folder).connect(deadline_s)
        except OSError:
            raise Declined(_SILENT) from None
        if sock is None:
            return None
        keeper = Channel(sock)
        channels.callback(keeper.close)
        pid, user = peer(sock)
        if user != os.geteuid():
            raise Declined(f"it belongs to the user {user}")
        held = _hear(keeper, [HeldWarm, Unfit], end)
        if not isinstance(held, HeldWarm):
            raise Declined(held.reason if isinstance(held, Unfit) else _SILENT)
        warm = _channel_of(held)
        channels.callback(warm.close)
        if held.code != code:
            raise Declined("unicron-elastic has changed", held.since)
        has_learned = _ask(warm, asked, end, held)
        keeper.settimeout(None)
        warm.settimeout(None)
        try:
            keeper.send(TakeStderr(fds=(2,)))
        except ChannelClosed:
            raise Declined("it has ended") from None
        channels.pop_all()
        return Taken(
            keeper=keeper,
            keeper_pid=pid,
            warm=warm,
            warm_pid=held.warm,
            since=held.since,
            has_learned=has_learned,
        )


def code_stamp() -> str:
    """Return what is another text once a file of ours has changed: a held keeper runs what there was."""
    digest = hashlib.sha256()
    for path in sorted(_files_of(Path(unicron_elastic.__file__).parent)):
        found = os.stat(path)
        digest.update(f"{path} {found.st_ino} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files_of(folder: Path) -> Iterator[str]:
    for where, _, names in os.walk(folder, followlinks=True):
        yield from (os.path.join(where, name) for name in names if name.endswith(".py"))


def _channel_of(held: HeldWarm) -> Channel:
    with contextlib.suppress(OSError):
        if len(held.fds) == 1:
            return Channel.from_fd(held.fds[0])
    close_all(held.fds)
    raise Declined("it offers no warm process", held.since)


def _ask(warm: Channel, asked: TakeUp, end: float, held: HeldWarm) -> bool:
    """Whether it has learned what workers import, once it says that it can be forked from."""
    has_learned = held.has_learned
    try:
        warm.settimeout(max(0.001, end - time.monotonic()))
        warm.send(asked)
    except TimeoutError:
        raise Declined(_SILENT, held.since) from None
    except ChannelClosed:
        raise Declined("it has ended", held.since) from None
    while True:
        match _hear(warm, [HelperReady, Unfit, Learned, Forgotten], end):
            case HelperReady():
                return has_learned
            case Unfit(reason=reason):
                raise Declined(reason, held.since)
            case Forgotten():
                has_learned = False
            case _:
                has_learned = True


def _hear(channel: Channel, kinds: Sequence[type[HelperAnswer]], end: float) -> HelperAnswer:
    channel.settimeout(max(0.001, end - time.monotonic()))
    try:
        said = channel.hear(kinds)
    except TimeoutError:
        raise Declined(_SILENT) from None
    except (ChannelClosed, OSError):
        raise Declined("it has ended, or another launch has taken it up") from None
    if isinstance(said, Odd):
        raise Declined(f"what it says is not known: {said.why}")
    return said
