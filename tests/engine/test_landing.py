"""A result counts when a device has passed the mark behind it, in a world that is whole then."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistNetworkError

from unicron_elastic.engine.transport.landing import know_landing, mark_devices, marking_of
from unicron_elastic.engine.transport.waiter import AbandonedError, Waiter


class Passed:
    """`Passed` is a mark that a device passes when it is asked for the n-th time; 0: never. It calls ``then``."""

    def __init__(self, when: int, then: object = None) -> None:
        self.left = when
        self.then = then

    def query(self) -> bool:
        """As an event's."""
        self.left -= 1
        if self.left == 0 and callable(self.then):
            self.then()
        return self.left == 0


class Enqueued:
    """`Enqueued` is a work on a stream, of which a watchdog may know an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def exception(self) -> Exception | None:
        """As a Work's."""
        return self.error


def test_gloo_has_no_marks_and_what_is_not_known_has_those_of_its_devices() -> None:
    assert marking_of("gloo")([torch.zeros(1)]) == ()
    assert marking_of("cpu:gloo")([torch.zeros(1)]) == ()
    assert marking_of("cpu:gloo,cuda:nccl") is marking_of("nccl") is mark_devices
    assert list(mark_devices([torch.zeros(1)])) == []


def test_a_back_end_may_bring_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unicron_elastic.engine.transport.landing._markings", {})
    know_landing("own", lambda tensors: [Passed(len(tensors))])
    assert [each.left for each in marking_of("own")([torch.zeros(1)] * 3)] == [3]  # type: ignore[attr-defined]


def test_it_waits_until_the_device_has_passed_the_mark() -> None:
    slow = Passed(3)
    Waiter(lambda: False).land(Enqueued(), [slow])  # type: ignore[arg-type]
    assert slow.left == 0


@pytest.mark.parametrize("error", [None, RuntimeError("of a peer")])
def test_what_a_watchdog_knows_is_raised(error: Exception | None) -> None:
    waiter, work = Waiter(lambda: False), Enqueued(error)
    if error is None:
        waiter.land(work, [Passed(1)])  # type: ignore[arg-type]
    else:
        with pytest.raises(RuntimeError, match="of a peer"):
            waiter.land(work, [Passed(1)])  # type: ignore[arg-type]


def test_a_mark_that_is_passed_after_an_abort_says_nothing() -> None:
    broken: list[bool] = []
    waiter = Waiter(lambda: bool(broken))
    with pytest.raises(DistNetworkError, match="before the device had finished"):
        waiter.land(Enqueued(), [Passed(2, lambda: broken.append(True))])  # type: ignore[arg-type]


def test_a_device_that_never_passes_a_mark_of_a_broken_world_is_given_up() -> None:
    waiter = Waiter(lambda: True)
    waiter.begin()
    with pytest.raises(AbandonedError):
        waiter.land(Enqueued(), [Passed(0)])  # type: ignore[arg-type]
    assert not waiter.has_landed([Passed(0)])
    assert waiter.has_landed([Passed(1)])
