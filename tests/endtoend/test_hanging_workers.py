"""Workers that hang in whole runs: noticed, named, recorded with evidence, restarted or let go on."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

# Steps of 25 ms: enough looks for the statistics to warm up before the fault in step 50.
STEPS = textwrap.dedent(
    """
    import os, time
    import torch, torch.distributed as dist
    import torch.distributed.nn  # before the group, which it would else hold at exit: torch then aborts now and then
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, (10 if restarts == int(os.environ.get("LAST", "1")) else int(os.environ.get("STEPS", "56")))):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            exec(os.environ.get("AFTER_FIRST_STEP", ""))
        time.sleep(0.025)
    os.write(1, f"DONE {restarts} {os.environ['RANK']}\\n".encode())
    del model
    dist.destroy_process_group()
    """
)
FOLDERS = [folder for folder in os.environ["PATH"].split(os.pathsep) if not os.path.exists(f"{folder}/py-spy")]
RESTARTED = ["DONE 1 0", "DONE 1 1"]
UNDISTURBED = ["DONE 0 0", "DONE 0 1"]


def no_py_spy(launcher: Any) -> dict[str, str]:
    """An environment in which py-spy is there and does not work: one beside Python would be found without PATH."""
    folder = launcher.folder / "no-py-spy"
    folder.mkdir()
    (folder / "py-spy").symlink_to("/bin/false")
    return {"PATH": os.pathsep.join([str(folder), *FOLDERS])}


def start(launcher: Any, plan: str, *options: str, env: dict[str, str] | None = None) -> Any:
    launcher.script("steps.py", STEPS)
    ledger = f"--unicron-ledger={launcher.folder / 'ledger' / 'incidents.jsonl'}"
    own = ["--nproc-per-node=2", "--max-restarts=3", f"--unicron-chaos={plan}", ledger]
    return launcher.start(*own, *options, "steps.py", fast=False, env=env or {})


def done(run: Any) -> list[str]:
    return sorted(line for line in run.out.splitlines() if line.startswith("DONE"))


def incidents(launcher: Any) -> list[dict[str, Any]]:
    """Each as last recorded."""
    path = launcher.folder / "ledger" / "incidents.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({record["number"]: record for record in records}.values())


def reports(launcher: Any) -> list[str]:
    return [path.read_text() for path in sorted((launcher.folder / "ledger").glob("evidence-*.txt"))]


def of_ranks(report: str) -> list[str]:
    """What a report says of rank 0 and of rank 1."""
    parts = re.split(r"^== rank \d+, ", report, flags=re.MULTILINE)[1:]
    assert len(parts) == 2, report
    return parts


def can_py_spy() -> bool:
    program = shutil.which("py-spy")
    command = [program or "", "dump", "--nonblocking", "--pid", str(os.getpid())]
    return program is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("has_py_spy", [True, False], ids=["py-spy", "faulthandler"])
def test_a_stopped_worker_is_restarted_at_once_in_each_generation(launcher: Any, has_py_spy: bool) -> None:
    if has_py_spy and not can_py_spy():
        pytest.skip("py-spy is not installed, or may not read other processes here")
    # The default patience, of 30 s, is for others: a stopped process does not go on.
    env = {"LAST": "2"} | ({} if has_py_spy else no_py_spy(launcher))
    run = start(launcher, "hang:rank=1,step=50;hang:rank=0,step=50,restart=1", env=env)
    assert run.wait() == 0, run.err
    assert done(run) == ["DONE 2 0", "DONE 2 1"]
    found = incidents(launcher)
    assert [(each["rank"], each["status"], each["action"]) for each in found] == [
        (1, "task hang", "restart"),
        (0, "task hang", "restart"),
    ]
    for each in found:
        assert f"rank {each['rank']} hangs: no step for" in each["reason"]
        assert "stopped by a signal" in each["reason"]
        assert each["total_ms"] < 15_000, each
        report = Path(each["evidence"]).read_text()
        assert report.startswith(each["reason"])
        waits, stopped = of_ranks(report) if each["rank"] == 1 else reversed(of_ranks(report))
        assert "steps.py" in waits
        assert "49 steps done" in waits
        assert "does not answer" not in waits
        assert "in state T" in stopped
        assert "does not answer" in stopped
        assert ("steps.py" in stopped) is has_py_spy  # a stopped process cannot write its own stacks
        assert (each["stack"] is not None) is has_py_spy
    headings = [report.partition("\n")[0] for report in reports(launcher)]
    told = [heading for heading in headings if heading.startswith(tuple(each["reason"] for each in found))]
    assert len(told) == 2
    # Evidence is asked for at once: of steps that were late, as those of a machine that stood still, nobody hears.
    assert [heading for heading in headings if heading not in told and heading in run.err] == []


@pytest.mark.slow
def test_who_sleeps_is_named_by_the_collective_it_has_not_begun(launcher: Any) -> None:
    run = start(launcher, "sleep:rank=1,step=50", "--unicron-hang-patience=0.1", env=no_py_spy(launcher))
    assert run.wait() == 0, run.err
    assert done(run) == RESTARTED
    (incident,) = incidents(launcher)
    assert incident["rank"] == 1
    assert "rank 1 hangs: no step for" in incident["reason"]
    assert re.search(r"at collective \d+ while others are at \d+", incident["reason"])
    assert re.search(r"Nothing has moved for \d+ s: all workers stop\.", run.err)
    waits, sleeps = of_ranks(Path(incident["evidence"]).read_text())
    for part in (waits, sleeps):
        assert "File " in part
        assert "steps.py" in part
        assert "does not answer" not in part
        assert re.search(r"process group 0: \d+ collectives begun, \d+ ended", part)
    assert "backward" in waits
    assert "_sleep" in sleeps
    assert "_sleep" in incident["stack"]


def test_who_holds_the_interpreter_is_named_as_the_one_without_an_answer(launcher: Any) -> None:
    run = start(launcher, "hang-gil:rank=1,step=50", "--unicron-hang-patience=0.1", env=no_py_spy(launcher))
    assert run.wait() == 0, run.err
    assert done(run) == RESTARTED
    (incident,) = incidents(launcher)
    assert incident["rank"] == 1
    assert "without an answer while others answer" in incident["reason"]
    waits, hangs = of_ranks(Path(incident["evidence"]).read_text())
    assert "does not answer" not in waits
    assert "does not answer" in hangs
    assert "_sleep_with_gil" in hangs  # faulthandler needs no lock


@pytest.mark.parametrize(
    "patience_s", [pytest.param(30, marks=pytest.mark.slow), pytest.param(0.5, marks=pytest.mark.slow)]
)
def test_who_goes_on_is_let_go_on(launcher: Any, patience_s: float) -> None:
    env = no_py_spy(launcher) | {
        "STEPS": "150"
    }  # long enough to be seen to go on: who stands is looked at once a second
    run = start(launcher, "sleep:rank=1,step=50,seconds=1.2", f"--unicron-hang-patience={patience_s}", env=env)
    assert run.wait() == 0, run.err
    assert done(run) == UNDISTURBED
    assert incidents(launcher) == []
    (report,) = reports(launcher)
    assert re.match(r"rank 1 hangs: no step for .*at collective \d+ while others are at \d+", report)
    if patience_s < 1:  # people hear of it when the patience is over; to act takes longer
        assert "rank 1 hangs: no step for" in run.err
        assert re.search(r"rank 1 (goes on|is at work again) after", run.err)
    else:
        assert "hangs" not in run.err


@pytest.mark.slow
def test_a_hang_that_is_only_observed_is_recorded_and_let_be(launcher: Any) -> None:
    options = ["--unicron-on-hang=observe", "--unicron-hang-patience=0.1"]
    run = start(launcher, "sleep:rank=1,step=50,seconds=2", *options, env=no_py_spy(launcher))
    assert run.wait() == 0, run.err
    assert done(run) == UNDISTURBED
    (incident,) = incidents(launcher)
    assert (incident["rank"], incident["action"]) == (1, "observe")
    assert "_sleep" in incident["stack"]
    assert all("steps.py" in part for part in of_ranks(Path(incident["evidence"]).read_text()))


@pytest.mark.slow
def test_off_is_off(launcher: Any) -> None:
    run = start(launcher, "sleep:rank=1,step=50,seconds=1", "--unicron-on-hang=off")
    assert run.wait() == 0, run.err
    assert done(run) == UNDISTURBED
    assert "[unicron]" not in run.err
    assert not (launcher.folder / "ledger").exists()


@pytest.mark.slow
def test_a_script_that_closes_our_descriptors_and_forks_is_watched_all_the_same(launcher: Any) -> None:
    # Nobody answers, and there is no place for stacks and records: what hangs is restarted nevertheless.
    (launcher.folder / "ledger").write_text("a file where a folder should be")
    fork = "if os.fork() == 0: os.dup2(2, 1); time.sleep(600)\n"
    close = "for fd in range(3, 256):\n    if 'unicron' in (n := os.readlink(f'/proc/self/fd/{fd}') "
    close += (
        "if os.path.exists(f'/proc/self/fd/{fd}') or os.path.islink(f'/proc/self/fd/{fd}') else ''): os.close(fd)\n"
    )
    env = no_py_spy(launcher) | {"AFTER_FIRST_STEP": fork + close}
    run = start(launcher, "hang:rank=1,step=50", env=env)
    assert run.wait() == 0, run.err
    assert done(run) == RESTARTED
    assert "rank 1 hangs: no step for" in run.err
    assert run.err.count("Incidents cannot be recorded") == 1
    assert "Traceback" not in run.err


def test_the_end_of_the_launcher_does_not_wait_for_evidence(launcher: Any) -> None:
    tools = launcher.folder / "tools"
    tools.mkdir()
    (tools / "py-spy").write_text('#!/bin/sh\necho > "$PROBE/reading"\nexec sleep 600\n')
    (tools / "py-spy").chmod(0o755)
    run = start(launcher, "sleep:rank=1,step=50", env={"PATH": os.pathsep.join([str(tools), *FOLDERS])})
    run.until((launcher.folder / "reading").exists, "a reader of stacks")
    began = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() != 0
    assert time.monotonic() - began < 10.0
    run.assert_gone()
    assert "Traceback" not in run.err


@pytest.mark.slow
def test_a_person_at_a_debugger_is_no_hang(launcher: Any) -> None:
    launcher.script(
        "prompt.py",
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nweights = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(weights.parameters())\n"
        "for step in range(1, 31):\n    dist.all_reduce(torch.ones(1))\n"
        "    if step == 25:\n        dist.breakpoint(0)\n"
        "    optimizer.step()\n    time.sleep(0.02)\n"
        "print('DONE', flush=True)\n",
    )
    typed, stdin = pty.openpty()
    run = launcher.start("--nproc-per-node=2", "--unicron-hang-patience=0.5", "prompt.py", stdin=stdin)
    os.close(stdin)
    run.until_line(r"\(Pdb\)")
    told = run.until(lambda: "a person is at rank 0's debugger; rank 1 waits for that." in run.err, "the person")
    assert told
    time.sleep(6.0)  # longer than ten times the patience, after which a hang ends the job
    os.write(typed, b"c\n")
    assert run.wait() == 0, run.err
    os.close(typed)
    assert "hangs" not in run.err
