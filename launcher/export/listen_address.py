"""Where a process listens, and where it was asked to."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.config.answers import BAD_USAGE, fail
from unicron_elastic.launcher.config.options import port

_TEXT_CHARACTERS = 300
_ADDRESS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:%")


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


def asked_address(
    what: str, given_port: str | None, given_address: str | None, environ: Mapping[str, str]
) -> ListenAddress | None:
    """Where to serve ``what``, by its options ``--WHAT-port`` and ``--WHAT-address`` or its variables; None: nowhere.

    A port that is none ends the command with one sentence.
    """
    variable = f"UNICRON_{what.upper()}"
    source = f"--{what}-port" if given_port is not None else f"{variable}_PORT"
    text = environ.get(f"{variable}_PORT", "0") if given_port is None else given_port
    try:
        number = port(text)
    except ValueError as error:
        fail(BAD_USAGE, f"{source}: {text!r} is not valid; give {error}.")
    address = given_address if given_address is not None else environ.get(f"{variable}_ADDRESS", LOOPBACK)
    return ListenAddress(address, number) if number else None
