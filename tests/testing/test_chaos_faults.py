"""Each fault in a real process, with the real torch."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

PAUSE_S = 0.2
COUNT_TAKEN = """
def taken_under(folder):
    blocks = 0
    for fd in range(256):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(folder):
                blocks += os.fstat(fd).st_blocks
        except OSError:
            pass
    return blocks
"""
COUNT_TICKS = """
ticked = threading.Event()
def tick():
    while True:
        say("tick", time.monotonic())
        ticked.set()
        time.sleep(0.005)
def await_tick():
    ticked.clear()
    ticked.wait()
threading.Thread(target=tick, daemon=True).start()
"""
AWAIT_TICK = "await_tick()"  # in each step


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ("kill:rank=0,step=2", -signal.SIGKILL),
        ("segv:rank=0,step=2", -signal.SIGSEGV),
        ("abort:rank=0,step=2", -signal.SIGABRT),
        ("exit:rank=0,step=2,code=7", 7),
        ("exception:rank=0,step=2,text=CUDA error%2C or so", 1),
    ],
)
def test_the_worker_ends(jobs: Any, plan: str, code: int) -> None:
    (worker,) = jobs.start(plan)
    assert worker.wait() == code
    assert worker.last == "stepped 1"
    assert "unicron chaos: rank 0 " in worker.out
    assert ("RuntimeError: CUDA error, or so" in worker.out) == plan.startswith("exception")


def test_a_stopped_worker_goes_on_when_it_may(jobs: Any) -> None:
    (worker,) = jobs.start("hang:rank=0,step=2,phase=optimizer")
    worker.until_stopped()
    assert worker.last == "reduced 2"
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.wait() == 0
    assert worker.last == "end"


def test_other_threads_run_while_one_sleeps(jobs: Any, script: Any) -> None:
    (worker,) = jobs.start("sleep:rank=0,step=2,seconds=0.3", script=script(before=COUNT_TICKS, inside=AWAIT_TICK))
    assert worker.wait() == 0
    assert worker.out.split("unicron chaos")[1].split("forward 2")[0].count("tick") >= 5


def test_no_other_thread_runs_while_one_holds_the_interpreter(jobs: Any, script: Any) -> None:
    (worker,) = jobs.start("hang-gil:rank=0,step=2,seconds=0.3", script=script(before=COUNT_TICKS, inside=AWAIT_TICK))
    assert worker.wait() == 0
    ticks = [float(found) for found in re.findall(r"tick (.+)", worker.out)]
    assert max(after - before for before, after in pairwise(ticks)) > 0.29


def test_hangs_are_for_ever_unless_told_otherwise(jobs: Any) -> None:
    for kind in ("sleep", "hang-gil"):
        (worker,) = jobs.start(f"{kind}:rank=0,step=2")
        worker.until(lambda worker=worker: "for ever" in worker.out, "the hang")
        worker.kill()
        assert worker.last == "stepped 1"


@pytest.mark.parametrize("how", ["sleep", "cpu"])
def test_a_slow_worker_is_slow_for_its_steps(jobs: Any, script: Any, how: str) -> None:
    text = script(inside=f"time.sleep({PAUSE_S / 2})")
    (worker,) = jobs.start(f"slow:rank=0,step=2,steps=2,factor=3,how={how}", script=text)
    assert worker.wait() == 0
    seconds = [float(found) for found in re.findall(r"stepped \d+ (.+)", worker.out)]
    assert [pause >= PAUSE_S for pause in seconds] == [False, True, True, False]


def test_a_leak_grows_up_to_its_limit(jobs: Any, script: Any) -> None:
    resident = "say('resident', int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE'))"
    (worker,) = jobs.start("leak:rank=0,step=2,mb_per_step=32,limit_mb=48", script=script(inside=resident))
    assert worker.wait() == 0
    seen = [int(found) / 2**20 for found in re.findall(r"resident (\d+)", worker.out)]
    assert [round((after - seen[1]) / 16) for after in seen[1:]] == [0, 2, 3]
    assert "48 MB are leaked; that is the limit" in worker.out


def test_a_filled_disk_is_free_again_however_the_worker_ends(jobs: Any, script: Any, tmp_path: Path) -> None:
    taken = f"say('taken', taken_under({str(tmp_path)!r}))"
    plan = f"disk:rank=0,step=2,folder={tmp_path},limit_mb=8;kill:rank=0,step=3"
    (worker,) = jobs.start(plan, script=script(before=COUNT_TAKEN, inside=taken))
    assert worker.wait() == -signal.SIGKILL
    assert f"8.0 MB of {tmp_path} are taken\n" in worker.out
    assert re.findall(r"taken (\d+)\n", worker.out) == ["0", str(8 * 2**20 // 512)]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_filled_to_the_end(jobs: Any, script: Any, tmp_path: Path) -> None:
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 2**20, 3 * 2**20))"
    (worker,) = jobs.start(f"disk:rank=0,folder={tmp_path},limit_mb=inf", script=script(before=full))
    assert worker.wait() == 0
    assert f"3.0 MB of {tmp_path} are taken, and no more are free" in worker.out


def test_a_folder_that_cannot_be_filled_is_no_fault_of_its_own(jobs: Any, tmp_path: Path) -> None:
    (worker,) = jobs.start(f"disk:rank=0,folder={tmp_path}/missing")
    assert worker.wait() == 0
    assert "missing cannot be filled: No such file or directory" in worker.out


@pytest.mark.parametrize("kind", ["xid", "ecc"])
def test_a_fault_of_the_gpu_says_what_it_needs(jobs: Any, kind: str) -> None:
    (worker,) = jobs.start(f"{kind}:rank=0,step=2")
    assert worker.wait() == 0
    assert "needs the test library" in worker.out


def test_only_the_generation_of_the_plan_is_struck(jobs: Any) -> None:
    for plan, restart, code in [
        ("exit:rank=0,step=2,code=7", "1", 0),
        ("exit:rank=0,step=2,code=7,restart=1", "1", 7),
        ("exit:rank=0,step=2,code=7,restart=any", "3", 7),
        ("exit:rank=1,step=2,code=7", "0", 0),
    ]:
        (worker,) = jobs.start(plan, TORCHELASTIC_RESTART_COUNT=restart)
        assert worker.wait() == code, plan


def test_a_time_strikes_a_script_that_takes_no_steps(jobs: Any) -> None:
    text = (
        "from unicron_elastic.testing.chaos import install_from_environment; install_from_environment()\n"
        "import time; time.sleep(60)"
    )
    (worker,) = jobs.start("exit:rank=0,after=0.05,code=7", script=text)
    assert worker.wait() == 7
    (worker,) = jobs.start("mtbf=0.05,seed=1,kinds=exit", script=text, TORCHELASTIC_RESTART_COUNT="2")
    assert worker.wait() == 1


def test_what_needs_the_main_thread_waits_for_the_next_step(jobs: Any, script: Any) -> None:
    (worker,) = jobs.start("exception:rank=0,after=0.001", script=script(inside="time.sleep(0.05)"))
    assert worker.wait() == 1
    assert "in step" not in worker.out
    assert re.search(r"\(after 0\.001 s and step [12]\)", worker.out)


def test_a_rank_that_the_job_lacks_is_named(jobs: Any) -> None:
    (worker,) = jobs.start("kill:rank=5")
    assert worker.wait() == 0
    assert "the plan names rank 5, but this job has ranks 0 to 0" in worker.out


def test_a_forked_child_of_the_script_is_not_struck(jobs: Any, script: Any) -> None:
    fork = """if step == 2:
        child = os.fork()
        if child == 0:
            inner(torch.ones(1, width)).backward()
            os._exit(0)
        say("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    (worker,) = jobs.start("kill:rank=0,step=2,phase=backward,nth=2", script=script(inside=fork))
    assert worker.wait() == -signal.SIGKILL  # at the end of the step, as there was no second pass in this process
    assert "child 0" in worker.out
    assert worker.out.count("unicron chaos") == 1
