"""A helper that is silent is given up, one that works has more time, as the machine may be busy with others."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from unicron_elastic.launcher.agent.process.helper import Helper, HelperPatience
from unicron_elastic.launcher.common.loop import Loop

PATIENCE = HelperPatience(woken_s=0.1, stopped_s=0.2, given_up_s=0.2, at_work_s=1.0)
SLEEPS = "import time\nprint(flush=True)\ntime.sleep(600)"
WORKS = "print(flush=True)\nwhile True: pass"
HAS_ONE_WORK = f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {WORKS!r}])"


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(params=[SLEEPS, WORKS, HAS_ONE_WORK], ids=["sleeps", "works", "has-one-work"])
def process(request: pytest.FixtureRequest) -> Iterator[tuple[bool, int]]:
    """Whether it works, and its pid."""
    with subprocess.Popen([sys.executable, "-S", "-c", request.param], stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        made.stdout.readline()
        yield request.param is not SLEEPS, made.pid
        subprocess.run(["pkill", "-KILL", "-P", str(made.pid)], check=False)
        made.kill()


def test_one_that_works_has_more_time_but_not_for_ever(loop: Loop, process: tuple[bool, int]) -> None:
    works, pid = process
    woken: list[float] = []
    helper = Helper(loop, pid, PATIENCE, wake=lambda: woken.append(time.monotonic()), give_up=lambda: None)
    began = time.monotonic()
    assert not helper.wait(lambda: False)
    took_s = time.monotonic() - began
    assert took_s >= (PATIENCE.at_work_s if works else PATIENCE.given_up_s)
    assert woken
    if not works:
        return
    until = time.monotonic() + 2 * PATIENCE.given_up_s
    assert helper.wait(lambda: time.monotonic() > until), "it answers late"
