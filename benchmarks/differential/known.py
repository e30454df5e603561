"""Cases in which a commit of the past has been found wrong: they have to fail there, and to pass when it is mended."""

from __future__ import annotations

from pathlib import Path

__all__ = ["known_faults"]

FILE = Path(__file__).with_name("known_faults.txt")


def known_faults() -> list[str]:
    """Each as a case in JSON."""
    return [line for line in FILE.read_text().splitlines() if line.startswith("{")]
