"""The incident ledger of a real job as a history, with what each fault cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.base.incident import Incident
from unicron_elastic.faults import Status
from unicron_elastic.simulation.history.ledgers import read_ledgers
from unicron_elastic.simulation.history.replay import read_history

NOON = 1_795_348_800.0  # 2026-11-22T12:00:00+00:00
BOOT = {"a": 1000.0, "b": 5000.0, "c": 20.0, "d": 70.0}  # each host's monotonic clock at noon


def incident(host: str, number: int, at_s: float, **others: Any) -> Incident:
    """Noticed ``at_s`` seconds after noon, at once; moments are seconds after noon."""
    moments = {name: others.pop(name, None) for name in ("stopped_at", "regrouped_at", "first_step_at")}
    occurred_at = others.pop("occurred_at", at_s)
    made = Incident(
        number=number,
        run_id="chat",
        job="train.py",
        host=host,
        time=f"2026-11-22T12:{int(at_s // 60):02}:{at_s % 60:06.3f}+00:00",
        generation=1,
        rank=0,
        status="killed by signal",
        severity=2,
        method="process supervision",
        reason="rank 0 was killed by SIGKILL.",
        action="restart",
        decision="Restart 1 of 3.",
        restarts_used=1,
        max_restarts=3,
        occurred_at=BOOT[host] + occurred_at,
        noticed_at=BOOT[host] + at_s,
        **{name: None if moment is None else BOOT[host] + moment for name, moment in moments.items()},
    )
    return replace(made, **others)


def lost(host: str, number: int, at_s: float, gone: str, **others: Any) -> Incident:
    """As survivors tell of it, each for itself."""
    told = {"rank": None, "status": "lost connection", "severity": 1, "method": "node health", "action": "go on"}
    return incident(host, number, at_s, reason=f"{gone} is lost: its process has ended.", **{**told, **others})


def ledger(folder: Path, *incidents: Incident, name: str = "incidents.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in incidents), encoding="utf-8")
    return path


def test_an_incident_is_a_fault_with_its_measured_phases(tmp_path: Path) -> None:
    opened = incident("b", 1, 60.0, occurred_at=59.5)
    closed = incident("b", 1, 60.0, occurred_at=59.5, stopped_at=60.25, regrouped_at=61.0, first_step_at=63.0)
    history = read_history(ledger(tmp_path, opened, closed))
    assert (history.nodes, history.duration_s) == (1, 3.5)
    (fault,) = history.faults
    assert (fault.at_s, fault.node, fault.kind, fault.repair_s) == (0.0, 0, Status.KILLED_BY_SIGNAL, None)
    measured = fault.measured
    assert measured is not None
    assert (measured.job, measured.host, measured.action) == ("chat", "b", "restart")
    phases = (measured.noticed_s, measured.stopped_s, measured.regrouped_s, measured.first_step_s)
    assert phases == (0.5, 0.25, 0.75, 2.0)
    assert measured.total_s == 3.5


def test_what_is_not_in_a_ledger_can_be_said(tmp_path: Path) -> None:
    path = ledger(tmp_path, lost("c", 1, 60.0, "d", first_step_at=61.0))
    history = read_ledgers((path,), started_at=NOON, duration_s=600.0, hosts=("a", "b", "c", "d"), repair_s=30.0)
    (fault,) = history.faults
    assert (history.nodes, history.duration_s) == (4, 600.0)
    assert (fault.at_s, fault.node, fault.repair_s) == (60.0, 3, 30.0)  # the lost host, not the one that tells of it


def test_all_who_tell_of_one_loss_tell_of_one_fault(tmp_path: Path) -> None:
    history = read_history(
        ledger(
            tmp_path,
            lost("a", 1, 60.0, "d", first_step_at=60.5),
            lost("b", 1, 60.1, "d", first_step_at=60.75),
            lost("c", 1, 60.2, "d", first_step_at=60.6),
            lost("a", 2, 90.0, "c", first_step_at=91.0),
        )
    )
    assert [(fault.at_s, fault.node) for fault in history.faults] == [(0.0, 3), (30.0, 2)]
    first = history.faults[0].measured
    assert first is not None
    assert first.total_s is None  # nobody stopped, they went on
    assert first.first_step_s == 0.75  # until the last of them had made a step


def test_a_complaint_of_a_peer_is_part_of_the_loss_that_explains_it(tmp_path: Path) -> None:
    complaint = {"status": "connection refused or reset", "severity": 3, "action": "reattempt"}
    history = read_history(
        ledger(
            tmp_path,
            incident("c", 1, 60.5, occurred_at=60.0, stopped_at=60.5, superseded_by=2, **complaint),
            lost("c", 2, 62.5, "d", stopped_at=62.5, regrouped_at=62.75, first_step_at=63.0),
            incident("c", 3, 90.0, first_step_at=91.0, **complaint),
        )
    )
    loss, alone = history.faults
    assert (loss.kind, loss.at_s, loss.node) == (Status.LOST_CONNECTION, 0.0, 1)
    assert loss.measured is not None
    assert (loss.measured.noticed_s, loss.measured.total_s) == (2.5, 3.0)
    assert (alone.kind, alone.at_s, alone.node) == (Status.CONNECTION_REFUSED_OR_RESET, 30.0, 0)


def test_two_nodes_lost_at_once_are_two_faults_measured_once(tmp_path: Path) -> None:
    both = lost("a", 1, 60.0, "c", first_step_at=61.0)
    both = replace(both, reason="c is lost: its process has ended. d is lost: its lease in the store is gone.")
    history = read_history(ledger(tmp_path, both))
    assert [(fault.node, fault.measured is None) for fault in history.faults] == [(1, False), (2, True)]


def test_ledgers_of_several_jobs_are_one_history(tmp_path: Path) -> None:
    ledger(tmp_path / "chat", incident("a", 1, 60.0, first_step_at=61.0))
    ledger(tmp_path / "code", incident("b", 1, 60.5, run_id="code", first_step_at=61.0))
    history = read_history(tmp_path)
    jobs = [fault.measured.job for fault in history.faults if fault.measured]
    assert jobs == ["chat", "code"]  # faults of different runs are never one
    assert [fault.at_s for fault in history.faults] == [0.0, 0.5]


def test_clocks_of_hosts_do_not_have_to_agree_in_what_they_count_from(tmp_path: Path) -> None:
    history = read_history(
        ledger(tmp_path, incident("b", 1, 60.0, first_step_at=61.0), incident("c", 1, 70.0, first_step_at=71.0))
    )
    assert [fault.at_s for fault in history.faults] == [0.0, 10.0]


def test_a_malformed_ledger_is_refused_with_its_line(tmp_path: Path) -> None:
    path = ledger(tmp_path, incident("a", 1, 60.0))
    with path.open("a", encoding="utf-8") as file:
        file.write('{"number": "two"}\n')
    with pytest.raises(ValueError, match=r"incidents\.jsonl:2: not an incident record: number must be int"):
        read_history(path)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"status": "cosmic ray"}, "status is 'cosmic ray': known are collective time-out"),
        ({"time": "yesterday"}, "time is 'yesterday': it must be ISO 8601"),
        ({"occurred_at": None, "noticed_at": None}, "neither occurred_at nor noticed_at"),
        ({"first_step_at": 1.0}, "its moments are not in their order"),
        ({"occurred_at": float("nan")}, "its moments are not in their order"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, Any], problem: str) -> None:
    path = ledger(tmp_path, replace(incident("a", 1, 60.0), **wrong))
    with pytest.raises(ValueError) as raised:
        read_history(path)
    said = str(raised.value)
    assert said.startswith(f"{path}:1: incident 1 of run chat on a: ")
    assert problem in said


def test_an_incident_outside_of_what_was_said_of_the_history_is_refused(tmp_path: Path) -> None:
    path = ledger(tmp_path, incident("a", 1, 60.0))
    with pytest.raises(ValueError, match=r"incident 1 of run chat on a was at 60\.000 s, outside"):
        read_ledgers((path,), started_at=NOON, duration_s=30.0)
    with pytest.raises(ValueError, match="outside"):
        read_ledgers((path,), started_at=NOON + 90.0)


def test_a_folder_without_ledgers_and_a_ledger_without_incidents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no incident ledger"):
        read_history(tmp_path)
    with pytest.raises(ValueError, match="nothing: there is no incident ledger"):
        read_ledgers(())
    (tmp_path / "incidents.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"incidents\.jsonl:1: the ledger has no incident"):
        read_history(tmp_path)
