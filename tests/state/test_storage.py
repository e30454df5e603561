"""States in storage: whole or not used, the newest few, and what goes wrong is said once."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unicron_elastic
from unicron_elastic.state.snapshot.shards import Shards
from unicron_elastic.state.storage import manifest
from unicron_elastic.state.storage.folder import Storage


def make(seed: int = 0, width: int = 16, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, unicron_elastic.Run(model=model, optimizer=optimizer, **more)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def train(folder: Path, *steps: int, keep: int = 3) -> dict[int, torch.Tensor]:
    """Saves these steps; returns the weights of each."""
    model, optimizer, run = make()
    found = {}
    for number in steps:
        step(model, optimizer)
        run.save(folder, number, keep=keep)
        found[number] = weights(model)
    run.wait_saved()
    return found


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.name != manifest.MANIFEST)


def test_the_newest_state_comes_back_with_its_optimizer_and_random_numbers(tmp_path: Path) -> None:
    model, optimizer, run = make()
    for number in (1, 2):
        step(model, optimizer)
        run.save(tmp_path, number)
        saved = weights(model)
        step(model, optimizer)  # must not reach what is being written
    run.wait_saved()
    other, other_optimizer, other_run = make(seed=5)
    assert other_run.restore(tmp_path) == 2
    assert torch.equal(weights(other), saved)
    assert other_run.step == 2
    step(other, other_optimizer)
    assert torch.equal(weights(other), weights(model))


def test_values_of_every_kind_come_back(tmp_path: Path) -> None:
    def values() -> dict[str, Any]:
        return {
            "best": np.float64(2.5),
            "half": np.float16(0.5),
            "epoch": np.int64(3),
            "is_well": np.bool_(True),
            "array": np.arange(4.0),
            "number": np.array(7),
            "bytes": bytes(range(256)) * 64,
            "wide": 2**80,
            "nan": float("inf"),
            "tensors": [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16)],
        }

    _, _, run = make(values=values())
    run.save(tmp_path, 1)
    run.wait_saved()
    taken: dict[str, Any] = dict.fromkeys(values())
    assert make(values=taken)[2].restore(tmp_path) == 1
    for name, right in values().items():
        assert type(taken[name]) is type(right), name
        assert repr(taken[name]) == repr(right), name


def test_a_learning_rate_of_numpy_s_comes_back(tmp_path: Path) -> None:
    _, optimizer, run = make()
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    run.save(tmp_path, 1)
    run.wait_saved()
    _, other, other_run = make()
    assert other_run.restore(tmp_path) == 1
    assert other.param_groups[0]["lr"] == 0.25


def test_an_empty_folder_is_the_beginning(tmp_path: Path, capfd: Any) -> None:
    _, _, run = make()
    assert run.restore(tmp_path) == 0
    assert run.restore(tmp_path / "nowhere") == 0
    assert run.restore() == 0
    assert capfd.readouterr().err == ""


def test_the_newest_few_stay(tmp_path: Path) -> None:
    train(tmp_path, 5, 10, 15, 20, keep=2)
    assert manifest.steps_in(tmp_path) == [15, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-15", "step-20"]


@pytest.mark.parametrize("which", range(2))
def test_a_spoiled_file_is_named_and_the_state_before_is_taken(tmp_path: Path, capfd: Any, which: int) -> None:
    found = train(tmp_path, 5, 10)
    spoiled = files(tmp_path / "step-10")[which]
    content = bytearray(spoiled.read_bytes())
    content[len(content) // 2] ^= 1
    spoiled.write_bytes(content)
    model, _, run = make(seed=5)
    assert run.restore(tmp_path) == 5
    assert torch.equal(weights(model), found[5])
    said = capfd.readouterr().err
    assert f"Rank 0: the state of step 10 cannot be used: the file {spoiled} is not what was written: " in said
    assert "All ranks go on from step 5, from storage." in said


def test_whatever_is_wrong_with_any_file_of_a_state_the_one_before_is_taken_on_every_rank(tmp_path: Path) -> None:
    found = train(tmp_path, 5, 10)
    path, draw = tmp_path / "step-10", random.Random(7)
    whole = {each: each.read_bytes() for each in path.iterdir()}
    model, _, run = make(seed=5)

    def assert_is_passed_over(what: str) -> None:
        run.restore(tmp_path)
        assert torch.equal(weights(model), found[5]), what
        for rank in range(3):
            with pytest.raises(ValueError, match=r"step-10"):
                Storage().find(tmp_path, rank, 3)[10].load(Shards({}))

    for file, content in whole.items():
        if file.name == manifest.MANIFEST:
            continue
        for bit in draw.sample(range(8 * len(content)), 25):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            assert_is_passed_over(f"bit {bit} of {file.name}")
        at = draw.randrange(len(content))
        for changed in (b"", content[:at], content[:at] + content[at : at + 1] + content[at:], content + content):
            file.write_bytes(changed)
            assert_is_passed_over(f"{file.name} with {len(changed)} of {len(content)} bytes")
        file.unlink()
        assert_is_passed_over(f"no {file.name}")
        file.write_bytes(content)
    assert run.restore(tmp_path) == 10


def test_no_flipped_bit_of_a_manifest_ends_the_job(tmp_path: Path) -> None:
    found = train(tmp_path, 5, 10)
    file, draw = tmp_path / "step-10" / manifest.MANIFEST, random.Random(7)
    content = file.read_bytes()
    model, _, run = make(seed=5)
    for bit in draw.sample(range(8 * len(content)), 60):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        step = run.restore(tmp_path)
        assert torch.equal(weights(model), found[step]), bit


def test_a_file_that_cannot_be_read_in_any_way_is_passed_over(tmp_path: Path) -> None:
    """Its checksum is right: somebody has written it so."""
    found = train(tmp_path, 5, 10)
    path = tmp_path / "step-10"
    (path / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    (path / manifest.MANIFEST).unlink()
    manifest.finish(path)
    model, _, run = make(seed=5)
    assert run.restore(tmp_path) == 5
    assert torch.equal(weights(model), found[5])


@pytest.mark.parametrize("what", ["file", "manifest", "garbage"])
def test_what_is_not_whole_is_not_used(tmp_path: Path, what: str) -> None:
    train(tmp_path, 5, 10)
    path = tmp_path / "step-10"
    if what == "file":
        files(path)[0].unlink()
    elif what == "manifest":
        (path / manifest.MANIFEST).unlink()
    else:
        (path / manifest.MANIFEST).write_text('{"files": 3}')
    _, _, run = make(seed=5)
    assert run.restore(tmp_path) == 5


@pytest.mark.parametrize("which", [manifest.MANIFEST, ".metadata"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path, which: str) -> None:
    train(tmp_path, 10)
    path = tmp_path / "step-10"
    (path / which).unlink()
    os.mkfifo(path / which)  # to open it for reading waits until somebody writes
    with pytest.raises(ValueError, match=f"{which} is no regular file"):
        manifest.check(path)


def test_what_was_never_finished_is_removed_once_there_is_something_newer(tmp_path: Path) -> None:
    train(tmp_path, 5)
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-99").mkdir()
    train(tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-5", "step-99"]


def test_which_go() -> None:
    assert manifest.to_remove([5, 10, 15, 20], [3, 12, 25], 2, 20) == [5, 10, 3, 12]
    assert manifest.to_remove([5], [], 3, 5) == []
    assert manifest.to_remove([], [5], 3, 5) == []
    assert manifest.to_remove([1, 2, 90, 100], [0, 70], 1, 2) == [1, 0]


def test_a_save_leaves_itself_and_what_is_later_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 90, 100)
    capfd.readouterr()
    train(tmp_path, 5, 10, 15, keep=1)
    assert manifest.steps_in(tmp_path) == [15, 90, 100]
    said = capfd.readouterr().err
    assert said.count("unicron: ") == 1
    assert f"{tmp_path} holds a state of step 100, later than step 5, which was saved there now" in said


def test_states_that_cannot_be_used_stay_beside_those_that_are_saved_then(tmp_path: Path, capfd: Any) -> None:
    train(tmp_path, 90, 100)
    for file in tmp_path.glob("step-*/*.distcp"):
        file.write_bytes(file.read_bytes()[::-1])
    _, _, run = make()
    assert run.restore(tmp_path) == 0
    assert capfd.readouterr().err.endswith("its checksum is wrong. All ranks go back to step 0.\n")
    train(tmp_path, 5, 10, keep=2)
    _, _, run = make()
    assert run.restore(tmp_path) == 10
    assert manifest.steps_in(tmp_path) == [5, 10, 90, 100]


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 5)
    _, _, run = make(width=17)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.restore(tmp_path)
    _, _, run = make(more=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(ValueError, match=r"the state has \['model', 'optimizer'\], and here \['model', 'more', "):
        run.restore(tmp_path)


def test_wrong_arguments_are_one_sentence(tmp_path: Path) -> None:
    _, _, run = make()
    with pytest.raises(ValueError, match="keep must be 1 or more, got 0"):
        run.save(tmp_path, 1, keep=0)
    with pytest.raises(ValueError, match="step must be 0 or more, got -4"):
        run.save(tmp_path, -4)
    with pytest.raises(ValueError, match="step and every must be 0 or more, got -1 and 1"):
        run.snapshot(-1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount one")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said_once_and_ends_nothing(small_disk: Path, capfd: Any) -> None:
    model, optimizer, run = make()
    run.save(small_disk, 1)
    run.wait_saved()
    (small_disk / "big").touch()
    with (small_disk / "big").open("r+b", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for number in (2, 3):
        step(model, optimizer)
        run.save(small_disk, number)
        run.wait_saved()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("unicron: ")]
    assert said == [
        f"unicron: the state was not saved in {small_disk / 'step-2'}: No space left on device. The training goes on."
    ]
    (small_disk / "big").unlink()
    run.save(small_disk, 4)
    run.wait_saved()
    assert manifest.steps_in(small_disk) == [1, 4]
    assert make()[2].restore(small_disk) == 4


def test_a_folder_that_cannot_be_made_is_said_once_for_each_kind(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").write_text("")
    _, _, run = make()
    for number, folder in enumerate((tmp_path / "file", Path("/proc/nothing"), tmp_path / "file")):
        run.save(folder, number)
        run.wait_saved()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("unicron: ")]
    assert [line.partition(": the state was not saved in ")[2] for line in said] == [
        f"{tmp_path / 'file' / 'step-0'}: Not a directory. The training goes on.",
        "/proc/nothing/step-1: No such file or directory. The training goes on.",
    ]
