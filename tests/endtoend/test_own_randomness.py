"""Each rank and each start of an unseeded script draws numbers of its own, as under torchrun."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.cold

DRAWS = """
import json, multiprocessing, os, random, secrets, sys, tempfile, uuid
import numpy, sympy, torch
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
order = torch.utils.data.RandomSampler(range(1000))
drawn = {
    "torch.initial_seed": torch.initial_seed(),
    "torch.rand": torch.rand(1).item(),
    "shuffle": list(order)[:8],
    "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "numpy generator": numpy.random.default_rng().random(),
    "uuid1": uuid.uuid1().hex,
    "uuid4": uuid.uuid4().hex,
    "temporary name": next(tempfile._get_candidate_names()),
    "secrets": secrets.token_hex(),
    "sympy": sympy.Dummy().dummy_index,
    "authkey": multiprocessing.current_process().authkey.hex(),
}
os.write(1, f"DRAWN {json.dumps(drawn)}\\n".encode())
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
sys.exit(int(count == "0"))
"""


@pytest.mark.parametrize("warm", ["on", pytest.param("off", marks=pytest.mark.slow)])
def test_all_ranks_of_all_generations_draw_their_own_numbers(launcher: Any, warm: str) -> None:
    script = launcher.script("draws.py", DRAWS)
    run = launcher.run("--nproc-per-node=2", "--max-restarts=1", f"--unicron-warm={warm}", script, fast=False)
    drawn = [json.loads(line.removeprefix("DRAWN ")) for line in run.out.splitlines() if line.startswith("DRAWN ")]
    assert len(drawn) == 4, run.err
    for what in drawn[0]:
        different = {json.dumps(each[what]) for each in drawn}
        assert len(different) == 4, what
