"""What the benchmark of recovery does: one kill, or one undisturbed run; each is one job and makes one record."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from _launchers import LauncherEndedError, TimedOutError
from _recovery_competitors import Competitor
from _recovery_events import STEPS_BEFORE, Event, Kill, is_over, measures, step_ms, steps_of
from _recovery_job import RunningJob
from _scenarios import Run

FIRST_KILL_STEP = 12  # past the first checkpoint, when every job has long found its pace
KILL_POLL_S = 0.003  # how late a kill may come


@dataclass(frozen=True)
class Setting:
    """The job that all competitors do."""

    ranks: int = 4
    micro_batches: int = 16
    batch_size: int = 6
    checkpoint_every: int = 10
    deadline_s: float = 90.0

    def options(self, checkpoints: bool) -> tuple[str, ...]:
        """For the workers."""
        every = self.checkpoint_every if checkpoints else 0
        return (
            f"--micro-batches={self.micro_batches}",
            f"--batch-size={self.batch_size}",
            f"--checkpoint-every={every}",
        )


@dataclass(frozen=True)
class Plan:
    """Whom to kill, in which step, and after which part of that step."""

    slot: int
    step: int
    part: float

    @classmethod
    def of(cls, seed: int, repetition: int, setting: Setting) -> Plan:
        """The plan of a repetition: the same for all competitors, and as likely just before a checkpoint as after."""
        choice = random.Random(f"recovery {seed} {repetition}")
        step = FIRST_KILL_STEP + choice.randrange(max(1, setting.checkpoint_every))
        return cls(choice.randrange(setting.ranks), step, choice.random())


def recovery(competitor: Competitor, setting: Setting, repetition: int, seed: int) -> Run:
    """Kill one process in the middle of a step, and watch until the world is whole again and steps."""
    plan = Plan.of(seed, repetition, setting)
    run = Run("recovery", competitor.name, setting.ranks, repetition)
    run.notes = {"killed_rank": plan.slot, "kill_step": plan.step, "kill_percent_of_step": int(100 * plan.part)}
    with RunningJob(competitor, setting.ranks, setting.options(True), setting.deadline_s) as job, _problems(run, job):
        kill = _kill(job, plan, setting)
        try:
            while not is_over(job.events(), kill, setting.ranks, competitor.replaces):
                job.wait("recovery")
        finally:  # of a job that does not recover, what came about is measured all the same
            run.values.update(measures(job.events(), kill, setting.ranks))
    return run


def undisturbed(competitor: Competitor, setting: Setting, repetition: int, steps: int) -> Run:
    """Measure the step of a job that nothing happens to and that writes no checkpoints, after a third for warming."""
    run = Run("undisturbed", competitor.name, setting.ranks, repetition)
    with RunningJob(competitor, setting.ranks, setting.options(False), setting.deadline_s) as job, _problems(run, job):
        while len(found := steps_of(job.events(), 0)) < steps:
            job.wait(f"step {steps}", poll_s=0.2)
        usual = step_ms(found[steps // 3 :])
        assert usual is not None
        run.values["undisturbed_step_ms"] = usual
    return run


def _kill(job: RunningJob, plan: Plan, setting: Setting) -> Kill:
    """Wait for the step and the part of it, and kill."""
    while not (victim := steps_of(job.events(), plan.slot)) or victim[-1].step < plan.step - 1:
        # The whole world must have made the steps before, or the plan would meet jobs that are still gathering.
        job.wait(f"step {plan.step} of rank {plan.slot}", KILL_POLL_S)
    _expect_whole_world(job.events(), setting, plan)
    usual_ms = step_ms(victim, STEPS_BEFORE)
    assert usual_ms is not None
    moment_ns = victim[-1].at_ns + int(plan.part * usual_ms * 1e6)
    time.sleep(max(0.0, (moment_ns - time.monotonic_ns()) / 1e9))
    return Kill(job.kill(victim[-1].epoch.pid, plan.slot), plan.slot)


def _expect_whole_world(events: list[Event], setting: Setting, plan: Plan) -> None:
    worlds = {event.epoch.world for event in steps_of(events, plan.slot)[-STEPS_BEFORE:]}
    if worlds != {setting.ranks}:
        raise LauncherEndedError(
            f"before the kill the job had worlds of {sorted(worlds)}, not of {setting.ranks} ranks"
        )


@contextlib.contextmanager
def _problems(run: Run, job: RunningJob) -> Iterator[None]:
    """Book a job's failure in its record, with the last lines of its output; it is a result like any other."""
    try:
        yield
    except (LauncherEndedError, TimedOutError, psutil.Error, ProcessLookupError) as error:
        run.problem = str(error)
        run.notes["last_lines"] = job.last_lines()
