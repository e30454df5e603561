"""An object that one rank gives to all: what it may be, and that it comes in a message, or behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from unicron_elastic.training.group.mean_share import MESSAGE_BYTES, check_same
from unicron_elastic.training.object_share import ObjectShare

CPU = torch.device("cpu")


def _given(*values: Any) -> list[Any]:
    """What each of these ranks gets."""
    shares = [ObjectShare.of(value, CPU, None) for value in values]
    messages = [share.message(f"run.broadcast_object() number 1, of {share.kind}") for share in shares]
    assert {message.numel() for message in messages} == {MESSAGE_BYTES}
    check_same(messages)

    def broadcast(tensor: Tensor, source: int) -> None:
        tensor.copy_(shares[source].numbers)

    members: list[Any] = [SimpleNamespace(rank=rank, broadcast=broadcast) for rank in range(len(values))]
    results = [share.result(messages, each) for share, each in zip(shares, members, strict=True)]
    return [share.given_back(result) for share, result in zip(shares, results, strict=True)]


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, "text", "a" * 5000, b"bytes", [1, (2, "3")], {"a": {"b": [None]}, "c": 2**70}, {}, ()],
)
def test_all_get_what_the_first_has(value: Any) -> None:
    for other in (None, "other", "." * 10_000):
        assert _given(value, other, other) == [value] * 3


@pytest.mark.parametrize("count", range(1_650, 1_900, 3))
def test_it_is_whole_where_it_just_goes_into_a_message_and_where_it_just_does_not(count: int) -> None:
    assert _given("." * count, None) == ["." * count] * 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (1000,)])
def test_tensors_are_copies(shape: tuple[int, ...]) -> None:
    given = torch.rand(shape)
    first, second = _given({"x": given}, None)
    assert torch.equal(first["x"], given)
    assert torch.equal(second["x"], given)
    first["x"].fill_(7.0)
    assert not (given == 7.0).any()


@pytest.mark.parametrize("value", [{1, 2}, object(), int, {"a": [print]}])
def test_what_cannot_be_sent_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"run.broadcast_object\(value\) takes what can be registered: value.* be sent"):
        ObjectShare.of(value, CPU, None)


def test_it_lacks_the_first_rank_alone() -> None:
    share = ObjectShare.of(1, CPU, None)
    assert share.lacks(frozenset({1, 2})) == frozenset()
    assert share.lacks(frozenset({0, 2})) == frozenset({0})
