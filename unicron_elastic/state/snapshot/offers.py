"""The snapshots that the agent of this node offers a worker: files that it kept, and where other nodes have more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unicron_elastic.state.layout import Layout
from unicron_elastic.state.pull.client import SourcesLost, pull
from unicron_elastic.state.snapshot.file import SnapshotFile, read_header
from unicron_elastic.state.snapshot.header import Header
from unicron_elastic.worker.channel import close_all
from unicron_elastic.worker.instructions import SnapshotOffers

PULL_TIMEOUT_S = 300.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Local:
    """In the memory of this host."""

    header: Header
    file: SnapshotFile
    where: str = "the memory of their hosts"

    def read(self) -> tuple[Layout, list[Tensor]]:
        """The state. Raises ValueError if it is not what was written."""
        _, layout, tensors = self.file.read()
        return layout, tensors


@dataclass(frozen=True)
class Remote:
    """In the memory of another node's agent."""

    header: Header
    address: Mapping[str, Any]
    key: str
    where: str = "the memory of a neighbouring node"

    def read(self) -> tuple[Layout, list[Tensor]]:
        """The state. Raises ValueError or OSError if it cannot be had."""
        file = SnapshotFile.create()
        try:
            pull_into(file, self.header, self.address, self.key)
            _, layout, tensors = file.read()
            return layout, tensors
        finally:
            file.close()


def pull_into(file: SnapshotFile, header: Header, address: Mapping[str, Any], key: str) -> None:
    """Copies the snapshot with this header from a server. Raises ValueError or OSError if it cannot be had."""
    file.clear()
    block = file.block(header.total_bytes)
    try:
        pulled = pull([address], bytes.fromhex(key), step=header.step, timeout_s=PULL_TIMEOUT_S, into=[block])
    except (SourcesLost, TimeoutError) as error:
        raise OSError(f"the snapshot of step {header.step} could not be copied: {error}") from None
    pulled.release()
    if file.header() != header:
        file.clear()
        raise ValueError(f"another snapshot came instead of the one of step {header.step}")


@dataclass
class Offers:
    """``own``: the files of this place on this node, by number. ``found``: all that may be gone on from, near first.

    ``is_restart``: workers of this job had begun on this node before.
    """

    own: dict[int, SnapshotFile]
    found: list[Local | Remote]
    is_replacement: bool = False
    is_restart: bool = False

    def reached(self) -> int:
        """Returns the step that the workers of this place had come to, as far as their files say; else 0."""
        return max((file.reached() for file in self.own.values()), default=0)

    def close_others(self) -> None:
        """Gives back the files that are not of this place."""
        for each in self.found:
            if isinstance(each, Local) and each.file not in self.own.values():
                each.file.close()

    @classmethod
    def nothing(cls) -> Offers:
        """Without an agent."""
        return cls({}, [])

    @classmethod
    def of(cls, told: SnapshotOffers) -> Offers:
        """Return what the agent said, with the descriptors that came with it."""
        offers = cls({}, [], told.is_replacement, told.is_restart)
        close_all(told.fds[len(told.slots) :])
        for fd, slot in zip(told.fds, told.slots, strict=False):
            try:
                file = SnapshotFile(fd)
            except ValueError:
                close_all([fd])
                continue
            if slot is not None:
                offers.own[slot] = file
            with suppress(ValueError):
                offers.found.append(Local(read_header(fd), file))
        for each in told.remote:
            try:
                offers.found.append(Remote(Header.from_message(each.header), each.address, each.key))
            except ValueError as error:
                logger.warning("A snapshot that another node offers is left out: %s.", error)
        return offers
