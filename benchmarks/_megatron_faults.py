"""Ranks are killed in the middle of a step of a Megatron-Core job, one after another; each makes one record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from _launchers import LauncherEndedError, TimedOutError, incidents
from _megatron_jobs import Launched, Split
from _megatron_moments import Fault, faults, is_whole, measures
from _recovery_events import Event
from _recovery_job import RunningJob
from _scenarios import Run

POINTS = {"passes": "in a backward pass", "reduction": "in the reduction"}
CHECKPOINT_EVERY = 10
STEPS_BETWEEN = 4  # of the whole world, before the next fault
POLL_S = 0.1  # the moments are the workers' own
START_S, FAULT_S = 60.0, 40.0  # the longest time


def struck(launched: Launched, split: Split, plan: Sequence[tuple[int, str]], repetition: int = 0) -> Iterator[Run]:
    """One launch, in which each of ``plan``'s (rank, point) strikes in turn, once the world is whole."""
    options = (*split.options, "--parts") if "--attach" in launched.worker_options else split.options
    deadline_s = START_S + FAULT_S * len(plan)
    with RunningJob(launched, split.ranks, options, deadline_s) as job:
        fault: Fault | None = None
        for number, (victim, point) in enumerate(plan, 1):
            run = Run("fault", launched.name, split.ranks, repetition)
            run.notes = {"split": split.name, "is_distributed": split.is_distributed, "point": point, "rank": victim}
            with problems(run, job):
                _wait_whole(job, fault, split, launched)
                _wish(job, number, victim, point)
                while len(found := faults(job.events())) < number:
                    job.wait("strike", POLL_S)
                fault = found[-1]
                try:
                    while not is_whole(job.events(), fault, split, 1):
                        job.wait("recovery", POLL_S)
                finally:
                    run.values.update(measures(job.events(), fault, split))
                run.values |= _from_ledger(job.folder / "logs", fault)
                if "--attach" in launched.worker_options and "part_start_ms" in run.values:
                    raise LauncherEndedError("the survivors were started anew")
            yield run
            if run.problem:
                return


def _wait_whole(job: RunningJob, fault: Fault | None, split: Split, launched: Launched) -> None:
    while not is_whole(job.events(), fault, split, STEPS_BETWEEN) or not _is_saved(job.events(), launched):
        job.wait("whole world", POLL_S)


def _is_saved(events: Sequence[Event], launched: Launched) -> bool:
    """Whether there is a checkpoint, if checkpoints are made."""
    return "--attach" in launched.worker_options or any(event.kind == "saved" for event in events)


def _wish(job: RunningJob, number: int, victim: int, point: str) -> None:
    """Have a rank die in one of the next steps."""
    step = max(event.step for event in job.events() if event.kind == "step") + 3
    writing = job.folder / "wish"
    writing.write_text(f"{number} {victim} {step} {point}")
    writing.rename(job.folder / "strike")


def _from_ledger(logs: Path, fault: Fault) -> dict[str, float]:
    """What unicron-run itself says of the fault."""
    found = incidents(logs, fault.at_ns)
    if not found:
        return {}
    values = {"noticed_ms": float(found[0]["noticed_at"]) * 1e3 - fault.at_ns / 1e6}
    for name in ("micro_batches_recomputed", "micro_batches_reused"):
        if found[0].get(name) is not None:
            values[name] = float(found[0][name])
    return values


@contextlib.contextmanager
def problems(run: Run, job: RunningJob) -> Iterator[None]:
    """Book a job's failure in its record, with the last lines of its output; it is a result like any other."""
    try:
        yield
    except (LauncherEndedError, TimedOutError, psutil.Error) as error:
        run.problem = str(error)
        run.notes["last_lines"] = job.last_lines()
