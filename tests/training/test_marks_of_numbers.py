"""Weights that change behind torch's back while they are copied make no torn snapshot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unicron_elastic.state.layout import flatten
from unicron_elastic.state.snapshot.writer import SnapshotWriter
from unicron_elastic.training.snapshot.marks_of_numbers import MarksOfNumbers

ABOUT = {"step": 3, "lineage": 1, "rank": 0, "world_size": 1, "is_replicated": False, "has_own_parts": True}
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "clipped, as by a WGAN": lambda weights: weights.data.clamp_(-0.1, 0.1),
    "replaced by an average": lambda weights: weights.data.copy_(torch.full_like(weights, 0.5)),
    "by another library": lambda weights: weights.detach().numpy().fill(0.5),
}


def begun(weights: Tensor, most: int = 0) -> SnapshotWriter:
    writer = SnapshotWriter(files=2)
    layout, tensors = flatten({"weights": weights})
    marks = MarksOfNumbers([weights], None, most=most)
    writer.begin(layout, tensors, {**ABOUT, "is_for_peer": False}, lambda _: None, marks)
    return writer


def test_who_steps_unseen_has_the_two_newest_kept_from_then_on() -> None:
    weights = nn.Parameter(torch.randn(300, 1000))
    writer = begun(weights)
    writer.before_step(None)  # of an optimizer of torch's
    for step in range(4, 8):
        writer.wait()
        layout, tensors = flatten({"weights": weights})
        marks = None if writer.is_careful else MarksOfNumbers([weights], None)
        writer.begin(layout, tensors, {**ABOUT, "step": step, "is_for_peer": False}, lambda _: None, marks)
        weights.data.mul_(0.9)  # by one of the script's own
        writer.wait_copied()
    writer.wait()
    assert sorted(steps(writer)) == [6, 7]


def steps(writer: SnapshotWriter) -> list[int]:
    return [header.step for file in writer._files if (header := file.header()) is not None]


@pytest.mark.parametrize("most", [0, 256])
@pytest.mark.parametrize("how", CHANGES)
def test_a_snapshot_of_weights_that_change_meanwhile_is_not_kept(
    how: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = nn.Parameter(torch.randn(300, 1000))
    writer = begun(weights, most)
    CHANGES[how](weights)
    writer.before_step(None)
    assert steps(writer) == []
    assert writer.is_careful
    assert "the snapshot after 3 steps is not kept, as weights were changed while it was" in capsys.readouterr().err


def test_one_of_weights_that_stay_is_and_the_marks_hold_nothing_then() -> None:
    weights = nn.Parameter(torch.randn(300, 1000))
    writer = begun(weights)
    writer.before_step(None)
    writer.wait()
    assert steps(writer) == [3]
    assert not writer.is_careful


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(700, 3).t(),
        torch.randn(2, 3, 40, 40).to(memory_format=torch.channels_last),
        torch.randn(50, 60)[:, ::2],
        torch.randn(3000, dtype=torch.complex64),
        torch.ones(()),
        torch.ones(0),
    ],
    ids=["transposed", "channels last", "with gaps", "complex", "single", "empty"],
)
def test_a_sample_tells_of_what_is_done_to_the_whole_of_a_tensor_however_it_lies_in_memory(tensor: Tensor) -> None:
    marks = MarksOfNumbers([tensor, torch.zeros(9, dtype=torch.int32)], None, most=16)
    assert not marks.have_changed()
    tensor.mul_(0.5)
    assert marks.have_changed() == bool(tensor.numel())


def test_others_are_asked_and_forgotten_too() -> None:
    said: list[str] = []

    class Others:
        def have_changed(self) -> bool:
            said.append("asked")
            return True

        def forget(self) -> None:
            said.append("forgotten")

    marks = MarksOfNumbers([torch.ones(3, dtype=torch.bfloat16), torch.ones(()), torch.ones(0)], Others())
    assert marks.have_changed()
    marks.forget()
    assert said == ["asked", "forgotten"]
