"""Where Megatron-Core's sums are, when something that was given up may still write to where they were."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic.engine.transport.waiter import AbandonedError, Waiter
from unicron_elastic.megatron.buckets import Buckets


def _chunk(parameter: nn.Parameter) -> Any:
    """Return one as Megatron-Core's, of one parameter in one bucket."""
    data = torch.zeros(4)
    parameter.main_grad = data[:3].view(parameter.shape)
    bucket = SimpleNamespace(grad_data=data, offset=0)
    group = SimpleNamespace(
        buckets=[bucket],
        ddp_config=SimpleNamespace(overlap_grad_reduce=False, use_distributed_optimizer=False),
        per_param_grad_ready_counts={},
        grad_reduce_handle=None,
        start_grad_sync=lambda **_: None,
        finish_grad_sync=lambda **_: None,
    )
    buffer = SimpleNamespace(
        grad_data=data, buckets=[bucket], params=[parameter], param_index_map={parameter: (0, 3, 0)}
    )
    return SimpleNamespace(bucket_groups=[group], buffers=[buffer])


@pytest.mark.parametrize("is_wide", [False, True])
def test_what_was_given_up_writes_where_nothing_is_any_more(is_wide: bool) -> None:
    parameter, abandoned = nn.Parameter(torch.zeros(3)), list[str]()
    buckets = Buckets([_chunk(parameter)], Waiter(lambda: True), lambda: abandoned.append("groups"), is_wide=is_wide)
    buckets.begin()
    parameter.main_grad += 1
    buckets.reduce()
    buckets.keep_reduced()
    late, may_go_on, has_written = parameter.main_grad, threading.Event(), threading.Event()

    def sum_within() -> None:
        late.add_(2)  # a part of it
        may_go_on.wait()
        late.add_(4)
        has_written.set()

    with pytest.raises(AbandonedError):
        buckets.change_reduced(sum_within)
    buckets.restore_reduced()
    buckets.restore()
    may_go_on.set()
    assert has_written.wait(10)
    assert parameter.main_grad.tolist() == [1, 1, 1]
    assert abandoned == ["groups"]
    buckets.round()
    assert parameter.main_grad.tolist() == [1, 1, 1]
    assert parameter.main_grad.dtype == torch.float32
