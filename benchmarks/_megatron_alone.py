"""What is measured without a fault: process groups made anew, and the memory that ``attach`` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from _launchers import LauncherEndedError
from _megatron_faults import problems
from _megatron_jobs import Split, torchrun, unicron
from _recovery_job import RunningJob
from _scenarios import Run

POLL_S = 0.1
START_S = 60.0
WARM_UP = 5  # the first times are slower, and threads and files are still getting more
GROUPS = (Split("DP2", 2), Split("DP2 x TP2", 4, tensor=2), Split("DP2 x TP2 x PP2", 8, tensor=2, pipeline=2))
MEMORY = (Split("DP2", 2), Split("DP4", 4))


def groups(split: Split, times: int) -> Run:
    """Make the groups of a world anew so many times, after some that do not count."""
    run = Run("groups", "torchrun", split.ranks, 0, notes={"split": split.name})
    options = (*split.options, f"--steps={times + WARM_UP}")
    launched = replace(torchrun(worker="megatron_groups.py"), restarts=0)
    with RunningJob(launched, split.ranks, options, START_S + times) as job:
        with problems(run, job):
            _wait_ended(job)
        path = job.folder / "groups"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    counted = lines[WARM_UP:]
    for name in ("met_ms", "rebuilt_ms"):
        run.notes[name] = [line[name] for line in counted]
    for name in ("threads", "files"):
        run.notes[name] = [line[name] for line in counted]
    return run


def memory(split: Split) -> Run:
    """Count what the ranks of a job hold."""
    run = Run("memory", "unicron-run", split.ranks, 0)
    run.notes = {"split": split.name, "is_distributed": split.is_distributed}
    launched = replace(unicron(worker="megatron_memory.py", attaches=False), restarts=0)
    with RunningJob(launched, split.ranks, split.options, START_S) as job:
        with problems(run, job):
            _wait_ended(job)
        run.notes["lines"] = list(_lines(job, split.ranks))
    return run


def _lines(job: RunningJob, ranks: int) -> Iterator[dict[str, Any]]:
    for rank in range(ranks):
        path = job.folder / f"memory-{rank}"
        if path.exists():
            yield json.loads(path.read_text())


def _wait_ended(job: RunningJob) -> None:
    """Until it ends well. Raises what ``wait`` raises, and LauncherEndedError if it ends badly."""
    while (code := job.exit_code()) is None:
        job.wait("end", POLL_S)
    if code != 0:
        raise LauncherEndedError(f"the job exited with {code}")
