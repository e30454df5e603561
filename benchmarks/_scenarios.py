"""What is measured: one function per scenario, each making one launch and returning one record."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from _launchers import Launch, Launcher, LauncherEndedError, TimedOutError, noticed_ns
from _steps import median_interval_ms, read_logs, stop_soon, wait_for_start, wait_for_step

IDLE_SETTLE_S = 3.0  # a launcher may still be preparing things for a while after its workers have started


@dataclass
class Run:
    """One launch: what was done, what came of it, and the measured numbers, of which a failed run has only some."""

    scenario: str
    launcher: str
    ranks: int
    repetition: int
    problem: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether the launch came to its end with exit code 0."""
        return self.problem is None


def restart(launcher: Launcher, ranks: int, repetition: int, seed: int, deadline_s: float) -> Run:
    """Kill one rank in mid-training, and see how long it takes until all ranks step again.

    Which rank dies, and after which step, depends on nothing but the seed, the ranks and the repetition, so that it is
    the same for all launchers.
    """
    choice = random.Random(f"{seed} {ranks} {repetition}")
    victim, kill_step = choice.randrange(ranks), choice.randint(30, 80)
    run = Run("restart", launcher.name, ranks, repetition, notes={"killed_rank": victim, "kill_step": kill_step})
    with Launch(launcher, ranks, [], deadline_s) as launch:
        with _problems(run, launch):
            logs = wait_for_step(launch, ranks, kill_step)
            run.values["cold_start_ms"] = (max(log.step_ns()[0] for log in logs) - launch.started_ns) / 1e6
            killed_ns = time.monotonic_ns()
            os.kill(logs[victim].pid, signal.SIGKILL)
            _measure_recovery(run, launch, killed_ns, frozenset(log.pid for log in logs))
            stop_soon(launch)
            _expect_success(run, launch)
        run.notes["restarts_used"] = max((log.restart_count for log in read_logs(launch.steps_folder)), default=0)
    return run


def _measure_recovery(run: Run, launch: Launch, killed_ns: int, old_pids: frozenset[int]) -> None:
    """Wait until all ranks step again, in new processes; the old ones may log a last step after the kill."""
    logs = wait_for_step(launch, run.ranks, 1, old_pids)
    run.values["scripts_ms"] = (max(log.started_ns() for log in logs) - killed_ns) / 1e6
    run.values["first_step_ms"] = (max(log.step_ns()[0] for log in logs) - killed_ns) / 1e6
    # A launcher may write its account of the incident only once the job steps again: give it a moment.
    moment = time.monotonic() + 1.0
    while (noticed := noticed_ns(launch, killed_ns)) is None and time.monotonic() < moment:
        launch.wait_alive("account of the fault")
    if noticed is not None:
        run.values["noticed_ms"] = (noticed - killed_ns) / 1e6


def step_time(launcher: Launcher, ranks: int, repetition: int, steps: int, deadline_s: float) -> Run:
    """Measure the step time of a job that nothing happens to."""
    run = Run("step time", launcher.name, ranks, repetition)
    with Launch(launcher, ranks, [f"--steps={steps}"], deadline_s) as launch, _problems(run, launch):
        _expect_success(run, launch)
        first_rank = next(log for log in read_logs(launch.steps_folder) if log.rank == 0)
        run.values["step_ms"] = median_interval_ms(first_rank, warm_up=steps // 4)
    return run


def idle(launcher: Launcher, ranks: int, repetition: int, window_s: float, deadline_s: float) -> Run:
    """Measure what the launcher's own processes use, in processor time and memory, while workers only sleep."""
    run = Run("idle", launcher.name, ranks, repetition)
    sleep = f"--sleep={IDLE_SETTLE_S + window_s + 1}"
    with Launch(launcher, ranks, [sleep], deadline_s) as launch, _problems(run, launch):
        pids = {log.pid for log in wait_for_start(launch, ranks)}
        time.sleep(IDLE_SETTLE_S)
        helpers = launch.helpers(pids)
        before, since = _processor_seconds(helpers), time.monotonic()
        time.sleep(window_s)
        used, elapsed = _processor_seconds(helpers) - before, time.monotonic() - since
        run.values["idle_cpu_percent"] = 100 * used / elapsed
        # Proportional shares count once what a launcher and its forks have in common.
        run.values["memory_mib"] = sum(process.memory_full_info().pss for process in helpers) / 2**20
        run.notes["processes"] = len(helpers)
        _expect_success(run, launch)
    return run


def _processor_seconds(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _expect_success(run: Run, launch: Launch) -> None:
    code = launch.wait_ended()
    if code != 0:
        raise LauncherEndedError(f"{run.launcher} exited with {code}")


@contextlib.contextmanager
def _problems(run: Run, launch: Launch) -> Iterator[None]:
    """Book a failure of the launch in the record, with the launcher's last lines; it is a result like any other."""
    try:
        yield
    except (LauncherEndedError, TimedOutError, psutil.Error) as error:
        run.problem = str(error)
        run.notes["last_lines"] = list(launch.last_lines)
