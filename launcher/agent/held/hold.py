"""The keeper's part of a hold: it waits, with a warm process, for the next launch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from unicron_elastic.launcher.agent.held.meeting_place import MeetingPlace
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.helper_tasks import HeldWarm, HelperReady, Hold

_TOLD_WITHIN_S = 1.0


def hold(task: Hold, agent: Channel) -> Channel | None:
    """Let the agent go, and return the channel to the next one; None if nobody comes, or the warm process has ended.

    Raises OSError if that cannot be waited for.
    """
    folder, warm = task.fds
    place = MeetingPlace(folder)
    pidfd = os.pidfd_open(task.warm)
    try:
        listener = place.listen()
        _let_go()
        held = HeldWarm(since=time.time(), warm=task.warm, code=task.code, has_learned=task.has_learned, fds=(warm,))
        with contextlib.suppress(ChannelClosed):
            agent.send(HelperReady())
        agent.close()
        end = time.monotonic() + task.for_s
        while (left := end - time.monotonic()) > 0:
            ready = select.select([listener.fileno(), pidfd], [], [], left)[0]
            if pidfd in ready:
                return None
            if ready and (sock := place.accept()) is not None:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                return _greeted(Channel(sock), held)
        return None
    finally:
        place.leave()
        os.close(pidfd)


def _let_go() -> None:
    """Keep nothing that was the agent's, and end when told to."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
    os.chdir("/")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _greeted(channel: Channel, held: HeldWarm) -> Channel | None:
    channel.settimeout(_TOLD_WITHIN_S)
    try:
        channel.send(held)
    except (ChannelClosed, OSError):
        channel.close()
        return None
    channel.settimeout(None)
    return channel
