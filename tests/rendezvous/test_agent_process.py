"""What one agent knows of another on its host: it has ended, with its workers, or that is not certain."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

from unicron_elastic.membership.rounds import JobMember, Place, Round
from unicron_elastic.rendezvous.job.agent_process import AgentProcess, has_ended, own_process, parse_process
from unicron_elastic.rendezvous.records.job import member_text, parse_member, parse_round, round_text
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.worker.pulse import page_name

AGENT = """
import sys
from unicron_elastic.rendezvous.job.agent_process import own_process
print(own_process("node 1"), flush=True)
sys.stdin.read()
"""
# Plainly started, or forked by a process that is not of the run, so that only the page names it.
WORKER = """
import mmap, os, sys
fd = os.memfd_create(sys.argv[1])
os.ftruncate(fd, 4096)
page = mmap.mmap(fd, 4096)
os.close(fd)
print("ready", flush=True)
sys.stdin.read()
"""

RUN = f"run-{uuid.uuid4().hex}"  # of which no other test on this machine has workers

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program, and waits for its first line."""
    started = []

    def begin(code: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def own() -> AgentProcess:
    found = own_process("node 1")
    assert found is not None
    return found


def told_by(process: subprocess.Popen[str]) -> AgentProcess:
    assert process.stdout is not None
    told = parse_process(process.stdout.readline().strip())
    assert told is not None
    return told


def ended(start: Start) -> AgentProcess:
    process = start(AGENT)
    told = told_by(process)
    process.kill()
    process.wait()
    return told


def test_an_agent_has_ended_when_it_was_killed(start: Start, own: AgentProcess) -> None:
    process = start(AGENT)
    told = told_by(process)
    assert told.pid == process.pid
    assert not has_ended(told, RUN, own)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked how it ended
    assert has_ended(told, RUN, own)
    process.wait()
    assert has_ended(told, RUN, own)


def test_who_has_its_number_now_is_not_it(own: AgentProcess) -> None:
    assert not has_ended(own, RUN, own)
    assert has_ended(own._replace(started_at=own.started_at - 1), RUN, own)


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_agent_whose_worker_lives_has_not_ended(start: Start, own: AgentProcess, is_warm: bool) -> None:
    told, run_id = ended(start), f"a run/{uuid.uuid4().hex * 5}"
    env = {"UNICRON_RUN_TOKEN": "unicron-1.00000001"} if is_warm else {"TORCHELASTIC_RUN_ID": run_id}
    worker = start(WORKER, page_name(0, 0, run_id) if is_warm else "page", **env)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    assert not has_ended(told, run_id, own)
    assert has_ended(told, "another run", own)
    worker.kill()
    worker.wait()
    assert has_ended(told, run_id, own)


@pytest.mark.parametrize(
    "change",
    [{"boot": "another"}, {"namespaces": "pid:[1],time:[1]"}, {"address": "node 2"}, {"user": 12345}],
)
def test_nothing_is_certain_of_another_boot_container_address_or_user(
    start: Start, own: AgentProcess, change: dict[str, object]
) -> None:
    told = ended(start)
    assert has_ended(told, RUN, own)
    seen_by = own._replace(user=54321) if "user" in change else own  # root sees what all users run
    assert not has_ended(told._replace(**change), "run", seen_by)


@pytest.mark.parametrize("text", ["", "a b c", "boot spaces here 0 x 1", "1 2 3 4 5 6 7"])
def test_what_tells_nothing_proves_nothing(text: str) -> None:
    assert parse_process(text) is None


def test_what_is_told_is_read_back(own: AgentProcess) -> None:
    assert parse_process(str(own)) == own


def test_it_is_kept_whole_in_what_a_job_keeps_or_not_at_all(own: AgentProcess) -> None:
    for process, kept in ((str(own), str(own)), ("x" * 501, ""), ("", "")):
        member = JobMember(node_id="a/1", host="a", process=process)
        found = Round(number=1, places=(Place("a/1", "a", process), Place("b/1", "b")))
        assert parse_member(entry_of(member_text(member))).process == kept
        assert [place.process for place in parse_round(entry_of(round_text(found))).places] == [kept, ""]


def entry_of(text: bytes) -> Entry:
    return Entry(key="key", value=text, revision=1, created=1, lease_id=None)
