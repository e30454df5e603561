"""The record of a fault as a value: the cost of its phases, and its way to plain data and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unicron_elastic.base.incident import PHASES, Incident


def _incident(**known: Any) -> Incident:
    fixed = {
        "number": 2,
        "run_id": "r1",
        "job": "train.py",
        "host": "n1",
        "time": "2025-01-02T03:04:05.678+01:00",
        "generation": 3,
        "rank": 5,
        "status": "killed by signal",
        "severity": 2,
        "method": "process supervision",
        "reason": "rank 5 was killed by signal 9 (SIGKILL).",
        "action": "restart",
        "decision": "Restart 1 of 3.",
        "restarts_used": 1,
        "max_restarts": 3,
    }
    return Incident(**{**fixed, **known})


MOMENTS = {f"{phase}_at": 100.0 + 2**number / 4 for number, phase in enumerate(PHASES)}


def test_each_phase_costs_the_time_since_the_moment_before_it() -> None:
    incident = _incident(**MOMENTS)
    assert [incident.phase_ms(phase) for phase in PHASES] == [None, 250.0, 500.0, 1000.0, 2000.0]
    assert incident.total_ms == 3750.0


@pytest.mark.parametrize("missing", PHASES)
def test_a_moment_that_has_not_come_costs_nothing_yet(missing: str) -> None:
    incident = _incident(**{**MOMENTS, f"{missing}_at": None})
    unknown = {phase for phase in PHASES[1:] if incident.phase_ms(phase) is None}
    position = PHASES.index(missing)
    assert unknown == {*PHASES[max(position, 1) : position + 2]}
    assert (incident.total_ms is None) == (missing in ("occurred", "first_step"))


def test_a_record_survives_its_way_to_plain_data_and_back() -> None:
    incident = _incident(**MOMENTS, exit_code=-9, consequences=("rank 4 raised.",), superseded_by=3)
    data = json.loads(json.dumps(incident.to_json()))
    assert data["phases_ms"] == {"noticed": 250.0, "stopped": 500.0, "regrouped": 1000.0, "first_step": 2000.0}
    assert data["total_ms"] == 3750.0
    assert Incident.from_json(data) == incident


def test_records_of_other_versions_are_read() -> None:
    data = _incident().to_json()
    del data["superseded_by"]
    data["added_later"] = 7
    assert Incident.from_json(data) == _incident()


@pytest.mark.parametrize("name", ["number", "rank", "occurred_at", "state_s", "state_bytes"])
@pytest.mark.parametrize("value", [2**63, -(2**63), 10**400])
def test_integers_that_need_not_fit_a_float_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^not an incident record: {name} must be "):
        Incident.from_json({**_incident().to_json(), name: value})
    assert getattr(Incident.from_json({**_incident().to_json(), name: 2**63 - 1}), name) == 2**63 - 1


def test_a_missing_field_is_named() -> None:
    data = _incident().to_json()
    del data["severity"]
    with pytest.raises(ValueError, match="severity"):
        Incident.from_json(data)
