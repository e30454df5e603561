"""What others write reaches logs, terminals and pages as one bounded line, and forges none of our own lines."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from unicron_elastic.base.text import LONGEST_LINE
from unicron_elastic.base.world import Member, World
from unicron_elastic.detection.remote_ranks import parse_report
from unicron_elastic.launcher.agent.core.peers import PeerWatch
from unicron_elastic.launcher.agent.hangs.remote_ranks import NEWS_KEY
from unicron_elastic.launcher.common.output import StampedFormatter, stamped
from unicron_elastic.launcher.config.answers import say
from unicron_elastic.launcher.main import _say as say_of_run
from unicron_elastic.rendezvous.records.job import JobKeys, JobMirror, parse_departing, parse_lost
from unicron_elastic.rendezvous.records.news import incidents_key, parse_incidents
from unicron_elastic.rendezvous.records.plan import parse_order, parse_phase
from unicron_elastic.rendezvous.store.interface import Entry, Snapshot

HOSTILE = (
    "rank 3 failed.\n[unicron] 12:00:00 The job has ended well.",
    "a\r[unicron] 12:00:00 forged",
    "\x1b[2J\x1b]0;title\x07[unicron] cleared",
    "turned \u202e round, \u2028 parted, \x85 next and \ud800 alone",
    "x" * 50_000,
    "[bold red]markup[/] <script>alert(1)</script>",
)
REPOSITORY = Path(__file__).parent.parent.parent


def _entry(key: str, told: Mapping[str, Any] | str) -> Entry:
    text = told if isinstance(told, str) else json.dumps(told)
    return Entry(key=key, value=text.encode(errors="backslashreplace"), revision=1, created=1, lease_id=0)


def _news(text: str) -> str:
    """What the watch of the other nodes says, of what anybody has put into the round's store."""
    store: Store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    store.set(NEWS_KEY, text.encode(errors="backslashreplace").decode())
    heard: list[str] = []
    watch = PeerWatch(None, store, 0.01, on_fault=heard.append, on_waiting=heard.append, on_error=heard.append)  # type: ignore[arg-type]
    found = watch._ask()
    assert found is not None
    found()
    return heard[0]


def _closed(text: str) -> str:
    keys = JobKeys("job")
    entries = (_entry(keys.closed, text),)
    return JobMirror(keys, Snapshot(prefix=keys.prefix, revision=1, entries=entries)).view().closed


def _odd(text: str) -> str:
    keys = JobKeys("job")
    name = text.encode(errors="replace").decode()
    entries = (_entry(f"{keys.prefix}members/{name}", text), _entry(f"{keys.prefix}lost/{name}", {"node": text}))
    mirror = JobMirror(keys, Snapshot(prefix=keys.prefix, revision=1, entries=entries))
    return "".join(mirror.odd.values())


def _world(text: str) -> World:
    world = World(number=1, members=(Member(name="a", node="n", local_rank=0),), store="h:1", reason="")
    return World.from_message({**world.to_message(), "reason": text[:2000]})


def _incident(text: str) -> Any:
    told = {
        "number": 1, "run_id": text, "job": text, "host": "node1", "time": text, "generation": 1, "rank": 0,
        "status": text, "severity": 1, "method": text, "reason": text, "action": text, "decision": text,
        "restarts_used": 0, "max_restarts": 3, "exception_type": text, "location": text, "left": text,
    }  # fmt: skip
    return parse_incidents(_entry(incidents_key("node1"), {"incidents": [told]}))


def _report(text: str) -> Any:
    rank = {
        "rank": 0, "step": 1, "phase": text, "cpu": None, "stopped": False, "silent": False, "runnable": None,
        "in_io": None, "uses_gpu": True, "groups": [[text, 1, 1, text]],
    }  # fmt: skip
    return parse_report(json.dumps({"asked": 1, "node": text, "at": 1.0, "ranks": [rank]}).encode())


HEARD: dict[str, Callable[[str], Any]] = {
    "news of the round's store": _news,
    "why a job is closed": _closed,
    "records that are none": _odd,
    "a world": _world,
    "incidents of other nodes": lambda text: _incident(text[:4000]),  # a record may be no longer
    "ranks elsewhere": _report,
    "lost agents": lambda text: parse_lost(_entry("k", {"node": "n", "reason": text})),
    "departing agents": lambda text: parse_departing(_entry("k", {"node": "n", "reason": text})),
    "orders": lambda text: parse_order(_entry("k", {"source": "a", "target": "b", "plan": 1, "reason": text})),
    "phases": lambda text: parse_phase(_entry("k", {"phase": "running", "reason": text, "nodes": 0, "signal": 15})),
}


def _texts(value: Any) -> list[str]:
    """All texts in what was read."""
    if isinstance(value, str):
        return [value]
    if is_dataclass(value):
        return [text for each in fields(value) for text in _texts(getattr(value, each.name))]
    if isinstance(value, tuple | list | set | frozenset):
        return [text for each in value for text in _texts(each)]
    return []


@pytest.mark.parametrize("heard", HEARD)
@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_heard_is_one_bounded_line(heard: str, text: str) -> None:
    found = _texts(HEARD[heard](text))
    assert found
    for each in found:
        assert each.isprintable(), each
        assert len(each) <= LONGEST_LINE


@pytest.mark.parametrize("text", HOSTILE[:5])
@pytest.mark.parametrize("place", [0, 1])
def test_a_member_of_a_world_whose_name_cannot_be_shown_is_none(text: str, place: int) -> None:
    member = ["a", "n", 0]
    member[place] = text
    told = {"number": 1, "members": [member], "store": "h:1", "reason": ""}
    with pytest.raises(ValueError, match="a member must be"):
        World.from_message(told)


def _logged(text: str) -> str:
    record = logging.LogRecord("unicron_elastic", logging.WARNING, "", 0, "told: %s", (text,), None)
    return StampedFormatter().format(record)


@pytest.mark.parametrize("sink", ["console", "log", "command", "run"])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_got_through_forges_no_line(sink: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sinks do not rely on those who read."""
    match sink:
        case "console":
            written = stamped(text)
        case "log":
            written = _logged(text)
        case "command":
            say(text.encode(errors="backslashreplace").decode())
            written = capsys.readouterr().err
        case _:
            say_of_run(text.encode(errors="backslashreplace").decode())
            written = capsys.readouterr().err
    first, *others = written.rstrip("\n").split("\n")
    assert not first.startswith(("rank", "a", "turned", "\x1b"))
    assert all(line.startswith(" ") for line in others if line)
    assert all(line.isprintable() and len(line) < LONGEST_LINE + 100 for line in (first, *others))


# Who writes to a terminal by itself, and why that is no way around.
WRITERS = {
    "launcher/cli.py": "shows what launcher/view has made, of single lines",
    "launcher/commands/chaos.py": "says what it did to processes of this user",
    "launcher/commands/cluster.py": "JSON, in ASCII",
    "launcher/commands/etcd.py": "says where it listens",
    "launcher/commands/quarantine.py": "JSON, in ASCII",
    "launcher/commands/show.py": "lines that launcher/view has made",
    "launcher/commands/simulate.py": "a table of numbers",
    "launcher/view/job/panel.py": "rich's Text, whose parts are single lines",
    "launcher/commands/services.py": "stamped",
    "launcher/config/answers.py": "is one of the four that are tested here",
    "launcher/main.py": "the same, and torch's own report of a script's error",
    "launcher/node/submission.py": "stamped, and the number of a signal",
    "launcher/agent/process/supervisor.py": "an error of its own, which has heard nobody",
    "launcher/plugin.py": "a fixed sentence",
    "launcher/stepping_aside.py": "fixed sentences",
}


def test_nobody_else_writes_to_the_terminal() -> None:
    found = set()
    for folder in ("launcher", "rendezvous"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if re.search(r"\bprint\(|std(?:err|out)\.write\(|\becho\(", path.read_text(encoding="utf-8")):
                found.add(str(path.relative_to(REPOSITORY)))
    assert sorted(found - set(WRITERS)) == [], "say it through one of them"
    assert sorted(set(WRITERS) - found) == []
