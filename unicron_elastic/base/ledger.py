"""The incident ledger: one JSON line for each state of an incident, appended, never rewritten.

An incident is recorded several times while it unfolds, so that a launcher that dies half-way leaves what it knew. The
last line of an incident counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.state_folder import hold_own, state_folder

FILE_NAME = "incidents.jsonl"
_LONGEST_FOLDER_NAME = 100


class Ledger:
    """Appends incidents to a file. A ledger that cannot be written is no reason to end a job: it is said once."""

    def __init__(
        self,
        path: Path | None,
        say: Callable[[str], None] = lambda _sentence: None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._now = now
        self._path = path  # None: nothing is written
        self._say = say
        self._has_complained = False
        self._times: dict[tuple[str, str, int], str] = {}

    def record(self, incident: Incident) -> Incident:
        """Appends ``incident`` and returns it as written.

        An empty ``time`` becomes the wall clock of the incident's first record, so that all its records agree.
        """
        key = (incident.run_id, incident.host, incident.number)
        if not incident.time:
            now = self._now().astimezone().isoformat(timespec="milliseconds")
            incident = replace(incident, time=self._times.setdefault(key, now))
        if self._path is not None:
            try:
                _append(self._path, json.dumps(incident.to_json()).encode() + b"\n")
            except OSError as error:
                self._complain(error)
        return incident

    def keep_evidence(self, text: str) -> str | None:
        """Writes a report beside the ledger and returns its path; None if that is not possible."""
        if self._path is None or (self._path.exists() and not self._path.is_file()):
            return None  # such as /dev/stderr: there is no folder beside it
        now = self._now().strftime("%Y%m%d-%H%M%S-%f")
        path = self._path.with_name(f"evidence-{now}-{os.getpid()}.txt")
        try:
            hold_own(path, make=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", errors="replace") as file:  # through no link
                file.write(text)
        except OSError as error:
            self._complain(error)
            return None
        return str(path)

    def _complain(self, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            self._say(f"Incidents cannot be recorded in {self._path}: {error.strerror or error}. The job goes on.")


def _append(path: Path, line: bytes) -> None:
    """Appends in a single write, so that the launchers of several nodes can share a file. Raises OSError."""
    hold_own(path, make=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, flags, 0o644)
    try:
        if _ends_torn(fd):
            line = b"\n" + line
        written = os.write(fd, line)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes could be written; the disk may be full")
    finally:
        os.close(fd)


def _ends_torn(fd: int) -> bool:
    """Whether a writer died in the middle of the last line: the next record must not be lost with it."""
    size = os.fstat(fd).st_size
    with contextlib.suppress(OSError):  # a pipe or /dev/stderr has no place to look at
        return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    return False


def read_ledger(path: Path) -> tuple[list[Incident], list[str]]:
    """The incidents of a ledger in order of appearance, each as last recorded, and a sentence for each bad line.

    An incident is known by its run, host, number and time: run ids are reused ("none" is torchrun's default) and
    numbers start again with each launcher, so without the time a later job would hide an earlier one's incidents.
    Raises OSError.
    """
    found: dict[tuple[str, str, int, str], Incident] = {}
    problems = list[str]()
    for incident in ledger_records(path, problems.append):
        found[incident.run_id, incident.host, incident.number, incident.time] = incident
    return list(found.values()), problems


def ledger_records(path: Path, on_problem: Callable[[str], None]) -> Iterator[Incident]:
    """Every record of a ledger in its order; ``on_problem`` hears a sentence for each bad line. Raises OSError."""
    hold_own(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _parse(line)
            except (ValueError, RecursionError) as error:  # RecursionError: absurdly nested JSON
                on_problem(f"{path}:{number}: {error}")


def _parse(line: bytes) -> Incident:
    """Raises ValueError."""
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError("not an incident record: a JSON object was expected")
    return Incident.from_json(data)


def find_ledgers(folder: Path) -> list[Path]:
    """Every ledger in ``folder`` and below, the one written last first. Raises PermissionError as ``hold_own`` does."""
    hold_own(folder)
    found = [Path(parent) / FILE_NAME for parent, _, names in os.walk(folder) if FILE_NAME in names]
    return sorted(found, key=_written_at, reverse=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed in this moment, or a dangling link
        return 0.0


def default_ledger(run_id: str, log_dir: Path | None) -> Path:
    """Where a run's ledger is kept: in ``log_dir``, or in a folder of the run's own in the user's state folder."""
    if log_dir is not None:
        return log_dir / FILE_NAME
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:_LONGEST_FOLDER_NAME].lstrip(".")
    return state_folder() / (name or "run") / FILE_NAME
