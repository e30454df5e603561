"""Histories from files: our own CSV, Bamboo's traces of spot instances, and the incident ledger of a real job.

A file that does not fit is refused with one sentence that names the file, the line and the reason.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from unicron_elastic.base.text import one_line
from unicron_elastic.faults import Status
from unicron_elastic.simulation.history.events import (
    Event,
    FaultStruck,
    History,
    JobArrives,
    JobEnds,
    NodeJoins,
    NodeLeaves,
    order,
)
from unicron_elastic.simulation.history.ledgers import read_ledgers

COLUMNS = ("at_s", "event", "node", "kind", "repair_s", "notice_s", "job")
_DIRECTIVES = ("name", "duration_s", "nodes", "source")
_MOST_NODES = 1_000_000
_BAMBOO_LINE = re.compile(r"\d+,(add|remove),\S+")


class _Line(NamedTuple):
    path: Path
    number: int
    text: str

    def wrong(self, reason: str) -> ValueError:
        return ValueError(f"{self.path}:{self.number}: {one_line(reason)}")


def read_history(path: Path) -> History:
    """A history from a file, or from a folder of incident ledgers; the format is known by the beginning.

    Raises ``ValueError`` naming file, line and reason; OSError.
    """
    if path.is_dir():
        return read_ledgers((path,))
    for line in _lines(path):
        if line.text.startswith("{"):
            return read_ledgers((path,))
        if line.text.startswith("#") or line.text.split(",")[0].strip() == COLUMNS[0]:
            return read_csv(path)
        if _BAMBOO_LINE.fullmatch(line.text):
            return read_bamboo(path)
        raise line.wrong(
            f"neither a history ({','.join(COLUMNS[:3])},...), nor a spot trace (milliseconds,add|remove,node), nor an "
            "incident ledger (JSON lines)"
        )
    raise ValueError(f"{path}:1: the file is empty")


def _lines(path: Path) -> Iterator[_Line]:
    """The lines that are not blank."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}:{number}: not UTF-8 text: {error.reason}") from None
            if text:
                yield _Line(path, number, text)


@dataclass(slots=True)
class _Head:
    """What is said before the rows."""

    name: str
    source: str
    duration_s: float | None = None
    nodes: int | None = None


def read_csv(path: Path) -> History:
    """Reads the format that docs/simulation.md describes: directives in comments, a header, a row for each event.

    A node whose first event is that it joins is absent at first. Raises ``ValueError`` naming file, line and reason.
    """
    head = _Head(name=path.stem, source=f"the file {path.name}")
    columns: list[str] | None = None
    events: list[tuple[_Line, Event]] = []
    for line in _lines(path):
        if line.text.startswith("#"):
            _directive(line, head)
        elif columns is None:
            columns = _header(line)
        else:
            events.append((line, _event(line, columns)))
    if columns is None:
        raise ValueError(f"{path}:1: there is no header: a line {','.join(COLUMNS[:4])} was expected")
    if head.duration_s is None or head.nodes is None:
        raise ValueError(f'{path}:1: lines "# nodes: N" and "# duration_s: SECONDS" are needed before the header')
    return _whole(events, head.name, head.duration_s, head.nodes, head.source)


def _directive(line: _Line, head: _Head) -> None:
    name, colon, value = (part.strip() for part in line.text.lstrip("#").partition(":"))
    if not colon or name not in _DIRECTIVES:
        return  # a comment
    if name == "name":
        head.name = value
    elif name == "source":
        head.source = value
    elif name == "duration_s":
        head.duration_s = _number(line, "duration_s", value, least=0.001)
    else:
        head.nodes = _count(line, "nodes", value, most=_MOST_NODES)
        if head.nodes == 0:
            raise line.wrong("nodes is 0: there must be at least one")


def _header(line: _Line) -> list[str]:
    columns = [name.strip() for name in _cells(line)]
    for name in columns:
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(COLUMNS)}"
            raise line.wrong(f"there is no column {name!r}: {hint}")
    if len(set(columns)) < len(columns):
        raise line.wrong("a column is named twice")
    for name in ("at_s", "event"):
        if name not in columns:
            raise line.wrong(f"the header has no column {name}")
    return columns


def _cells(line: _Line) -> list[str]:
    try:
        (cells,) = csv.reader([line.text], strict=True)
    except (csv.Error, ValueError) as error:
        raise line.wrong(f"not a line of CSV: {error}") from None
    return cells


class _Row:
    """One row, with its cells by name: takes those that an event needs, and refuses what is left over."""

    def __init__(self, line: _Line, columns: list[str]) -> None:
        cells = _cells(line)
        if len(cells) > len(columns):
            raise line.wrong(f"{len(cells)} cells, but the header has {len(columns)}")
        self.line = line
        self._cells = dict(zip(columns, (cell.strip() for cell in cells), strict=False))

    def take(self, name: str) -> str:
        """The cell, "" if it is empty or not there."""
        return self._cells.pop(name, "")

    def node(self) -> int:
        return _count(self.line, "node", self.take("node"), most=_MOST_NODES - 1)

    def job(self) -> str:
        job = self.take("job")
        if not job:
            raise self.line.wrong("no job is named")
        return job

    def seconds(self, name: str, default: float | None) -> float | None:
        text = self.take(name)
        return _number(self.line, name, text, least=0.0) if text else default

    def end(self, kind: str) -> None:
        for name, text in self._cells.items():
            if text:
                raise self.line.wrong(f"{name} is {text!r}: {kind} has none")


def _event(line: _Line, columns: list[str]) -> Event:
    row = _Row(line, columns)
    at_s = _number(line, "at_s", row.take("at_s"), least=0.0)
    what = row.take("event").lower()
    if what not in _READERS:
        raise line.wrong(f"event is {what!r}: it must be one of {', '.join(_READERS)}")
    event = _READERS[what](row, at_s)
    row.end({"arrive": "an arrival", "end": "an end", "join": "a join", "leave": "a leave"}.get(what, f"a {what}"))
    return event


def _fault(row: _Row, at_s: float) -> Event:
    text = row.take("kind")
    word = next((kind for kind in Status if kind.value.lower() == text.lower()), None)
    if word is None:
        near = get_close_matches(text, [kind.value for kind in Status], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(kind.value for kind in Status)}"
        raise row.line.wrong(f"kind is {text!r}: {hint}")
    return FaultStruck(at_s=at_s, node=row.node(), kind=word, repair_s=row.seconds("repair_s", None))


_READERS: dict[str, Callable[[_Row, float], Event]] = {
    "fault": _fault,
    "join": lambda row, at_s: NodeJoins(at_s=at_s, node=row.node()),
    "leave": lambda row, at_s: NodeLeaves(at_s=at_s, node=row.node(), notice_s=row.seconds("notice_s", 0.0) or 0.0),
    "arrive": lambda row, at_s: JobArrives(at_s=at_s, job=row.job()),
    "end": lambda row, at_s: JobEnds(at_s=at_s, job=row.job()),
}


def _number(line: _Line, name: str, text: str, *, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise line.wrong(f"{name} is {text!r}: it must be a number, at least {least:g}")
    return value


def _count(line: _Line, name: str, text: str, *, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) > most:
        raise line.wrong(f"{name} is {text!r}: it must be a whole number from 0 to {most:,}")
    return int(text)


def _whole(events: list[tuple[_Line, Event]], name: str, duration_s: float, nodes: int, source: str) -> History:
    """Checks each event where its line is still known, so that what is wrong can be told with it."""
    events.sort(key=lambda each: each[1].at_s)  # of one moment, the first in the file says whether the node is there
    first: dict[int, Event] = {}
    for line, event in events:
        if event.at_s > duration_s:
            raise line.wrong(f"at_s is {event.at_s:g}, after the end of the history at {duration_s:g} s")
        if isinstance(event, JobArrives | JobEnds):
            continue
        if event.node >= nodes:
            raise line.wrong(f"node is {event.node}: there are nodes 0 to {nodes - 1}")
        if isinstance(event, NodeJoins | NodeLeaves):
            first.setdefault(event.node, event)
    absent = frozenset(node for node, event in first.items() if isinstance(event, NodeJoins))
    events.sort(key=lambda each: order(each[1]))
    here = {node: node not in absent for node in first}
    for line, event in events:
        if isinstance(event, NodeJoins | NodeLeaves):
            comes = isinstance(event, NodeJoins)
            if here[event.node] == comes:
                raise line.wrong(f"node {event.node} {'joins, but it is there' if comes else 'leaves, but it is away'}")
            here[event.node] = comes
    return History.of(
        (event for _, event in events), name=name, duration_s=duration_s, nodes=nodes, source=source, absent=absent
    )


def write_csv(history: History) -> str:
    """The text of a history in our format; what was measured of a fault is left out. ``read_csv`` reads it."""
    source = " ".join(history.source.split())
    out = io.StringIO()
    out.write(f"# name: {history.name}\n# duration_s: {history.duration_s!r}\n# nodes: {history.nodes}\n")
    out.write(f"# source: {source}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for event in history.events:
        writer.writerow(_written(event))
    return out.getvalue()


def _written(event: Event) -> tuple[object, ...]:
    if isinstance(event, FaultStruck):
        repair_s = "" if event.repair_s is None else repr(event.repair_s)
        return repr(event.at_s), "fault", event.node, event.kind.value, repair_s, "", ""
    if isinstance(event, NodeLeaves):
        return repr(event.at_s), "leave", event.node, "", "", repr(event.notice_s), ""
    if isinstance(event, NodeJoins):
        return repr(event.at_s), "join", event.node, "", "", "", ""
    return repr(event.at_s), "arrive" if isinstance(event, JobArrives) else "end", "", "", "", "", event.job


def read_bamboo(path: Path, *, notice_s: float = 0.0) -> History:
    """Reads ``milliseconds,add|remove,name`` (github.com/uclasystem/bamboo): machines that come and go.

    A machine takes the lowest number that has been free since before that millisecond, so there are about as many
    nodes as were there at once. ``notice_s`` is how long before each loss it is announced, of which the traces say
    nothing. The history ends with the last line. Raises ``ValueError`` naming file, line and reason.
    """
    number_of: dict[str, int] = {}
    free: list[int] = []
    freed: list[int] = []
    nodes, last_ms = 0, 0
    events: list[Event] = []
    for line in _lines(path):
        if not _BAMBOO_LINE.fullmatch(line.text):
            raise line.wrong(f"{line.text[:80]!r} is not milliseconds,add|remove,node")
        ms_text, what, name = line.text.split(",", 2)
        at_ms = _count(line, "milliseconds", ms_text, most=10**15)
        if at_ms < last_ms:
            raise line.wrong(f"{at_ms} ms comes after {last_ms} ms: lines must be in order of time")
        if at_ms > last_ms:
            free, freed, last_ms = sorted(free + freed), [], at_ms
        if (what == "add") == (name in number_of):
            raise line.wrong(
                f"{name} is {'added, but it is there' if what == 'add' else 'removed, but it is not there'}"
            )
        if what == "add":
            node = free.pop(0) if free else nodes
            nodes = max(nodes, node + 1)
            number_of[name] = node
            events.append(NodeJoins(at_s=at_ms / 1000, node=node))
        else:
            node = number_of.pop(name)
            freed.append(node)
            events.append(NodeLeaves(at_s=at_ms / 1000, node=node, notice_s=notice_s))
    if last_ms == 0:
        raise ValueError(f"{path}:1: nothing happens after 0 ms")
    joined = {event.node for event in events if event.at_s == 0 and isinstance(event, NodeJoins)}
    left = {event.node for event in events if event.at_s == 0 and isinstance(event, NodeLeaves)}
    return History.of(
        (event for event in events if event.at_s > 0),
        name=path.stem,
        duration_s=last_ms / 1000,
        nodes=nodes,
        source=f"the spot trace {path.name}, in the format of Bamboo (NSDI'23)",
        absent=frozenset(range(nodes)) - (joined - left),
    )
