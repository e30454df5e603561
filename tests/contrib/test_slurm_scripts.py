"""The batch scripts: they are bash, have few options that a reader must know, and give unicron-run what it knows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unicron_elastic.launcher.config.arguments import get_args_parser

FOLDER = Path(__file__).parents[2] / "contrib" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
SHELLCHECK = shutil.which("shellcheck")

# What Debian's sbatch 22.05 and all later ones take; --account and the like are the site's.
OPTIONS = {
    "array", "exclusive", "job-name", "no-kill", "nodes", "ntasks", "ntasks-per-node", "open-mode", "requeue", "signal",
    "time",
}  # fmt: skip


def test_there_are_scripts() -> None:
    assert [path.name for path in SCRIPTS] == ["unicron-node.sbatch", "unicron.sbatch"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    assert SHELLCHECK is not None
    command = [SHELLCHECK, "--shell=bash", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_options_of_sbatch_come_first_and_are_known(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/bin/bash"
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    given = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(given) < first_command  # sbatch reads none behind a command
    words = re.findall(r"--([a-z-]+)", " ".join(lines[number].partition(" #")[0] for number in given))
    assert set(words) <= OPTIONS
    assert {"signal", "requeue", "open-mode"} <= set(words)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_unicron_run_is_given_options_that_it_has(script: Path) -> None:
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^.*srun --.*$", text, re.MULTILINE)
    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    options = set(re.findall(r"(--[a-z-]+) ", command.partition(" unicron-run ")[2]))
    assert {"--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"} <= options <= known
    assert command.rstrip().endswith('"$@" &')


@pytest.mark.parametrize(
    ("by_name", "own", "host"),
    [
        ("127.0.1.1", "10.1.2.3 fd00::2", "10.1.2.3"),
        ("127.0.1.1", "fd00::2 10.1.2.3 10.4.5.6", "10.1.2.3"),
        ("10.9.9.9", "10.1.2.3 fd00::2", "10.9.9.9"),
        ("", "10.1.2.3", "10.1.2.3"),
        ("127.0.1.1", "fd00::2", "127.0.0.1"),
    ],
)
def test_etcd_is_started_where_other_nodes_find_it(tmp_path: Path, by_name: str, own: str, host: str) -> None:
    fakes = {
        "getent": f'test -z "{by_name}" || printf "%s STREAM node\\n%s DGRAM\\n" {by_name} {by_name}',
        "hostname": f'if [ "$*" = -I ]; then echo "{own} "; else echo node; fi',
        "unicron": f'echo "$*" > {tmp_path}/pipe',
        "srun": f"cat {tmp_path}/pipe",  # until etcd was started
        "scontrol": '[ "$*" != "show hostnames node" ] || echo node',
    }
    for name, text in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    os.mkfifo(tmp_path / "pipe")
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node",
        "EVENTS": "",
    }
    command = ["bash", FOLDER / "unicron.sbatch", "train.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"etcd --host {host} --port 20007\n", "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_who_forgets_the_training_script_is_told(script: Path, tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "SLURM_SUBMIT_DIR": str(tmp_path), "ETCD": "host:2379"}
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, script], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("sbatch ")
