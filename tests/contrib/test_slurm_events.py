"""What Slurm says of its nodes, as scontrol 22.05 prints it, and what the training cluster is told of that."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "contrib" / "slurm" / "slurm_events.py"

# As printed; fields that nothing reads are left out.
IDLE = "NodeName=n1 Arch=x86_64 CPUTot=2 OS=Linux 6.18 #1 SMP PREEMPT_DYNAMIC @0  State=IDLE Weight=1 Partitions=a,b "
DRAINED = (
    "NodeName=n2 Arch=x86_64 OS=Linux 6.18 #1 SMP State=ALLOCATED+DRAIN ThreadsPerCore=1 ExtSensorsTemp=n/s "
    "Reason=a loud fan = noise [root@2026-11-22T11:40:25]"
)
SILENT = "NodeName=n3 State=DOWN+NOT_RESPONDING Weight=1 Reason=Not responding [root@2026-11-22T11:40:56] Comment=x"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_events", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


events: Any = _load()


def _node(name: str, state: str, reason: str = "") -> Any:
    return events.SlurmNode(name, frozenset(state.split("+")), reason)


def _seen(name: str, kept_out: str = "", has_agent: bool = True) -> Any:
    return events.ClusterNode(name, has_agent, kept_out)


def test_nodes_are_read_as_scontrol_prints_them() -> None:
    idle, drained, silent = events.parse_nodes(f"{IDLE}\n{DRAINED}\n\n{SILENT}\nnonsense\n")
    assert (idle.name, idle.is_out, idle.reason) == ("n1", False, "")
    assert (drained.name, drained.is_out) == ("n2", True)
    assert drained.reason == "a loud fan = noise [root@2026-11-22T11:40:25]"
    assert (silent.is_out, silent.reason) == (True, "Not responding [root@2026-11-22T11:40:56]")


@pytest.mark.parametrize(
    ("state", "is_out"),
    [("IDLE", False), ("MIXED", False), ("ALLOCATED+PLANNED", False), ("IDLE*", False), ("COMPLETING", False),
     ("DOWN*", True), ("IDLE+DRAIN", True), ("MIXED+DRAIN+MAINTENANCE", True), ("ALLOCATED+FAIL", True),
     ("IDLE+POWERING_DOWN", True), ("IDLE+DRAIN*", True)],
)  # fmt: skip
def test_a_state_says_whether_jobs_may_be_there(state: str, is_out: bool) -> None:
    (node,) = events.parse_nodes(f"NodeName=n1 State={state} Weight=1")
    assert node.is_out is is_out


def test_who_slurm_drains_is_drained_with_slurms_reason() -> None:
    (action,) = events.decide([_node("n2", "ALLOCATED+DRAIN", "a fan [root@11:40]"), _node("n1", "IDLE")], [])
    assert action == events.Drain("n2", "Slurm: a fan [root@11:40] (DRAIN)")
    (action,) = events.decide([_node("n2", "DOWN+DRAIN")], [_seen("n2")])
    assert action == events.Drain("n2", "Slurm: no reason is given (DOWN+DRAIN)")


def test_who_slurm_takes_back_is_let_in_again_but_only_if_slurm_had_kept_it_out() -> None:
    nodes = [_node("n1", "IDLE"), _node("n2", "ALLOCATED"), _node("n3", "IDLE")]
    seen = [_seen("n1", "Slurm: a fan (DRAIN)"), _seen("n2", "a broken GPU"), _seen("n3")]
    assert events.decide(nodes, seen) == [events.Undrain("n1")]


def test_what_is_kept_out_is_not_drained_twice() -> None:
    nodes = [_node("n1", "IDLE+DRAIN"), _node("n2", "DOWN")]
    assert events.decide(nodes, [_seen("n1", "Slurm: x"), _seen("n2", "a broken GPU")]) == []


def test_a_drained_node_is_given_back_when_it_has_left_and_is_the_jobs() -> None:
    drained = [_node("n2", "ALLOCATED+DRAIN")]
    gone, there = [_seen("n2", "Slurm: x", has_agent=False)], [_seen("n2", "Slurm: x")]
    assert events.decide(drained, gone, ["n1", "n2", "n3"]) == [events.GiveBack("n2")]
    assert events.decide(drained, there, ["n1", "n2", "n3"]) == []  # it still trains
    assert events.decide(drained, gone, ["n2", "n1"]) == []  # the batch script runs there
    assert events.decide(drained, gone, ["n1", "n3"]) == []  # it was given back
    assert events.decide([_node("n2", "DOWN+DRAIN")], gone, ["n1", "n2"]) == []  # Slurm has taken it


def test_the_cluster_is_read_as_unicron_prints_it() -> None:
    kept_out = {"node": "a", "reason": "a fan", "since": 1.0, "until": None, "by": "root"}
    told = [
        {"host": "a", "node_id": None, "quarantine": kept_out},
        {"host": "b", "node_id": "b/1", "quarantine": None},
        {"host": "b", "node_id": None, "quarantine": None},
    ]
    assert events.parse_cluster(json.dumps(told)) == [_seen("a", "a fan", has_agent=False), _seen("b")]
    for odd in ('[{"host": "a"}]', "[1]", "no JSON"):
        with pytest.raises(ValueError):
            events.parse_cluster(odd)


def _run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_"))}
    command = [sys.executable, "-S", str(PROGRAM), *words]
    return subprocess.run(command, env=kept | environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--once"], "UNICRON_ETCD_ENDPOINT is to name the cluster's etcd"),
        (["--every", "0"], "--every takes 0.1 to 3600 seconds, not 0"),
        (["--job", "1", "--node", "n1"], "not allowed with"),
    ],
)
def test_bad_use_is_one_sentence(words: list[str], told: str) -> None:
    done = _run(*words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_without_slurm_it_says_so_and_goes_on(tmp_path: Path) -> None:
    done = _run("--once", UNICRON_ETCD_ENDPOINT="127.0.0.1:1", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "[slurm] scontrol --oneliner show cannot be run: " in done.stderr
    assert "Traceback" not in done.stderr
