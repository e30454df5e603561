"""What an agent says of its job: renewed in its loop, counted on from its ledger, and healthy while it only waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from metric_values import CLOSED, DECIDED, every_sample

from unicron_elastic.base.ledger import Ledger
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.export.metrics.job import JobMetrics
from unicron_elastic.launcher.export.metrics.link import VARIABLE, ChildMetrics, Teller, take_teller
from unicron_elastic.launcher.view.job.view import LocalJobView, WorkerView
from unicron_elastic.metrics.samples_text import parse_samples, samples_text
from unicron_elastic.recovery.state import Phase

VIEW = LocalJobView(
    job="train.py",
    run_id="run",
    generation=1,
    restarts_used=0,
    max_restarts=3,
    nodes=1,
    world_size=2,
    workers=(WorkerView(rank=0, local_rank=0, pid=7, state="running", step=5, step_time_s=0.5),),
    uptime_s=0.0,
    last_incident=None,
    phase="running",
    last_step_at=None,
)


class Job:
    """A job whose view a test sets, and whose loop it turns."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.ledger = folder / "incidents.jsonl"
        self.view = VIEW
        self.later_s = 0.0  # by which the clock of what is tested is ahead
        self.metrics = JobMetrics(
            self.loop,
            lambda: self.view,
            "n1",
            lambda: self.ledger,
            look_s=0.01,
            clock=lambda: time.monotonic() + self.later_s,
        )

    def start(self) -> None:
        assert self.metrics.start(server=lambda _answers: Served(), teller=None)  # type: ignore[arg-type]

    def value(self, name: str, *labels: str) -> Any:
        found = {(s.metric.name, *s.labels): s.value for s in self.metrics.samples()}
        return found.get((f"unicron_{name}", "run", *labels))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Turns the loop."""
        assert self.loop.run_until(is_done, time.monotonic() + 20.0)


class Served:
    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.metrics.close()
    made.loop.close()


def test_the_loop_renews_what_is_told(job: Job) -> None:
    job.start()
    assert job.value("step") == 5
    job.view = replace(VIEW, workers=(replace(VIEW.workers[0], step=6),))
    assert job.value("step") == 5  # nothing is asked of the job by those who ask here
    job.until(lambda: job.value("step") == 6)


def test_a_step_has_a_date_that_stays_while_workers_restart(job: Job) -> None:
    now, now_unix_s = time.monotonic(), time.time()
    job.view = replace(VIEW, last_step_at=now - 10.0)
    job.start()
    at = job.value("last_step_timestamp_seconds")
    assert abs(at - (now_unix_s - 10.0)) < 1.0
    job.view = replace(VIEW, workers=(), phase="idle", last_step_at=None, generation=2)
    job.metrics.phase_is("idle")
    assert job.value("step") is None
    assert job.value("last_step_timestamp_seconds") == at
    job.view = replace(VIEW, last_step_at=now - 9.0)
    job.metrics.phase_is("running")
    assert job.value("last_step_timestamp_seconds") == pytest.approx(at + 1.0, abs=0.5)


def test_a_new_phase_is_told_at_once(job: Job) -> None:
    job.start()
    job.view = replace(VIEW, phase="stopping")
    job.metrics.phase_is("stopping")
    assert (job.value("job_phase", "stopping"), job.value("job_phase", "running")) == (1, 0)


def test_before_the_nodes_have_met_there_are_none(job: Job) -> None:
    job.view = replace(VIEW, generation=0, world_size=-1, workers=(), phase="idle")
    job.start()
    assert (job.value("nodes"), job.value("world_size")) == (0, 0)


def test_incidents_grow_as_they_are_recorded(job: Job) -> None:
    job.start()
    job.until(lambda: job.value("incidents_total", "2", "killed by signal") == 0)
    job.metrics.recorded(DECIDED)
    job.metrics.recorded(CLOSED)
    job.until(lambda: job.value("incidents_total", "2", "killed by signal") == 1)
    assert job.value("lost_gpu_seconds_total", "first_step") == 16.0


def test_counters_go_on_where_the_ledger_ends(job: Job) -> None:
    ledger = Ledger(job.ledger)
    ledger.record(DECIDED)
    ledger.record(CLOSED)
    ledger.record(replace(CLOSED, host="n2"))
    ledger.record(replace(CLOSED, run_id="other"))
    with job.ledger.open("a") as file:
        file.write("no record\n")
    job.view = replace(VIEW, generation=0)  # the nodes meet
    job.start()
    job.metrics.phase_is("running")
    assert job.value("incidents_total", "2", "killed by signal") is None  # else it would seem to grow later
    assert job.value("lost_gpu_seconds_total", "noticed") is None
    job.view = VIEW
    job.metrics.phase_is("other")
    job.metrics.recorded(CLOSED)  # the same, while the ledger is being read: it counts once
    job.metrics.recorded(replace(CLOSED, time="2026-03-03T03:04:05.678+01:00"))
    job.until(lambda: job.value("incidents_total", "2", "killed by signal") == 2)
    assert job.value("lost_gpu_seconds_total", "noticed") == 4.0
    assert job.value("recovery_time_seconds").total == 15.0


@pytest.mark.parametrize("where", ["missing", "folder", "pipe"])
def test_a_ledger_that_cannot_be_read_is_none(job: Job, tmp_path: Path, where: str) -> None:
    job.ledger = {"missing": tmp_path / "no" / "where", "folder": tmp_path, "pipe": Path("/dev/stderr")}[where]
    job.start()
    job.until(lambda: job.metrics.has_counted)
    job.metrics.recorded(CLOSED)
    job.until(lambda: job.value("incidents_total", "2", "killed by signal") == 1)


def test_it_is_ready_while_workers_run(job: Job) -> None:
    job.start()
    assert job.metrics.why_not_ready() == ""
    for phase in Phase:
        job.view = replace(VIEW, phase=phase.value)
        job.metrics.phase_is(phase.value)
        assert (job.metrics.why_not_ready() == "") == (phase is Phase.RUNNING)


def test_a_loop_that_stands_is_unwell_unless_it_waits_for_nodes(job: Job) -> None:
    job.start()
    assert job.metrics.why_unwell() == ""
    job.later_s = 100.0
    assert job.metrics.why_unwell() == "The agent's loop has not gone round for 100 s."
    job.metrics.is_meeting = True
    assert job.metrics.why_unwell() == ""
    job.metrics.is_meeting = False
    job.view = replace(VIEW, phase="idle")
    job.metrics.phase_is("idle")
    assert job.metrics.why_unwell() == ""


def test_a_view_that_cannot_be_had_changes_nothing(job: Job) -> None:
    job.start()
    seen = threading.Event()

    def fail() -> LocalJobView:
        seen.set()
        raise RuntimeError("a bug")

    job.metrics._view = fail
    job.until(seen.is_set)
    assert job.value("step") == 5
    assert job.metrics.why_unwell() == ""


def test_without_anybody_to_tell_nothing_is_done(job: Job) -> None:
    assert not job.metrics.start(server=lambda _answers: None, teller=None)
    assert list(job.metrics.samples()) == []


def test_what_the_cluster_says_is_told_too(job: Job) -> None:
    job.start()
    own = list(job.metrics.samples())
    job.metrics.cluster_samples = lambda: own[:1]
    assert list(job.metrics.samples()) == [*own, own[0]]


# -- to the agent of a cluster -------------------------------------------------------------------------------------


def _seen(child: ChildMetrics, name: str) -> list[object]:
    return [s.value for s in child.samples() if s.metric.name == f"unicron_{name}"]


def _until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_agent_hears_its_child_to_its_last_word_and_forgets_it_later(job: Job) -> None:
    now = [0.0]
    child = ChildMetrics(now=lambda: now[0])
    teller = Teller(child.connect().detach())
    assert job.metrics.start(server=None, teller=teller)
    _until(lambda: _seen(child, "step") == [5])
    job.view = replace(VIEW, workers=(replace(VIEW.workers[0], step=9),), phase="finished")
    job.metrics.close()
    _until(lambda: _seen(child, "step") == [9])
    _until(lambda: child.has_ended)
    now[0] = 299.0
    assert _seen(child, "step") == [9]
    now[0] = 301.0
    assert list(child.samples()) == []


def test_the_next_child_takes_its_place(job: Job) -> None:
    child = ChildMetrics()
    first = Teller(child.connect().detach())
    job.metrics.start(server=None, teller=first)
    _until(lambda: _seen(child, "step") == [5])
    second = Teller(child.connect().detach())
    first.close()
    second.tell(s for s in job.metrics.samples() if s.metric.name == "unicron_generation")
    _until(lambda: _seen(child, "step") == [] and _seen(child, "generation") == [1])
    second.close()


def test_a_child_never_waits_for_an_agent_that_does_not_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    teller, samples = Teller(theirs.detach()), every_sample()
    most = 2 * ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // len(samples_text(samples))
    for _ in range(most):
        teller.tell(samples)
    with ours:
        assert parse_samples(ours.recv(1 << 20)) == tuple(samples)
    teller.tell(samples)  # to nobody
    teller.close()
    teller.tell(samples)


def test_what_a_child_says_is_checked() -> None:
    child = ChildMetrics()
    with child.connect() as theirs:
        theirs.send(b"nonsense")
        theirs.send(b'[["unicron_step", ["run"], 3]]')
        _until(lambda: _seen(child, "step") == [3])


def test_descriptors_that_are_no_such_socket_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("", "no number", "987654"):
        monkeypatch.setenv(VARIABLE, told)
        assert take_teller() is None
    assert VARIABLE not in os.environ
