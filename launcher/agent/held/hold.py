"""The keeper's part of a hold: it waits, with a warm process, for the next launch."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time

from unicron_elastic.launcher.agent.held.meeting_place import MeetingPlace, peer
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.helper_tasks import HeldWarm, HelperReady, Hold, Unfit
from unicron_elastic.worker.process.standing import walls, why_elsewhere

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
            ready = select.select([listener.fileno(), pidfd], [], [], min(left, threading.TIMEOUT_MAX))[0]
            if pidfd in ready:
                return None
            if ready and (sock := place.accept()) is not None:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                return _greeted(sock, held)
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


def _why_not_to(launcher: int) -> str | None:
    try:
        return why_elsewhere(walls(os.getpid()), walls(launcher))
    except OSError as error:
        return f"where this launch runs cannot be seen: {error.strerror}"


def _greeted(sock: socket.socket, held: HeldWarm) -> Channel | None:
    """Tell who has come what is held. The launcher looks at more; but one in a container must not come out of it."""
    channel = Channel(sock)
    channel.settimeout(_TOLD_WITHIN_S)
    try:
        why = _why_not_to(peer(sock)[0])
        channel.send(held if why is None else Unfit(reason=why))
        if why is not None:
            channel.close()
            return None
    except (ChannelClosed, OSError):
        channel.close()
        return None
    channel.settimeout(None)
    return channel
