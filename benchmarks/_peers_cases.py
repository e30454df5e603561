"""One job of the comparison of peers, and the fault that it meets; each makes one record."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from _launchers import LauncherEndedError, TimedOutError
from _peers_job import PeersJob
from _peers_launch import RANKS, Bound
from _peers_measures import measures
from _recovery_events import STEPS_BEFORE, Event, Kill, step_ms, steps_of
from _scenarios import Run

FIRST_STEP = 12  # past the first checkpoint, and past the ten steps after which pace and time-outs are known
POLL_S = 0.003
START_S = 60.0
# What each tool writes when it has noticed something; unicron-run writes a ledger.
SAYS = {
    "torchrun": "torch/distributed/elastic",
    "torchft": "got exception|torch/distributed/elastic",
    "nvrx": "nvidia_resiliency_ext|failure_detected",
    "dlrover": "torch/distributed/elastic|The worker fails",
    "unicron": "",
}


@dataclass(frozen=True)
class Setting:
    """The job that everybody does, and how long a fault is waited for."""

    limit_s: float = 60.0
    whole_limit_s: float = 30.0
    seed: int = 0


def strike(bound: Bound, fault: str, repetition: int, setting: Setting) -> Run:
    """Do one fault, and watch until the survivors step, have caught up, and are as many as before."""
    choice = random.Random(f"peers {setting.seed} {fault} {repetition}")
    step, part, wanted = FIRST_STEP + choice.randrange(10), choice.random(), choice.randrange(RANKS)
    run = Run(fault, bound.name, RANKS, repetition)
    run.notes = {"step": step, "part": round(part, 2)}
    deadline_s = START_S + setting.limit_s + setting.whole_limit_s
    job = PeersJob(bound, _options(deadline_s), deadline_s)
    with _problems(run, job), job:
        victim = _await_step(job, step, wanted, fault)
        usual_ms = step_ms(steps_of(job.events(), victim.slot), STEPS_BEFORE)
        assert usual_ms is not None
        run.values["step_ms"] = usual_ms
        time.sleep(max(0.0, (victim.at_ns + int(part * usual_ms * 1e6) - time.monotonic_ns()) / 1e9))
        kill = Kill(job.strike(fault, victim.epoch.pid, victim.slot), victim.slot)
        _watch(run, job, kill, setting, is_replaced=fault not in bound.peer.not_replaced)
        noticed = job.noticed_ns(SAYS[bound.peer.tool], kill.at_ns)
        if noticed is not None:
            run.values["noticed_ms"] = (noticed - kill.at_ns) / 1e6
    return run


def _options(deadline_s: float) -> tuple[str, ...]:
    return (f"--deadline={int(deadline_s) + 5}",)


def _await_step(job: PeersJob, step: int, wanted: int, fault: str) -> Event:
    """The victim's newest step once it has made ``step``; a node that is lost is not the one that holds the store."""
    while True:
        events = job.events()
        stepping = sorted({event.slot for event in events if event.kind == "step"})
        if len(stepping) >= RANKS:
            slot = stepping[-1] if fault == "node" else stepping[wanted]
            newest = steps_of(events, slot)[-1]
            if newest.step >= step - 1:
                if newest.epoch.world != RANKS:
                    raise LauncherEndedError(f"before the fault the job had a world of {newest.epoch.world}")
                return newest
        job.wait(f"step {step}", POLL_S)


def _watch(run: Run, job: PeersJob, kill: Kill, setting: Setting, *, is_replaced: bool) -> None:
    """Wait for all there is to see, no longer than the limits; what came about is in the record."""
    wanted = ("resumed_ms", "caught_up_ms", "whole_ms") if is_replaced else ("resumed_ms", "caught_up_ms")
    end_ns = kill.at_ns + int(setting.limit_s * 1e9)
    try:
        while True:
            found = measures(job.events(), kill, RANKS)
            run.values.update(found)
            if all(name in found for name in wanted):
                return
            if "resumed_ms" not in found and time.monotonic_ns() > end_ns:
                raise TimedOutError(f"nobody made a step within {setting.limit_s:g} s")
            if time.monotonic_ns() > end_ns + int(setting.whole_limit_s * 1e9):
                raise TimedOutError("the world was not whole again in time")
            job.wait("recovery", 0.02)
    finally:
        run.values.update(measures(job.events(), kill, RANKS))


@contextlib.contextmanager
def _problems(run: Run, job: PeersJob) -> Iterator[None]:
    """Book a failure in the record, with the last lines of output; it is a result like any other."""
    try:
        yield
    except (LauncherEndedError, TimedOutError, psutil.Error, ProcessLookupError) as error:
        run.problem = str(error)
        run.notes["last_lines"] = job.said_last
