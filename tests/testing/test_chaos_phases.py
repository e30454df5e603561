"""Where in a step a fault strikes: one rank, and real jobs of two ranks over gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("place", "last"),
    [
        ("", "stepped 1"),
        ("phase=forward,", "stepped 1"),
        ("phase=forward,nth=2,", "backward 2 1"),
        ("phase=backward,", "backward 2 1"),
        ("phase=backward,nth=3,", "backward 2 3"),
        ("phase=optimizer,", "reduced 2"),
        ("phase=before-reduce,", "reduced 2"),  # one rank alone has no reduction: at the end of optimizer.step()
    ],
)
def test_the_place_in_a_step(jobs: Any, place: str, last: str) -> None:
    (worker,) = jobs.start(f"exception:rank=0,step=2,{place}text=wanted", MICRO_BATCHES="3")
    assert worker.wait() == 1
    assert "RuntimeError: wanted" in worker.out
    assert worker.last == last
    assert ("had no before-reduce phase: at its end" in worker.out) == ("reduce" in place)


def test_the_first_step_can_be_struck_too(jobs: Any) -> None:
    (worker,) = jobs.start("kill:rank=0,phase=backward")
    assert worker.wait() == -signal.SIGKILL
    assert worker.last == "backward 1 1"


def test_the_backward_pass_is_under_way_when_it_is_struck(jobs: Any) -> None:
    (worker,) = jobs.start("exception:rank=0,step=2,phase=backward")
    assert worker.wait() == 1
    assert "_engine_run_backward" in worker.out


def test_several_faults_in_one_step_come_in_turn(jobs: Any) -> None:
    (worker,) = jobs.start("exit:rank=0,step=2,phase=optimizer,code=7;sleep:rank=0,step=2,phase=backward,seconds=0.01")
    assert worker.wait() == 7
    assert [line.split("(")[-1] for line in worker.out.splitlines() if "chaos" in line] == [
        "step 2, backward)",
        "step 2, optimizer)",
    ]


def test_a_fault_that_is_survived_changes_nothing(jobs: Any) -> None:
    undisturbed = jobs.start("", ranks=2, GATHER="ddp")
    phases = ("forward", "backward", "before-reduce", "during-reduce", "after-reduce", "optimizer")
    plan = ";".join(f"sleep:rank=1,step=3,seconds=0.01,phase={phase}" for phase in phases)
    disturbed = jobs.start(plan, ranks=2, GATHER="ddp")
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert (one.wait(), other.wait()) == (0, 0)
        assert re.findall(r"reduced .*", one.out) == re.findall(r"reduced .*", other.out)
    assert [line.split()[-1].rstrip(")") for line in disturbed[1].out.splitlines() if "chaos" in line] == [
        "forward",
        "backward",
        "before-reduce",
        *re.findall(r"(?:during-reduce after [\d,]+ )?(bytes|during-reduce)\)", disturbed[1].out),
        "after-reduce",
        "optimizer",
    ]


@pytest.mark.parametrize("gather", ["ddp", "manual"])
def test_before_the_reduction_no_rank_gets_its_result(jobs: Any, gather: str) -> None:
    survivor, victim = jobs.start("kill:rank=1,step=3,phase=before-reduce", ranks=2, GATHER=gather)
    assert victim.wait() == -signal.SIGKILL
    assert victim.last == "backward 3 1"
    assert survivor.wait() == 1
    assert survivor.last == "backward 3 1"


@pytest.mark.parametrize("gather", ["ddp", "manual"])
def test_during_the_reduction_data_has_gone_and_no_rank_is_done(jobs: Any, gather: str) -> None:
    width = 3000  # 36 MB of gradients, some 30 ms on a loopback interface
    survivor, victim = jobs.start("kill:rank=1,step=3,phase=during-reduce", ranks=2, GATHER=gather, WIDTH=str(width))
    assert victim.wait() == -signal.SIGKILL
    assert victim.last == "backward 3 1"
    moved = int(re.findall(r"during-reduce after ([\d,]+) bytes", victim.out)[0].replace(",", ""))
    assert width * width * 4 / 2 <= moved < width * width * 4 * 2
    assert survivor.wait() == 1
    assert survivor.last == "backward 3 1"


@pytest.mark.parametrize("gather", ["ddp", "manual"])
def test_after_the_reduction_the_others_have_its_result(jobs: Any, gather: str) -> None:
    survivor, victim = jobs.start("hang:rank=1,step=3,phase=after-reduce", ranks=2, GATHER=gather)
    victim.until_stopped()
    assert victim.last == "backward 3 1"
    survivor.until(lambda: "stepped 3" in survivor.out, "the others' step")
    victim.kill()
    assert survivor.wait() == 1
    assert "stepped 4" not in survivor.out


def test_only_the_last_micro_batch_reduces(jobs: Any) -> None:
    plan = "exception:rank=0,step=3,phase=before-reduce;exception:rank=1,step=3,phase=before-reduce"
    for worker in jobs.start(plan, ranks=2, GATHER="ddp", MICRO_BATCHES="3"):
        assert worker.wait() == 1
        assert worker.last == "backward 3 3"
        assert "injected by unicron chaos" in worker.out


def test_a_comm_hook_of_the_scripts_own_stays_and_is_seen(jobs: Any, script: Any) -> None:
    own = """from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
model.register_comm_hook(None, fp16_compress_hook)"""
    plan = "exit:rank=0,step=3,phase=before-reduce,code=7;exit:rank=1,step=3,phase=before-reduce,code=7"
    for worker in jobs.start(plan, ranks=2, GATHER="ddp", script=script(before=own)):
        assert worker.wait() == 7
        assert worker.last == "backward 3 1"


@pytest.mark.parametrize("gather", ["ddp", "manual"])
def test_a_skipped_reduction_leaves_the_ranks_one_apart(jobs: Any, gather: str) -> None:
    other, skipping = jobs.start("skip:rank=1,step=3", ranks=2, GATHER=gather)
    codes = [other.wait(), skipping.wait()]
    assert "leaves out its next reduction (step 3)" in skipping.out
    reduced, alone = 3.0 if gather == "manual" else 1.5, 2.0
    values = [float(found) for found in re.findall(r"reduced \d+ (.*)", skipping.out)]
    assert values[:3] == [reduced, reduced, alone]
    assert codes != [0, 0]  # what one reduces for the second time the other never does


def test_no_rank_is_hooked_that_has_nothing_to_do(jobs: Any, script: Any) -> None:
    look = """from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
say("hooks", len(modules._global_forward_pre_hooks), len(optimizers._global_optimizer_post_hooks),
    len(optimizers._global_optimizer_pre_hooks), torch.autograd.backward.__module__,
    hasattr(dist.all_reduce.__wrapped__, "__wrapped__"))"""
    (idle,) = jobs.start("kill:rank=1;hang:rank=0,restart=1", script=script(before=look))
    (unplanned,) = jobs.start("", script=script(before=look))
    assert (idle.wait(), unplanned.wait()) == (0, 0)
    for worker in (idle, unplanned):
        assert "hooks 0 0 0 torch.autograd False\n" in worker.out  # torch wraps the function once itself


def test_hooks_are_gone_after_the_step(jobs: Any, script: Any) -> None:
    look = """from torch.nn.modules import module as modules
    say("hooks", step, len(modules._global_forward_pre_hooks), torch.autograd.backward.__module__)"""
    (worker,) = jobs.start("sleep:rank=0,step=2,seconds=0.001", script=script(inside=look))
    assert worker.wait() == 0
    assert [line.split()[2] for line in worker.out.splitlines() if line.startswith("hooks")] == ["0", "1", "0", "0"]


@pytest.mark.slow
def test_a_script_that_imports_torch_later_under_torchrun(jobs: Any, script: Any, tmp_path: Path) -> None:  # noqa: ARG001
    """The plan is installed before torch is imported, and the second generation of torchrun's is let be."""
    path = tmp_path / "train.py"
    path.write_text("import sys; assert 'torch' not in sys.modules\n" + script())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    env = {**os.environ, "UNICRON_CHAOS": "exit:rank=0,phase=backward,code=7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(path)], env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"rank 0 exits with code 7 \(.*\)", done.stderr) == [
        "rank 0 exits with code 7 (step 1, backward)"
    ]
    assert done.stdout.count("end") == 1
