"""Workers are told the configuration for the nodes that their job has, and begin again when it must be another."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.launcher.config.forwarded import PLANNED_JOB
from unicron_elastic.planning.model.configurations import Configuration
from unicron_elastic.planning.model.configured import (
    CONFIGURATION,
    CONFIGURATIONS,
    configuration_text,
    configurations_text,
    parse_configuration,
)
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))
SCRIPT = f"""
import os, runpy, sys
print("CONFIGURATION", os.environ.get({CONFIGURATION!r}), flush=True)
if len(sys.argv) > 1:
    runpy.run_path({IN_PLACE!r}, run_name="__main__")
"""
KNOWN = {1: Configuration(replicas=1), 2: Configuration(replicas=1, tensor=2), 3: Configuration(replicas=3)}


def test_they_are_told_that_of_as_many_nodes_as_there_are(launcher: Any) -> None:
    script = launcher.script("told.py", SCRIPT)
    run = launcher.run("--standalone", "--nproc-per-node=1", script, env={CONFIGURATIONS: configurations_text(KNOWN)})
    assert run.out == f"CONFIGURATION {configuration_text(KNOWN[1])}\n", run.err
    assert launcher.run("--standalone", "--nproc-per-node=1", script).out == "CONFIGURATION None\n"


@pytest.mark.parametrize(("more", "count"), [({}, 1), ({PLANNED_JOB: "chat"}, 0)], ids=["by-hand", "planned"])
def test_a_mistyped_variable_is_told_where_it_was_typed_and_not_by_each_node(
    launcher: Any, more: dict[str, str], count: int
) -> None:
    script = launcher.script("nothing.py", "")
    run = launcher.run("--standalone", script, env={"UNICRON_ON_FAULTS": "observe", **more})
    assert run.wait() == 0, run.err
    assert run.err.count("UNICRON_ON_FAULTS") == count


@pytest.mark.slow
def test_in_place_they_begin_again_if_a_node_departs_and_the_model_is_best_divided_otherwise(launcher: Any) -> None:
    script = launcher.script("told.py", SCRIPT)
    with EmbeddedEtcd() as etcd:
        runs = {
            name: launcher.start(
                "--nnodes=1:3", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
                "--rdzv-id=job", "--rdzv-conf=last_call_timeout=20,lease_ttl=30", "--max-restarts=0",
                "--local-addr=127.0.0.1", script, "--steps=20", "--step-s=0.05", "--say-steps",
                env={"UNICRON_NODE_NAME": name, CONFIGURATIONS: configurations_text(KNOWN)},
            )
            for name in "abc"
        }  # fmt: skip
        for run in runs.values():
            run.until_line(r"^STEP 3 ")
        with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:
            store.put(JobKeys("job").recalled("c"), b"job b gains more from it.")
        assert [run.wait() for run in runs.values()] == [0, 0, 0], [run.err for run in runs.values()]
    for name in "ab":
        told = re.findall(r"^CONFIGURATION (.*)$", runs[name].out, re.MULTILINE)
        assert [parse_configuration(each) for each in told] == [KNOWN[3], KNOWN[2]]
        assert len(set(re.findall(r"^STEP \d+ pid (\d+)", runs[name].out, re.MULTILINE))) == 2
        assert "On 2 nodes DP 1 x TP 2 x PP 1, micro-batch 1 is best, and it runs with TP 1 x PP 1" in runs[name].err
    for rank in range(2):
        assert json.loads((launcher.folder / f"final-{rank}.json").read_text())["world_size"] == 2
