"""Values of modules that a script changes on the way: a replacement has them, and numbers are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = """
import os, signal, time, torch, unicron_elastic
from torch import nn

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(7)

class Scaled(nn.Linear):
    factor = 1.0
    def __init__(self):
        super().__init__(8, 3)
        self.scale = 0.5
    def forward(self, x):
        return self.scale * super().forward(x)

model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Scaled())
optimizer = torch.optim.SGD(model[:3].parameters(), 0.1, momentum=0.5)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True)
for step in run.steps(total=12, micro_batches=4):
    if step.number == int(os.environ["CHANGED_IN"]):
        model[1].momentum, model[2].p, model[3].scale = 0.5, 0.1, 0.25
        optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.05})
    for index in step:
        if (rank, step.number) == (1, 5) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and run.world_size > 1:
            try:
                os.close(os.open(os.path.join(os.environ["PROBE"], "killed"), os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        while step.number == 8 and run._engine._membership._link and run._engine._membership._link._world.size < size:
            time.sleep(0.01)
        generator = torch.Generator().manual_seed(100 * step.number + index)
        step.backward((model(torch.randn(4, 6, generator=generator)) - 1).pow(2).mean())
    optimizer.step()
total = sum(each.double().sum().item() for each in (*model.parameters(), *model.buffers()))
os.write(1, f"ENDS rank {rank} with {total!r}\\n".encode())
""".replace("< size", '< int(os.environ["LOCAL_WORLD_SIZE"])')


def _sums(out: str) -> list[str]:
    return [line.rpartition(" ")[2] for line in out.splitlines() if line.startswith("ENDS")]


@pytest.mark.slow
@pytest.mark.parametrize("changed_in", ["0", "3", "8"])  # 8: in which the replacement comes
def test_a_replacement_computes_as_the_others_do(launcher: Any, changed_in: str) -> None:
    script, env = launcher.script("train.py", SCRIPT), {"CHANGED_IN": changed_in}
    whole = launcher.start("--nproc-per-node=1", script, env=env)
    assert whole.wait() == 0, whole.err
    run = launcher.start("--nproc-per-node=2", "--max-restarts=3", script, env=env)
    assert run.wait() == 0, run.err
    assert "Restart 1 of 3." in run.err
    assert _sums(run.out) == _sums(whole.out) * 2
    assert "differ" not in run.err
