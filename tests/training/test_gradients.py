"""The flat gradients of a step: what is summed up, what is reduced, and what the script finds in ``p.grad``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.step.gradients import Gradients
from unicron_elastic.training.step.notes import Notes

MICRO_BATCHES = 3


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _transport() -> Transport:
    return Transport("gloo", lambda: False)


def _made(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, bucket_bytes: int = 2**20) -> Gradients:
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    gradients = Gradients(parameters, MICRO_BATCHES, _transport(), bucket_bytes=bucket_bytes)
    gradients.begin()
    return gradients


def _compute(gradients: Gradients, index: int, factor: float, *positions: int) -> None:
    loss = sum((gradients.parameters[position].float() * factor).sum() for position in positions)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    gradients.take_added()
    gradients.add(index, loss.detach())


def _skip(gradients: Gradients, *indices: int) -> None:
    """These micro-batches have no gradient of anything."""
    for index in indices:
        gradients.add(index, torch.zeros(()))


def _reduce(gradients: Gradients, *, is_awaited: bool = False) -> None:
    for number in range(len(gradients.buckets)):
        work = gradients.reduce(number, [frozenset(range(MICRO_BATCHES))], is_awaited=is_awaited)
        if work is not None:
            work.wait()


def test_gradients_add_up_and_each_loss_is_noted() -> None:
    gradients = _made((2, 3), (4,))
    for index in range(MICRO_BATCHES):
        _compute(gradients, index, index + 1.0, 0, 1)
    _reduce(gradients)
    gradients.settle()
    assert all(torch.equal(p.grad, torch.full_like(p, 6.0)) for p in gradients.parameters)
    assert gradients.losses().tolist() == [10.0, 20.0, 30.0]


def test_who_got_no_gradient_has_none_and_zeros_are_a_gradient() -> None:
    gradients = _made((2,), (2,), (2,))
    _compute(gradients, 0, 1.0, 0)
    _compute(gradients, 1, 0.0, 1)
    _skip(gradients, 2)
    _reduce(gradients)
    gradients.settle()
    first, second, third = gradients.parameters
    assert first.grad is not None
    assert second.grad is not None
    assert second.grad.tolist() == [0.0, 0.0]
    assert third.grad is None


def test_what_was_summed_up_stays_as_it_is_until_all_is_reduced() -> None:
    gradients = _made((4,), bucket_bytes=8)
    _compute(gradients, 0, 2.0, 0)
    before = gradients.parameters[0].grad.clone()
    gradients.buckets[0].reduced.copy_(gradients.stage(0, is_awaited=False)).fill_(-7.0)
    assert torch.equal(gradients.parameters[0].grad, before)


def test_a_step_begins_with_zeros_whatever_the_script_did_to_them() -> None:
    gradients = _made((2,))
    _compute(gradients, 0, 2.0, 0)
    gradients.parameters[0].grad = None
    gradients.begin()
    assert gradients.parameters[0].grad.tolist() == [0.0, 0.0]
    gradients.check()


def test_gradients_taken_away_within_a_step_are_noticed() -> None:
    gradients = _made((2,))
    gradients.parameters[0].grad = None
    with pytest.raises(RuntimeError, match="zero_grad"):
        gradients.check_places()


@pytest.mark.parametrize("is_awaited", [False, True])
def test_all_hear_that_somebody_is_copied_from(is_awaited: bool) -> None:
    gradients = _made((2,))
    _reduce(gradients, is_awaited=is_awaited)
    assert gradients.flags() == (is_awaited, False)


def test_types_do_not_share_buckets_and_large_parameters_have_their_own() -> None:
    parameters = [
        nn.Parameter(torch.zeros(count, dtype=dtype))
        for count, dtype in [(4, torch.float32), (9, torch.bfloat16), (100, torch.float32), (4, torch.float32)]
    ]
    gradients = Gradients(parameters, MICRO_BATCHES, _transport(), bucket_bytes=64)
    assert [bucket.parameters for bucket in gradients.buckets[:-1]] == [(1,), (3,), (2,), (0,)]
    assert [bucket.local.dtype for bucket in gradients.buckets[:-1]] == [torch.bfloat16] + [torch.float32] * 3
    assert gradients.buckets[-2].notes == Notes.size(MICRO_BATCHES, len(parameters))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_without_fp32_parameters_has_notes_all_the_same(dtype: torch.dtype) -> None:
    gradients = _made((3,), dtype=dtype)
    _compute(gradients, 2, 1.0, 0)
    _skip(gradients, 0, 1)
    _reduce(gradients)
    gradients.settle()
    assert gradients.parameters[0].grad.dtype is dtype
    assert gradients.losses().tolist() == [0.0, 0.0, 3.0]


def test_the_reduced_gradients_of_the_last_step_are_kept_until_the_next_reduction() -> None:
    gradients = _made((2,))
    _compute(gradients, 0, 3.0, 0)
    _skip(gradients, 1, 2)
    _reduce(gradients)
    gradients.settle()
    gradients.begin()
    assert gradients.buckets[0].reduced[:2].tolist() == [3.0, 3.0]
    gradients.stage(0, is_awaited=False)
    assert gradients.buckets[0].reduced[:2].tolist() == [0.0, 0.0]


def test_what_an_abandoned_collective_still_writes_is_not_seen() -> None:
    gradients = _made((2,), (2,), bucket_bytes=8)
    _compute(gradients, 0, 1.0, 0, 1)
    _skip(gradients, 1, 2)
    last = gradients.buckets[1].reduced
    _reduce(gradients)
    gradients.renew()
    last.fill_(-7.0)
    work = gradients.reduce(1, [frozenset(range(MICRO_BATCHES))], is_awaited=False)
    assert work is not None
    work.wait()
    last.fill_(-7.0)
    gradients.settle()
    assert all(torch.equal(parameter.grad, torch.ones(2)) for parameter in gradients.parameters)


def test_an_abandoned_collective_between_steps_leaves_the_gradients_of_the_step_before() -> None:
    gradients = _made((2,), (2,), bucket_bytes=8)
    _compute(gradients, 0, 1.0, 0, 1)
    _skip(gradients, 1, 2)
    _reduce(gradients)
    before = [bucket.reduced for bucket in gradients.buckets]
    gradients.begin()
    gradients.renew()
    for bucket, old in zip(gradients.buckets, before, strict=True):
        assert bucket.reduced is not old
        assert torch.equal(bucket.reduced, old)


def _model(*sizes: int) -> tuple[Gradients, list[int]]:
    """Return gradients in buckets of one parameter each, and the list in which they tell which are ready."""
    gradients = _made(*((size,) for size in sizes), bucket_bytes=4 * max(sizes))
    told: list[int] = []
    gradients.when_ready(lambda bucket: told.append(bucket) is None)
    return gradients, told


def test_the_bucket_with_the_notes_is_the_smaller_one() -> None:
    gradients = _made(*[(10,)] * 12, bucket_bytes=320)
    assert [bucket.parameters for bucket in gradients.buckets[:-1]] == [tuple(range(11, 3, -1)), (3, 2, 1), (0,)]
    gradients = _made(*[(10,)] * 10, bucket_bytes=320)
    assert [bucket.parameters for bucket in gradients.buckets[:-1]] == [tuple(range(9, 1, -1)), (1, 0)]


def test_buckets_are_ready_in_the_first_pass_after_the_one_that_showed_their_order() -> None:
    gradients, told = _model(4, 4, 4)
    _compute(gradients, 0, 1.0, 0, 1, 2)
    assert told == []
    _compute(gradients, 1, 1.0, 0, 1, 2)
    assert told == [0, 1]


def test_a_bucket_whose_parameter_gets_no_gradient_holds_up_those_behind_it() -> None:
    gradients, told = _model(4, 4, 4)
    for index, positions in enumerate([(0, 1, 2), (0, 2), (0, 1, 2)]):
        _compute(gradients, index, 1.0, *positions)
    assert told == [0, 0, 1]


def test_the_order_is_learned_again_when_another_one_would_have_told_earlier() -> None:
    gradients, told = _model(4, 4, 4)
    _compute(gradients, 0, 1.0, 2)
    _compute(gradients, 1, 1.0, 0, 1, 2)
    assert told == [0]
    _compute(gradients, 2, 1.0, 0, 1, 2)
    assert told == [0, 0, 1]


class Twice(torch.autograd.Function):
    """`Twice` adds to a parameter's gradient in the middle of a backward pass, as re-entrant checkpoints do."""

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:  # type: ignore[override]
        _ctx.parameter = parameter  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        with torch.enable_grad():
            ctx.parameter.sum().backward()  # type: ignore[attr-defined]
        return grad, None


def _compute_twice(gradients: Gradients, index: int) -> None:
    first, second = gradients.parameters
    (Twice.apply(first * 1.0, second).sum() + second.sum()).backward()
    gradients.take_added()
    gradients.add(index, torch.zeros(()))


@pytest.mark.parametrize("begins", [False, True])
def test_what_is_added_to_a_bucket_that_had_begun_is_told_to_all(*, begins: bool) -> None:
    gradients, _ = _model(4, 4)
    gradients.when_ready(lambda _bucket: begins)
    _compute(gradients, 0, 1.0, 0, 1)
    _compute_twice(gradients, 1)
    _skip(gradients, 2)
    _reduce(gradients)
    assert gradients.flags() == (False, begins)
    _reduce(gradients)
    assert gradients.flags() == (False, False)


def test_nothing_is_begun_early_once_a_pass_has_added_twice() -> None:
    gradients, told = _model(4, 4)
    _compute_twice(gradients, 0)
    _compute(gradients, 1, 1.0, 0, 1)
    _compute(gradients, 2, 1.0, 0, 1)
    assert told == []


def test_what_a_pass_that_broke_has_added_makes_no_bucket_ready_in_the_next_step() -> None:
    gradients, told = _model(4, 4, 4)
    _compute(gradients, 0, 1.0, 0, 1, 2)
    gradients._added += gradients.parameters[1:]
    gradients._ready.look()
    told.clear()
    gradients.begin()
    gradients.parameters[2].sum().backward()
    assert told == [0]
    gradients.parameters[0].sum().backward()
    assert told == [0]
