"""Who is near: the order in which the sources of a state are asked, and the parts with which each begins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

TEXT_CHARACTERS_MAX = 300
KINDS = ("replica", "snapshot")


class Distance(IntEnum):
    """How far away a source is, from near to far."""

    SAME_HOST = 0  # a live replica whose memory can be read
    SNAPSHOT = 1  # what this host's agent keeps in memory
    SAME_RACK = 2
    OTHER_HOST = 3


@dataclass(frozen=True, slots=True)
class Address:
    """Where a source is and how it is reached.

    ``boot_id`` is the kernel's, so that equal host names of two machines are not taken for one. ``unix`` is an abstract
    name. ``rack`` is the operator's label, empty if there is none. ``kind`` is "replica" or "snapshot".
    """

    host: str
    boot_id: str
    pid: int
    tcp: tuple[str, int]
    unix: str
    rack: str = ""
    kind: str = "replica"

    @property
    def name(self) -> str:
        """What the source is called in messages."""
        return f"{self.host} (process {self.pid})"

    def to_dict(self) -> dict[str, Any]:
        """The address as values that JSON has."""
        return {
            "host": self.host, "boot_id": self.boot_id, "pid": self.pid, "tcp": list(self.tcp), "unix": self.unix,
            "rack": self.rack, "kind": self.kind,
        }  # fmt: skip

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Address:
        """The address in ``told``. Raises ValueError that names what is wrong with it."""
        if not isinstance(told, Mapping):
            raise ValueError("the address of a state server is a JSON object")
        texts = {name: told.get(name) for name in ("host", "boot_id", "unix", "rack", "kind")}
        for name, text in texts.items():
            if not isinstance(text, str) or len(text) > TEXT_CHARACTERS_MAX or "\0" in text:
                raise ValueError(f"the address of a state server needs {name}, a text of up to {TEXT_CHARACTERS_MAX}")
        pid, tcp = told.get("pid"), told.get("tcp")
        if type(pid) is not int or not 0 < pid < 2**31:
            raise ValueError("the address of a state server needs pid, the number of a process")
        if not isinstance(tcp, list | tuple) or len(tcp) != 2 or not isinstance(tcp[0], str):
            raise ValueError("the address of a state server needs tcp, a list of a host and a port")
        if type(tcp[1]) is not int or not 0 < tcp[1] < 65536 or not 0 < len(tcp[0]) <= TEXT_CHARACTERS_MAX:
            raise ValueError("the address of a state server needs a port from 1 to 65535 and a host in tcp")
        if texts["kind"] not in KINDS:
            raise ValueError(f"the kind of a state server is one of {', '.join(KINDS)}")
        return cls(pid=pid, tcp=(tcp[0], tcp[1]), **texts)  # type: ignore[arg-type]  # texts were checked


def distance(own: Address, other: Address) -> Distance:
    """How far ``other`` is from ``own``."""
    if (own.host, own.boot_id) == (other.host, other.boot_id):
        return Distance.SNAPSHOT if other.kind == "snapshot" else Distance.SAME_HOST
    return Distance.SAME_RACK if own.rack and own.rack == other.rack else Distance.OTHER_HOST


def is_local(far: Distance) -> bool:
    """Whether what is this far away shares this host's memory."""
    return far <= Distance.SNAPSHOT


def nearest_first(own: Address, others: Sequence[Address]) -> list[int]:
    """The places of ``others`` in the order in which they are asked; equally near ones keep their order."""
    return sorted(range(len(others)), key=lambda index: distance(own, others[index]))


def stripe(total: int, sources: int) -> list[range]:
    """Parts of ``range(total)`` that are as equal as can be, one for each source, the larger ones first.

    Raises ValueError without sources.
    """
    if sources < 1 or total < 0:
        raise ValueError(f"{total} chunks cannot be dealt to {sources} sources; there must be one at least")
    size, larger = divmod(total, sources)
    ends = [index * size + min(index, larger) for index in range(sources + 1)]
    return [range(*pair) for pair in itertools.pairwise(ends)]
