"""Replicas of several processes, each with its shards: one is lost, the others finish the step, and it comes back."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finals import final
from free_port import free_port
from torch.distributed import TCPStore
from train_in_place_job import SCRIPT, incidents, trained
from warm_launcher import WarmLaunchers

pytestmark = pytest.mark.trains
END_S = 60.0
OPTIONS = ("--shard=2", "--micro-batches=8")
OneReplica = Callable[..., dict[str, Any]]
OF_TWO_DIMENSIONS = ("--shard=1", "--tensor=2", "--micro-batches=8")


@pytest.fixture(scope="module")
def one_replica(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> OneReplica:
    """What one replica of so many ranks comes to by itself."""

    def train(options: tuple[str, ...], ranks: int = 2) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        launcher = os.path.join(sysconfig.get_path("scripts"), "unicron-run")
        alone(folder, launcher, "--standalone", f"--nproc-per-node={ranks}", SCRIPT, *options)
        return final(folder, 0)

    return train


@pytest.fixture(scope="module")
def undisturbed(one_replica: OneReplica) -> dict[str, Any]:
    """That of the most tests."""
    return one_replica(OPTIONS)


def _train(launcher: Any, ranks: int, *strikes: str, worlds: int = 1) -> Path:
    return trained(launcher, ranks, *strikes, worlds=worlds, more=OPTIONS, end_s=END_S)


def _check(folder: Path, undisturbed: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """All ranks have come to the same bits; return the incidents."""
    for rank in range(ranks):
        found = final(folder, rank)
        assert found["parameters"] == undisturbed["parameters"], f"rank {rank}"
        assert found["losses"].items() <= undisturbed["losses"].items()
        assert found["world_size"] == ranks
    return incidents(folder)


@pytest.mark.parametrize(
    "strike",
    [
        "3:2:accumulate:kill",
        "0:2:reduced:kill",
        pytest.param("1:2:exchanged:kill", marks=pytest.mark.slow),
        pytest.param("2:2:reduce:exit", marks=pytest.mark.slow),
        pytest.param("1:2:forward:kill", marks=pytest.mark.slow),
        pytest.param("2:2:optimizer:kill", marks=pytest.mark.slow),
        pytest.param("1:2:between:raise", marks=pytest.mark.slow),
        pytest.param("0:0:begin:kill", marks=pytest.mark.slow),
    ],
)
def test_the_other_replica_goes_on_and_a_new_one_joins(launcher: Any, undisturbed: Any, strike: str) -> None:
    folder = _train(launcher, 4, strike, worlds=3)
    (incident,) = _check(folder, undisturbed, 4)
    assert (incident["action"], incident["restarts_used"]) == ("go on", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strikes",
    [
        ("2:2:accumulate:kill", "3:2:accumulate:kill"),  # both of one replica
        ("2:1:accumulate:kill", "2:2:accumulate:kill"),
        ("3:2:accumulate:kill", "2:-1:before:kill"),  # while it comes back
    ],
)
def test_two_losses(launcher: Any, undisturbed: Any, strikes: tuple[str, ...]) -> None:
    folder = _train(launcher, 4, *strikes, worlds=3)
    _check(folder, undisturbed, 4)


@pytest.mark.slow
def test_one_replica_after_the_other(launcher: Any, undisturbed: Any) -> None:
    """The second one is lost in the step behind that in which the first has come back."""
    strikes, more = ("1:1:reduced:kill", "3:4:reduced:kill"), (*OPTIONS, "--wait-at=3")
    folder = trained(launcher, 4, *strikes, worlds=3, more=more, end_s=END_S)
    for rank in (0, 1):
        assert final(folder, rank)["parameters"] == undisturbed["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("strikes", [("4:2:accumulate:kill",), ("1:2:reduced:kill", "4:2:accumulate:kill")])
def test_of_three_replicas(launcher: Any, undisturbed: Any, strikes: tuple[str, ...]) -> None:
    folder = _train(launcher, 6, *strikes, worlds=3)
    _check(folder, undisturbed, 6)


@pytest.mark.slow
def test_the_replica_of_a_node_that_joins_trains_with_the_others(launcher: Any, one_replica: OneReplica) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    steps = (*OPTIONS, "--steps=60")
    command = (
        "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}",
        "--rdzv-id=job", "--rdzv-conf=is_host=false,last_call_timeout=1", "--max-restarts=2",
        SCRIPT, *steps, "--step-s=0.02", "--say-steps",
    )  # fmt: skip
    first = launcher.start(*command, fast=False)
    first.until_line(r"^STEP 3 ")
    second = launcher.start(*command, fast=False)
    assert [run.wait(END_S) for run in (first, second)] == [0, 0], first.err + second.err
    assert "STEP" in second.out
    assert "raised" not in first.err + second.err
    expected = one_replica(steps)["parameters"]
    assert {final(launcher.folder, rank)["parameters"] for rank in range(4)} == {expected}


FLIPPED = """
import os, torch, unicron_elastic
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
flipped = Path(os.environ["PROBE"], "flipped")
mesh = unicron_elastic.replica_mesh(shard=2)
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, compare_every=1)
for step in run.steps(6, 3):
    for index in step:
        step.backward(model(torch.full((4,), 1.0 + index + step.number)).square().mean())
    optimizer.step()
    if step.number == 2 and os.environ["RANK"] == "3" and not flipped.exists():
        flipped.touch()
        next(model.parameters()).to_local().data[0] += 1
"""


@pytest.mark.slow
def test_a_replica_with_a_wrong_number_is_found_and_replaced(launcher: Any) -> None:
    script = launcher.script("train.py", FLIPPED)
    run = launcher.start("--standalone", "--nproc-per-node=6", "--max-restarts=2", script, fast=False)
    assert run.wait(END_S) == 0, run.err
    assert "after 3 steps replica 1 differs from the others in model.weight of place 1" in run.err
    assert "4 ranks go on from the failed step." in run.err


def test_of_two_dimensions(launcher: Any, one_replica: OneReplica) -> None:
    folder = trained(launcher, 4, "3:2:accumulate:kill", worlds=3, more=OF_TWO_DIMENSIONS, end_s=END_S)
    _check(folder, one_replica(OF_TWO_DIMENSIONS), 4)


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["5:2:accumulate:kill", "1:2:reduced:kill", "6:2:reduce:exit", "4:2:exchanged:kill"])
def test_of_two_by_two(launcher: Any, one_replica: OneReplica, strike: str) -> None:
    options = ("--shard=2", "--tensor=2", "--micro-batches=8")
    folder = trained(launcher, 8, strike, worlds=3, more=options, end_s=2 * END_S)
    _check(folder, one_replica(options, 4), 8)


KEPT = """
import os, sys, torch, unicron_elastic
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
mesh = unicron_elastic.replica_mesh(shard=int(sys.argv[1]))
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 1)), mesh=mesh)
run = unicron_elastic.Run(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
begun = run.restore("kept")
print("BEGINS", begun, flush=True)
for step in run.steps(int(sys.argv[2]), 2):
    for index in step:
        step.backward(model(torch.full((4,), 1.0 + index + step.number)).square().mean())
    run._registered.objects["optimizer"].step()
    run.save("kept", step.number + 1)
    print("STEP", step.number, f"{step.loss:.6g}", flush=True)
"""


def test_what_a_replica_kept_is_read_by_one_of_another_size(launcher: Any) -> None:
    script = launcher.script("train.py", KEPT)
    told: list[set[str]] = []
    for ranks, steps in ((1, 2), (2, 4), (3, 5), (1, 6)):
        run = launcher.start("--standalone", f"--nproc-per-node={ranks}", script, str(ranks), str(steps))
        assert run.wait(END_S) == 0, run.err
        told.append({line for line in run.out.splitlines() if line.startswith(("BEGINS", "STEP"))})
    assert [next(each.split()[1] for each in lines if each.startswith("BEGINS")) for lines in told] == list("0245")
    whole = launcher.start(
        "--standalone", "--nproc-per-node=1", launcher.script("train.py", KEPT.replace('"kept"', '"other"')), "1", "6"
    )
    assert whole.wait(END_S) == 0, whole.err
    steps_of_all = {line for lines in told for line in lines if line.startswith("STEP")}
    assert steps_of_all == {line for line in whole.out.splitlines() if line.startswith("STEP")}


UNLIKE = """
import os, torch, unicron_elastic
from torch import nn
from torch.distributed.fsdp import fully_shard
mesh = unicron_elastic.replica_mesh(shard=1, tensor=2)
torch.manual_seed(int(os.environ["RANK"]))
model = fully_shard(nn.Linear(2, 2), mesh=mesh["shard"])
run = unicron_elastic.Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(2, 2):
    for index in step:
        step.backward(model(torch.ones(2)).sum())
"""


def test_what_tensor_parallelism_does_not_divide_is_the_same_from_the_beginning(launcher: Any) -> None:
    run = launcher.start("--standalone", "--nproc-per-node=2", launcher.script("train.py", UNLIKE))
    assert run.wait(END_S) == 1
    assert "weight is not divided by tensor parallelism, and not the same in places 0 and 1 of this replica" in run.err


@pytest.mark.parametrize(
    "kind", ["bf16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("checkpoint", "stays-whole", "tensor"))]
)
def test_undisturbed_they_are_torchs_own_to_the_bit(launcher: Any, warm_launchers: WarmLaunchers, kind: str) -> None:
    script = str(Path(__file__).with_name("train_both_ways.py"))
    ranks = 8 if kind == "tensor" else 4
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    said = [launcher.folder / f"said-{rank}" for rank in range(ranks)]
    torchs = [
        warm_launchers.begin(place, script, "hsdp", kind, RANK=str(rank), **meeting) for rank, place in enumerate(said)
    ]
    run = launcher.start("--standalone", f"--nproc-per-node={ranks}", script, "replicas", kind, fast=False)
    assert run.wait(END_S) == 0, run.err
    assert [each.wait(END_S) for each in torchs] == [0] * ranks, [each.read_text() for each in said]
    ways = [f"{way}-{rank}" for way in ("hsdp", "replicas") for rank in range(ranks)]
    assert len({(launcher.folder / each).read_text() for each in ways}) == 1
