"""Jobs of ``train_in_place.py`` that are struck, and what their ledgers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__).with_name("train_in_place.py"))
END_S = 40.0


def incidents(folder: Path) -> list[dict[str, Any]]:
    """Return what the ledger has of each, at last, in their order."""
    last: dict[int, dict[str, Any]] = {}
    for line in (folder / "ledger").read_text().splitlines():
        record = json.loads(line)
        last[record["number"]] = record
    return [last[number] for number in sorted(last)]


def trained(
    launcher: Any,
    ranks: int,
    *strikes: str,
    worlds: int = 1,
    flags: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    end_s: float = END_S,
) -> Path:
    """Train to a good end; the last step waits for that many worlds, so that all replacements have joined."""
    given = [argument for strike in strikes for argument in ("--strike", strike)]
    run = launcher.start(
        "--standalone",
        f"--nproc-per-node={ranks}",
        "--max-restarts=5",
        "--unicron-ledger=ledger",
        *flags,
        SCRIPT,
        f"--wait-for-worlds={worlds}",
        *given,
        *more,
        fast=False,
    )
    assert run.wait(end_s) == 0, run.err
    folder: Path = launcher.folder
    return folder
