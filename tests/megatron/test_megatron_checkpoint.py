"""Sharded checkpoints of the Megatron-Core example: read with another layout, it trains on as if nothing had been.

A run that nobody disturbs writes checkpoints on the way. Another one begins with the first of them, and comes to the
losses, weights and moments of the first run: Megatron-Core sums in fp32, in an order that depends on the layout, and
rounds to bf16 in places that do, so they agree up to that.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megatron_processes import DEADLINE_S, EXAMPLE, needs_megatron
from warm_launcher import WarmLaunchers, environment_of_no_job

pytestmark = needs_megatron

STEPS, HALF = 8, 4
SIZE = ("--layers=4", "--hidden=64", "--sequence=32", "--micro-batch-size=2", "--micro-batches=12")
STRUCK = Path(__file__).with_name("struck_checkpoints.py")
# Of what comes out after the other half of the steps: losses are printed with four decimals, and were the same; tensors
# differed by 3e-7 of their length at most, with bf16 by 7e-4.
LOSS, WEIGHTS = 1.5e-4, 1e-6
LOSS_BF16, WEIGHTS_BF16 = 5e-4, 2e-3


class Run(NamedTuple):
    out: str
    err: str

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        found = re.findall(r"^step (\d+) loss (\d+\.\d{4})", self.out, re.MULTILINE)
        return {int(step): float(loss) for step, loss in found}


def train(
    layout: str,
    folder: Path,
    *more: str,
    launcher: str = "torchrun",
    script: tuple[Any, ...] = (EXAMPLE,),
    warm: WarmLaunchers | None = None,
) -> Run:
    """The example on as many ranks as the layout begins with, with its options; ``warm``: in forks of unicron-run."""
    ranks, *options = layout.split()
    arguments = (*SIZE, f"--steps={STEPS}", "--log-every=1", f"--checkpoint={folder}", f"--checkpoint-every={HALF}")
    launch = [Path(sysconfig.get_path("scripts")) / launcher, "--standalone", f"--nproc-per-node={ranks}"]
    launch += ["--max-restarts=9"] if launcher == "unicron-run" else []
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_", "TORCHEL"))}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    if warm is not None:
        launch[0] = launch[0].with_name("unicron-run")
        return _trained_in_forks(warm, [*launch, *script, *arguments, *options, *more], environ, folder.parent)
    with subprocess.Popen(
        [*launch, *script, *arguments, *options, *more],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            run = Run(*process.communicate(timeout=DEADLINE_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("still running: {}\n{}".format(*process.communicate()))
    assert process.returncode == 0, run
    return run


def _trained_in_forks(warm: WarmLaunchers, words: Sequence[Any], environ: dict[str, str], folder: Path) -> Run:
    said = folder / "out", folder / "err"
    with open(os.devnull, "rb") as null, open(said[0], "wb") as out, open(said[1], "wb") as err:
        environ = environ | environment_of_no_job(folder)
        process = warm.start(list(map(str, words)), environ, folder, [null, out, err], forks_keeper=True)
    code = process.wait(DEADLINE_S)
    run = Run(*(each.read_text() for each in said))
    assert code == 0, run
    return run


def tensors(folder: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint has, by name."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = folder.parent / f"{folder.name}-{step}.pt"
    dcp_to_torch_save(folder / f"step-{step}", path)
    return {key: value for key, value in torch.load(path).items() if isinstance(value, torch.Tensor)}


def off(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """By kind, how far all tensors of a checkpoint are from those of another, relative to their length."""
    import torch

    assert found.keys() == wanted.keys()
    kinds = {key: re.match(r"optimizer\.state\.\w+", key) for key in wanted}
    by_kind: dict[str, list[str]] = {}
    for key, match in kinds.items():
        by_kind.setdefault(match[0] if match else "weights", []).append(key)

    def flat(of: dict[str, Any], keys: list[str]) -> Any:
        return torch.cat([of[key].double().view(-1) for key in keys])

    return {
        kind: float((flat(found, keys) - flat(wanted, keys)).norm() / flat(wanted, keys).norm())
        for kind, keys in by_kind.items()
    }


class Undisturbed(NamedTuple):
    folder: Path
    run: Run


Begun = Callable[[str], Undisturbed]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm_launchers: WarmLaunchers) -> Begun:
    """What a layout comes to if nothing happens; each is run once."""
    known: dict[str, Undisturbed] = {}

    def of(layout: str) -> Undisturbed:
        if layout not in known:
            folder = tmp_path_factory.mktemp("undisturbed") / "checkpoints"
            known[layout] = Undisturbed(folder, train(layout, folder, warm=warm_launchers))
            assert sorted(path.name for path in folder.iterdir()) == [f"step-{HALF}", f"step-{STEPS}"]
        return known[layout]

    return of


def half_of(begun: Undisturbed, tmp_path: Path) -> Path:
    """A folder with the first checkpoint of a run."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(begun.folder / f"step-{HALF}", folder / f"step-{HALF}")
    return folder


def assert_went_on(run: Run, folder: Path, begun: Undisturbed, *, is_bf16: bool = False) -> None:
    """From the first checkpoint, to what the undisturbed run came to."""
    wanted = begun.run.losses
    print(run.losses, wanted, off(tensors(folder, STEPS), tensors(begun.folder, STEPS)))
    assert run.losses == pytest.approx(
        {step: wanted[step] for step in range(HALF + 1, STEPS + 1)}, abs=LOSS_BF16 if is_bf16 else LOSS
    )
    found = off(tensors(folder, STEPS), tensors(begun.folder, STEPS))
    assert max(found.values()) < (WEIGHTS_BF16 if is_bf16 else WEIGHTS), found


SHARDED = "--distributed-optimizer"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"2 {SHARDED}", "2 --tensor=2"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("2", f"3 {SHARDED}"),
                ("2", "2 --pipeline=2"),
                ("2 --pipeline=2", f"2 {SHARDED}"),
                ("4 --tensor=2 --pipeline=2", "4"),
                (f"4 --tensor=2 {SHARDED}", f"4 --pipeline=2 {SHARDED} --overlap-grad-reduce"),
                (f"4 {SHARDED}", "1"),
                (f"2 --pipeline=2 --virtual-pipeline=2 {SHARDED}", f"3 {SHARDED}"),
                ("2 --untied --clip-grad=0", "4 --pipeline=4 --untied --clip-grad=0"),
                (f"2 --bf16 {SHARDED}", "2 --bf16 --tensor=2"),
                ("2 --bf16 --pipeline=2", f"4 --bf16 --tensor=2 {SHARDED}"),
            )
        ),
    ],
)
def test_another_layout_trains_on_alike(
    undisturbed: Begun, tmp_path: Path, first: str, second: str, warm_launchers: WarmLaunchers
) -> None:
    begun = undisturbed(first)
    folder = half_of(begun, tmp_path)
    assert_went_on(train(second, folder, warm=warm_launchers), folder, begun, is_bf16="--bf16" in first)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [f"2 {SHARDED}", "2 --tensor=2", f"2 --bf16 {SHARDED}"])
def test_the_same_layout_trains_on_bit_by_bit(undisturbed: Begun, tmp_path: Path, layout: str) -> None:
    begun = undisturbed(layout)
    folder = half_of(begun, tmp_path)
    train(layout, folder)
    assert set(off(tensors(folder, STEPS), tensors(begun.folder, STEPS)).values()) == {0.0}


@pytest.mark.slow
def test_what_cannot_be_read_is_named_and_skipped(undisturbed: Begun, tmp_path: Path) -> None:
    begun = undisturbed(f"2 {SHARDED}")
    folder = half_of(begun, tmp_path)
    damaged = folder / "step-5"
    shutil.copytree(begun.folder / f"step-{STEPS}", damaged)
    file = damaged / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    foreign = folder / "step-6"
    foreign.mkdir()
    (foreign / "unicron.json").write_text('{"files": {}}')
    (folder / "step-7.unfinished").mkdir()
    run = train("2 --tensor=2", folder)
    assert_went_on(run, folder, begun)
    said = [line for line in run.err.splitlines() if line.startswith("unicron: ")]
    assert said == [
        f"unicron: {foreign} is not read: it is no checkpoint of Megatron-Core.",
        f"unicron: {damaged} is not read: the file {file} is not what was written: its checksum is wrong.",
        f"unicron: the checkpoint {folder / 'step-7'} was not finished: it is removed.",
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["step-6", f"step-{STEPS}"]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_not_read(undisturbed: Begun, tmp_path: Path) -> None:
    folder = half_of(undisturbed(f"2 {SHARDED}"), tmp_path)
    run = train("2", folder, "--hidden=32")
    assert list(run.losses) == list(range(1, STEPS + 1))
    assert run.err.count(" is not read: ") == 1
    assert "shape mismatch" in run.err


@pytest.mark.parametrize(
    ("layout", "strike"),
    [
        pytest.param(layout, strike, marks=pytest.mark.slow)
        for layout, strike in (
            (f"4 {SHARDED}", f"1:{HALF}:given"),
            (f"4 {SHARDED}", f"1:{HALF}:written"),
            (f"4 {SHARDED}", f"0:{HALF}:manifest"),
            (f"4 {SHARDED}", f"0:{HALF}:finished"),
            ("4 --tensor=2", f"3:{HALF}:written"),
            ("4 --pipeline=2", f"0:{HALF}:prepared"),
        )
    ],
)
def test_a_rank_lost_while_it_is_written(undisturbed: Begun, tmp_path: Path, layout: str, strike: str) -> None:
    begun, folder, mark = undisturbed(layout), tmp_path / "checkpoints", tmp_path / "mark"
    run = train(layout, folder, launcher="unicron-run", script=(STRUCK, strike, mark))
    assert mark.exists()
    wanted = {step: loss for step, loss in begun.run.losses.items() if step in run.losses}
    assert run.losses == pytest.approx(wanted, abs=LOSS)
    left = sorted(path.name for path in folder.iterdir())
    assert left in ([f"step-{STEPS}"], [f"step-{HALF}", f"step-{STEPS}"]), run.err
    found = off(tensors(folder, STEPS), tensors(begun.folder, STEPS))
    assert max(found.values()) < WEIGHTS, found


@pytest.mark.slow
def test_two_neighbours_are_lost_and_the_job_begins_with_the_checkpoint(undisturbed: Begun, tmp_path: Path) -> None:
    layout = f"4 {SHARDED}"
    begun, folder = undisturbed(layout), tmp_path / "checkpoints"
    run = train(layout, folder, "--kill=1:6", "--kill=2:6", launcher="unicron-run")
    steps = [int(step) for step in re.findall(r"^step (\d+) ", run.out, re.MULTILINE)]
    assert steps == [*range(1, 7), *range(HALF + 1, STEPS + 1)], run
    assert_went_on(Run(run.out.partition("step 6 ")[2], run.err), folder, begun)
