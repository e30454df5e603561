"""Where web pages are served, as the store has it and as people are told. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_TEXT_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where a process listens. ``address`` is the host's own where it listens to others, else a loopback address."""

    address: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only its own host reaches it."""
        try:
            return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback
        except ValueError:
            return self.address == "localhost"

    @property
    def text(self) -> str:
        """ADDRESS:PORT, as the store has it."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        """For a browser."""
        return f"http://{self.text}/"

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """What ``text`` gives. Raises ValueError for what is none."""
        address, _, port = text[:_TEXT_CHARACTERS].rpartition(":")
        address = address.removeprefix("[").removesuffix("]")
        is_number = port.isascii() and port.isdecimal() and len(port) <= 5
        if not is_number or not 0 < int(port) < 65536 or not address or not set(address) <= _ADDRESS:
            raise ValueError(f"{text[:80]!a} is no ADDRESS:PORT")
        return cls(address, int(port))


_ADDRESS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:%")


@dataclass(frozen=True, slots=True)
class CoordinatorPlace:
    """Whether this process coordinates; else who does, "" for nobody, and where that one's page is, if it has one."""

    leads: bool
    host: str = ""
    place: ListenAddress | None = None

    @property
    def sentence(self) -> str:
        """Say who coordinates, and where to look."""
        if not self.host:
            return "Nobody coordinates the cluster at the moment."
        if self.place is None:
            return f"{self.host} coordinates the cluster, and serves no page: it was started without --web-port."
        if self.place.is_local:
            return f"{self.host} coordinates the cluster; its page can be reached from that host alone, {self.tunnel}."
        return f"{self.host} coordinates the cluster; its page is at {self.place.url}"

    @property
    def url(self) -> str:
        """The page of who coordinates, for a browser on any host; "" if there is none."""
        return "" if self.place is None or self.place.is_local else self.place.url

    @property
    def tunnel(self) -> str:
        """How a page that only its own host reaches is reached from elsewhere."""
        if self.place is None:
            return ""
        port = self.place.port
        return f"or by: ssh -L {port}:{self.place.text} {self.host}, and http://localhost:{port}/"
