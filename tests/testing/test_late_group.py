"""The late back end gives what gloo does, later; and what reads too early, or goes on after an abort, is seen."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from unicron_elastic.testing.late import Fate, LateGroup, Lateness, StreamOrder, event_of, lateness, synchronize

DEADLINE_S = 120.0
SCRIPT = str(Path(__file__).parent / "late_ranks.py")
# Lists, and what waits by itself, are read behind a synchronization by the script that tries them.
NOT_SEEN_LATE = {"all_gather", "all_to_all"}
AS_IT_COMES = "functional all_reduce"  # its result is a copy, made when it may have come or not
READS_AT_ONCE = "all_gather_object"


@pytest.fixture
def ranks(warm_launchers: Any, tmp_path: Path) -> Any:
    def run(what: str, size: int, *words: str) -> list[dict[str, Any]]:
        said = [tmp_path / f"{'-'.join(words)}-{rank}" for rank in range(size)]
        store = str(tmp_path / f"store-{'-'.join(words)}")
        begun = [
            warm_launchers.begin(said[rank], SCRIPT, what, str(rank), str(size), store, *words) for rank in range(size)
        ]
        try:
            codes = [each.wait(DEADLINE_S) for each in begun]
        finally:
            for each in begun:
                each.kill()
        texts = [each.read_text() for each in said]
        assert codes == [0] * size, texts
        return [json.loads(text.splitlines()[-1]) for text in texts]

    return run


@pytest.mark.parametrize("is_ordered", [False, True])
def test_each_operation_gives_what_gloo_does_and_late_unless_the_stream_orders_it(ranks: Any, is_ordered: bool) -> None:
    for found in ranks("operations", 3, *["stream"] * is_ordered):
        if not is_ordered:
            assert "UnpicklingError" in found.pop(READS_AT_ONCE)["error"]
        assert {name: each.get("is_right") for name, each in found.items()} == dict.fromkeys(found, True)
        late = {name for name, each in found.items() if each["is_late"]}
        assert late - {AS_IT_COMES} == (set() if is_ordered else set(found) - NOT_SEEN_LATE - {AS_IT_COMES})


@pytest.mark.parametrize("kind", ["ddp", "ddp with a hook", "fsdp2"])
def test_in_stream_order_training_has_the_bits_that_it_has_over_gloo(ranks: Any, kind: str) -> None:
    assert ranks("train", 2, kind, "stream") == ranks("train", 2, kind, "gloo")


def test_an_abort_is_silent_and_leaves_garbage(ranks: Any) -> None:
    assert [each["has_nan"] for each in ranks("train", 2, "ddp", "stream", "abort")] == [True, True]


def test_a_torn_abort_leaves_numbers_that_are_wrong(ranks: Any) -> None:
    torn, whole = ranks("train", 2, "ddp", "stream", "abort", "torn"), ranks("train", 2, "ddp", "gloo")
    assert not any(each["has_nan"] for each in torn)
    assert {each["digest"] for each in torn}.isdisjoint({each["digest"] for each in whole})


@pytest.fixture
def group() -> LateGroup:
    return LateGroup(HashStore(), 0, 1, timedelta(seconds=20))


def test_an_event_tells_when_the_result_is_there(group: LateGroup) -> None:
    tensor = torch.ones(3)
    work = group.allreduce([tensor])
    assert work.wait()
    event = event_of(tensor)
    assert event is not None
    assert tensor.isnan().all()
    assert event.synchronize(DEADLINE_S)
    assert event.query()
    assert event.fate is Fate.LANDED
    assert work.is_success()
    assert tensor.tolist() == [1.0] * 3
    group.shutdown()


def test_what_is_aborted_has_ended_and_was_no_success(group: LateGroup) -> None:
    tensor = torch.ones(3)
    group.abort()
    work = group.allreduce([tensor])
    event = event_of(tensor)
    assert event is not None
    assert event.synchronize(DEADLINE_S)
    assert work.is_completed()
    assert not work.is_success()
    assert event.fate is Fate.ABORTED
    assert not synchronize()
    group.shutdown()


def test_behind_the_stream_nothing_reads_too_early(group: LateGroup) -> None:
    tensor = torch.ones(3)
    group.allreduce([tensor])
    with StreamOrder():
        assert float(tensor.sum()) == 3.0
    assert event_of(tensor) is None
    group.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool, torch.uint8])
def test_garbage_is_seen_in_each_type(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    Lateness().spoil(tensor)
    assert not torch.equal(tensor, torch.zeros(2, dtype=dtype))


def test_what_is_torn_has_the_sum_behind() -> None:
    tensor = torch.zeros(4)
    Lateness(is_torn=True).spoil(tensor)
    Lateness(is_torn=True).tear(tensor, torch.ones(4))
    assert tensor.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert not lateness.is_torn
