import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import Ledger, default_ledger, find_ledgers, read_ledger

INCIDENT = Incident(
    number=1,
    run_id="run",
    job="train.py",
    host="node-1",
    time="",
    generation=1,
    rank=3,
    status="killed by signal",
    severity=2,
    method="process supervision",
    reason="rank 3 was killed.",
    action="restart",
    decision="Restart 1 of 3.",
    restarts_used=1,
    max_restarts=3,
    consequences=("rank 0 lost its peer.",),
    occurred_at=10.0,
    noticed_at=10.002,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a" / "b" / "incidents.jsonl"


def test_what_was_recorded_is_read_back(path):
    recorded = Ledger(path).record(INCIDENT)
    assert read_ledger(path) == ([recorded], [])
    assert replace(recorded, time="") == INCIDENT


def test_nothing_is_created_before_the_first_record(path):
    ledger = Ledger(path)
    assert not path.parent.parent.exists()
    ledger.record(INCIDENT)
    assert path.exists()


def test_the_time_is_the_wall_clock_with_its_offset(path):
    before = datetime.now().astimezone()
    time = datetime.fromisoformat(Ledger(path).record(INCIDENT).time)
    assert time.tzinfo is not None
    assert -0.001 <= (time - before).total_seconds() < 60


def test_all_records_of_an_incident_carry_the_time_of_the_first(path):
    moments = iter([datetime(2026, 1, 1, 12), datetime(2026, 1, 1, 13)])
    ledger = Ledger(path, now=lambda: next(moments))
    first, second = ledger.record(INCIDENT), ledger.record(INCIDENT)
    assert first.time == second.time
    assert first.time.startswith("2026-01-01T12")


def test_a_given_time_is_kept(path):
    assert Ledger(path).record(replace(INCIDENT, time="then")).time == "then"


def test_without_a_path_the_time_is_filled_in_all_the_same():
    assert Ledger(None).record(INCIDENT).time


def test_the_last_record_wins_in_the_order_of_first_appearance(path):
    ledger = Ledger(path)
    ledger.record(INCIDENT)
    ledger.record(replace(INCIDENT, host="node-2"))
    ledger.record(replace(INCIDENT, action="fail"))
    found, _ = read_ledger(path)
    assert [(each.host, each.action) for each in found] == [("node-1", "fail"), ("node-2", "restart")]


def test_a_later_job_with_the_same_run_id_hides_nothing(path):
    Ledger(path).record(replace(INCIDENT, time="2026-01-01T00:00:00+00:00"))
    Ledger(path).record(replace(INCIDENT, time="2026-01-02T00:00:00+00:00"))
    assert len(read_ledger(path)[0]) == 2


def test_a_record_is_one_write(path, monkeypatch):
    written = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(data) or real(fd, data))
    Ledger(path).record(replace(INCIDENT, stack="x\n" * 10_000))
    assert len(written) == 1
    assert written[0].count(b"\n") == 1


def test_launchers_of_several_nodes_share_a_file(path):
    code = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from unicron_elastic.base.incident import Incident; from unicron_elastic.base.ledger import Ledger\n"
        "import json; incident = Incident.from_json(json.loads(sys.argv[2])); ledger = Ledger(Path(sys.argv[3]))\n"
        "for n in range(100): ledger.record(replace(incident, host=sys.argv[1], number=n, stack='x' * 5000))\n"
    )
    record = json.dumps(INCIDENT.to_json())
    writers = [subprocess.Popen([sys.executable, "-c", code, host, record, str(path)]) for host in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    found, problems = read_ledger(path)
    assert problems == []
    assert {(each.host, each.number) for each in found} == {(host, n) for host in "abc" for n in range(100)}


def test_a_ledger_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    ledger = Ledger(tmp_path / "file" / "incidents.jsonl", said.append)
    assert ledger.record(INCIDENT).time
    ledger.record(INCIDENT)
    assert len(said) == 1
    assert said[0].endswith("incidents.jsonl: Not a directory. The job goes on.")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_is_said(tmp_path):
    (tmp_path / "incidents.jsonl").symlink_to("/dev/full")
    said = []
    Ledger(tmp_path / "incidents.jsonl", said.append).record(INCIDENT)
    assert "No space left on device" in said[0]


def test_a_torn_line_costs_only_itself(path):
    ledger = Ledger(path)
    ledger.record(INCIDENT)
    with open(path, "a") as file:
        file.write('{"number": 2, "run')
    ledger.record(replace(INCIDENT, number=3))
    found, problems = read_ledger(path)
    assert [each.number for each in found] == [1, 3]
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[1]", "a JSON object was expected"),
        (b'{"number": 1}', "missing"),
        (b"\xff", "codec can't decode"),
        (b"[" * 100_000, "recursion"),
        (json.dumps({**INCIDENT.to_json(), "severity": "bad"}).encode(), "severity must be int"),
        (json.dumps({**INCIDENT.to_json(), "number": True}).encode(), "number must be int"),
        (json.dumps({**INCIDENT.to_json(), "consequences": None}).encode(), "consequences must be tuple"),
        (json.dumps({**INCIDENT.to_json(), "noticed_at": "now"}).encode(), "noticed_at must be float | None"),
    ],
)
def test_a_bad_line_is_skipped_and_reported(path, line, reason):
    ledger = Ledger(path)
    ledger.record(INCIDENT)
    with open(path, "ab") as file:
        file.write(line + b"\n\n")
    ledger.record(replace(INCIDENT, number=2))
    found, [problem] = read_ledger(path)
    assert [each.number for each in found] == [1, 2]
    assert problem.startswith(f"{path}:2: ")
    assert reason in problem


def test_fields_of_a_later_version_are_ignored(path):
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**INCIDENT.to_json(), "flops_lost": 1e15}) + "\n")
    assert read_ledger(path) == ([INCIDENT], [])


def test_ledgers_are_found_at_any_depth_the_newest_first(tmp_path):
    for age, name in enumerate(["x/incidents.jsonl", "incidents.jsonl", "y/z/incidents.jsonl"]):
        Ledger(tmp_path / name).record(INCIDENT)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "other.jsonl").write_text("")
    found = [str(path.relative_to(tmp_path)) for path in find_ledgers(tmp_path)]
    assert found == ["x/incidents.jsonl", "incidents.jsonl", "y/z/incidents.jsonl"]
    assert find_ledgers(tmp_path / "absent") == []


def test_the_default_place_is_the_log_folder_else_the_users_state_folder(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_ledger("run", Path("/logs/run_1")) == Path("/logs/run_1/incidents.jsonl")
    assert default_ledger("run-1.a", None) == Path("/state/unicron/run-1.a/incidents.jsonl")


@pytest.mark.parametrize("state_home", ["", "relative"])
def test_an_unusable_state_home_is_ignored(monkeypatch, state_home):
    monkeypatch.setenv("XDG_STATE_HOME", state_home)
    monkeypatch.setenv("HOME", "/home/me")
    assert default_ledger("run", None) == Path("/home/me/.local/state/unicron/run/incidents.jsonl")


def test_a_user_without_a_home_has_a_place_too(monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)

    def no_home():
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert default_ledger("run", None).parent.parent.name == f"unicron-{os.getuid()}"


@pytest.mark.parametrize("run_id", ["../../etc", "..", "a/b", "", "x" * 5000, "\0", "über"])
def test_a_run_id_never_leaves_its_folder(monkeypatch, run_id):
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    path = default_ledger(run_id, None)
    assert path.parent.parent == Path("/state/unicron")
    assert path.parent.name not in ("", ".", "..")
    assert len(path.parent.name) <= 100
    assert path.parent.name.isascii()


def test_evidence_is_kept_beside_the_ledger(tmp_path: Path) -> None:
    kept = Ledger(tmp_path / "run" / "incidents.jsonl").keep_evidence("rank 0 hängt 🏖️ \udc80")
    assert kept is not None
    assert Path(kept).parent == tmp_path / "run"
    assert Path(kept).read_text(encoding="utf-8") == "rank 0 hängt 🏖️ ?"


def test_evidence_that_cannot_be_kept_is_no_reason_to_end(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    assert Ledger(None, said.append).keep_evidence("text") is None
    assert Ledger(Path("/dev/null"), said.append).keep_evidence("text") is None
    assert Ledger(Path("/"), said.append).keep_evidence("text") is None
    assert said == []
    assert Ledger(tmp_path / "file" / "incidents.jsonl", said.append).keep_evidence("text") is None
    assert len(said) == 1
