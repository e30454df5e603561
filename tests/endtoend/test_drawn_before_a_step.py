"""What a script draws between the yield of a step and its first micro-batch a newcomer draws as well."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, random, signal, sys, time
import numpy, torch, unicron_elastic

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(7)
random.seed(7)
numpy.random.seed(7)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True, compare_every=1)
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "--whole" not in sys.argv
made = os.path.join(os.environ["PROBE"], f"made-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
open(made, "w").close()
for step in run.steps(total=60, micro_batches=4):
    noise = torch.randn(3, 6) * random.gauss(1, 1) * float(numpy.random.randn())
    is_kept = bool(torch.rand(()) < 0.7)
    while is_first and step.number == 12 and not os.path.exists(made[:-1] + "1"):  # the replacement comes
        time.sleep(0.02)
    for index in step:
        if (rank, step.number) == (1, 5) and is_first:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(100 * step.number + index)
        drawn = random.random() * float(numpy.random.rand())
        step.backward((model(torch.randn(2, 6, generator=generator)) * drawn).pow(2).mean())
    if is_kept:
        optimizer.step()
    with torch.no_grad():
        model.weight.add_(noise, alpha=0.01)
    time.sleep(0.1 if run.world_size == 1 else 0.0)
os.write(1, f"ENDS {model.weight.sum().item():.9f} of {run.world_size}\\n".encode())
"""


def test_a_newcomer_draws_what_the_others_draw(launcher: Any) -> None:
    script = launcher.script("train.py", SCRIPT)
    run = launcher.start("--nproc-per-node=2", "--max-restarts=1", script)
    assert run.wait() == 0, run.err
    assert "rank 1 is back and joins the others: 2 ranks." in run.err
    whole = launcher.start("--nproc-per-node=2", script, "--whole")
    assert whole.wait() == 0, whole.err
    ends = [line for line in (run.out + whole.out).splitlines() if line.startswith("ENDS")]
    assert len(ends) == 4
    assert len(set(ends)) == 1
