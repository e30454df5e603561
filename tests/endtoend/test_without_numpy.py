"""Without NumPy, which torch does not need, jobs go on in place and come back from storage all the same."""

from __future__ import annotations

from typing import Any

import pytest
from finals import final
from test_goes_on import SCRIPT

pytestmark = pytest.mark.cold  # in another process NumPy may have been loaded before

COLD_END_S = 100.0  # of a loaded machine: torch is imported anew for all ranks, and once more for the replacement

SAVED = """
import torch, unicron_elastic

model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, state={"seen": 7})
print("STARTS", run.restore("states"), torch.cuda.is_available(), flush=True)
for step in run.steps(run.step + 2, 2):
    for index in step:
        step.backward(model(torch.randn(4, 2)).square().mean())
    optimizer.step()
run.save("states", run.step)
run.wait_saved()
try:
    torch.ones(1).numpy()
except RuntimeError as error:
    print("HAS", error, flush=True)
"""


@pytest.fixture
def env(launcher: Any) -> dict[str, str]:
    """An environment in which it cannot be imported."""
    package = launcher.folder / "without" / "numpy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("""raise ModuleNotFoundError("No module named 'numpy'", name="numpy")\n""")
    return {"PYTHONPATH": str(package.parent)}


def test_the_others_go_on_and_the_replacement_joins(launcher: Any, env: dict[str, str]) -> None:
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    strike = ["--strike", "1:2:accumulate:kill", "--wait-for-worlds=3"]
    run = launcher.start(*options, SCRIPT, *strike, env=env)
    assert run.wait(COLD_END_S) == 0, run.err
    assert "1 rank goes on from the failed step. Restart 1 of 2." in run.err
    assert final(launcher.folder, 0)["parameters"] == final(launcher.folder, 1)["parameters"]


def test_a_state_comes_back_from_storage(launcher: Any, env: dict[str, str]) -> None:
    launcher.script("saves.py", SAVED)
    for starts in (0, 2):
        run = launcher.run("--standalone", "--nproc-per-node=1", "saves.py", env=env)
        assert run.process.returncode == 0, run.err
        assert f"STARTS {starts} " in run.out
        assert "HAS Numpy is not available" in run.out
