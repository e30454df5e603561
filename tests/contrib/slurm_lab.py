"""A Slurm of its own on this machine: one slurmctld and a slurmd for each of its nodes, with no other user and no key.

It takes Slurm from PATH, or from a folder into which Debian's packages were unpacked (``dpkg -x``), which the variable
UNICRON_TEST_SLURM names. Only root can be other users, so without root it runs jobs of the user who runs the tests.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DEADLINE_S = 60.0
GRACE_S = 20  # that a preempted job has
_PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "scontrol", "sinfo", "squeue", "sbatch", "srun", "scancel")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_WAYS = ("/usr/sbin", "/usr/local/sbin")  # where daemons are, also if the PATH of a user has not got it


def find_slurm() -> dict[str, str]:
    """Slurm's programs by name; {} if one is missing."""
    root = os.environ.get("UNICRON_TEST_SLURM")
    if root:
        ways = [str(Path(root, way)) for way in ("usr/bin", "usr/sbin")]
    else:
        ways = [*os.environ.get("PATH", "").split(":"), *_WAYS]
    path = ":".join(ways)
    found = {name: shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path) for name in _PROGRAMS}
    return {name: where for name, where in found.items() if where} if all(found.values()) else {}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


class SlurmLab:
    """Slurm with the nodes n1, n2, ... in ``folder``; its partition ``urgent`` takes nodes from ``train``."""

    def __init__(self, folder: Path, nodes: int, cpus: int = 2, more: str = "") -> None:
        """``more``: further lines of slurm.conf."""
        self.folder = folder
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self._programs = find_slurm()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._conf = folder / "slurm.conf"
        control, *ports = _free_ports(nodes + 1)
        self._conf.write_text(self._text(control, dict(zip(self.names, ports, strict=True)), cpus) + more)
        self.environ = {"SLURM_CONF": str(self._conf)}
        if root := os.environ.get("UNICRON_TEST_SLURM"):
            libraries = Path(root, _LIBRARIES)
            self.environ["LD_LIBRARY_PATH"] = f"{libraries}:{libraries}/slurm-wlm"
        folders = {str(Path(program).parent) for program in self._programs.values()}
        commands = folder / "bin"  # by the names under which scripts know them
        commands.mkdir()
        for name, program in self._programs.items():
            (commands / name).symlink_to(program)
        self.environ["PATH"] = ":".join([str(commands), *sorted(folders), os.environ["PATH"]])

    def _text(self, control: int, ports: Mapping[str, int], cpus: int) -> str:
        user, host = pwd.getpwuid(os.getuid()).pw_name, socket.gethostname().partition(".")[0]
        root = os.environ.get("UNICRON_TEST_SLURM")
        plugins = f"PluginDir={root}/{_LIBRARIES}/slurm-wlm\n" if root else ""
        nodes = "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000\n"
            for name, port in ports.items()
        )
        return f"""{plugins}ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
ReturnToService=2
SlurmdTimeout=10
KillWait=5
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{nodes}PartitionName=train Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} MaxTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""

    def begin(self) -> None:
        """Starts the daemons and waits until all nodes are idle."""
        (self.folder / "state").mkdir()
        self._start("slurmctld", "slurmctld", "-D")
        for name in self.names:
            self.start_node(name)
        self.until(lambda: set(self.states().values()) == {"IDLE"}, "idle nodes")

    def start_node(self, name: str) -> None:
        """Starts the slurmd of a node."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._start(name, "slurmd", "-D", "-N", name, "-d", self._programs["slurmstepd"])

    def kill_node(self, name: str) -> None:
        """Kills the slurmd of a node, as nothing else is that Slurm has there."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait()

    def _start(self, name: str, program: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                [self._programs[program], *words], env={**os.environ, **self.environ}, stdout=out, stderr=out
            )

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands; whether it went well is for the caller to see."""
        environ = {**os.environ, **self.environ, **(env or {})}
        return subprocess.run(
            [self._programs[words[0]], *words[1:]],
            env=environ, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip

    def states(self) -> dict[str, str]:
        """By node, as ``scontrol show node`` has them."""
        lines = self.run("scontrol", "--oneliner", "show", "node").stdout.splitlines()
        told = [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in lines]
        return {each["NodeName"]: each["State"] for each in told if "NodeName" in each}

    def job_state(self, job: str) -> str:
        """Of a job that Slurm still knows."""
        told = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return next((word.partition("=")[2] for word in told.split() if word.startswith("JobState=")), "")

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Waits for it; past the deadline it tells what Slurm has logged."""
        end = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > end:
                paths = [*self.folder.glob("*.out"), *self.folder.glob("slurm*.log")]
                logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in paths)
                raise AssertionError(f"no {what} in {deadline_s:g} s\n{logs}")
            time.sleep(0.1)

    def end(self) -> None:
        """Ends all jobs and daemons."""
        self.run("scancel", "--full", "--signal=KILL", f"--user={pwd.getpwuid(os.getuid()).pw_name}")
        self.run("scancel", f"--user={pwd.getpwuid(os.getuid()).pw_name}")
        for daemon in self._daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
