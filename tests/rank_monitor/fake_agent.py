"""A worker's page and channel, read as the agent reads them, and a clock that tests set."""

from __future__ import annotations

import os
from typing import Any

from unicron_elastic.worker import phases
from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.link import AGENT
from unicron_elastic.worker.pulse import TRAIN, Pulse, PulsePage, PulseReading
from unicron_elastic.worker.rank_monitor.client import RankMonitorClient


class Agent:
    """The agent's ends of both."""

    def __init__(self) -> None:
        self._page = PulsePage()
        self._channel, theirs = Channel.pair()
        self._channel.settimeout(0.0)
        self.control = Control(os.dup(theirs.fileno()))
        theirs.close()
        self.pulse = Pulse(os.dup(self._page.fd))
        phases._announcer.pulse = self.pulse
        AGENT.connect(self.control, self.pulse)

    def read(self) -> PulseReading:
        """What the page says."""
        reading = self._page.read()
        assert reading is not None
        return reading

    @property
    def phase(self) -> str:
        return self.read().phase

    def heard(self) -> list[dict[str, Any]]:
        """What was said since the last time."""
        messages = []
        while True:
            try:
                messages.append(self._channel.receive()[0])
            except BlockingIOError:
                return messages

    def end(self) -> None:
        AGENT.connect(None, None)
        phases._announcer.pulse, phases._announcer.present = None, TRAIN
        self.control.close()
        self._channel.close()
        self._page.close()


class Clock:
    """Monotonic seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


def in_section(client: RankMonitorClient, clock: Clock, name: str, seconds: float) -> None:
    """The script is in a section for so long."""
    client.start_section(name)
    clock.wait(seconds)
    client.end_section(name)
