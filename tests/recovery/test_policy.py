"""The accounting of restarts, by itself."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_elastic import WrongUseError
from unicron_elastic.faults import Failure, RootCause, classify, root_cause
from unicron_elastic.recovery.policy import Life, Policy, Repeats, count_repeats, judge, restarts_after_progress

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 88, in step\n'


def _failure(**known: Any) -> Failure:
    return Failure(**{"at": 1.0, "rank": 3, "local_rank": 1, "pid": 4242, "step": 5, **known})


def _cause(**known: Any) -> RootCause:
    return root_cause([classify(_failure(**known))])


def _repeats(count: int, step: int = 5) -> Repeats:
    return Repeats(signature="exit 1 | ", step=step, count=count)


OWN_MISTAKES = (
    *("SyntaxError", "NameError", "ImportError", "AttributeError", "TypeError", "IndexError", "KeyError", "ValueError"),
    *("AssertionError", "ZeroDivisionError", "NotImplementedError"),
)
FROM_OUTSIDE = (
    *("TimeoutError", "ConnectionError", "ConnectionResetError", "OSError", "FileNotFoundError", "BlockingIOError"),
    *("EOFError", "MemoryError", "KeyboardInterrupt", "RuntimeError", "queue.Empty", "urllib.error.URLError"),
    *("requests.exceptions.ConnectionError", "json.decoder.JSONDecodeError", "UnicodeDecodeError", "SystemExit"),
    *("torch.OutOfMemoryError", "torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"),
    *("botocore.exceptions.ClientError", "MyError"),
)


@pytest.mark.parametrize("kind", OWN_MISTAKES)
def test_a_mistake_of_the_script_is_counted_in_a_row(kind: str) -> None:
    known = {"exception_type": kind, "message": "'x'", "stack": f"{TRACEBACK}{kind}: 'x'\n"}
    first = count_repeats(None, _cause(**known))
    assert first is not None
    assert (first.count, first.step) == (1, 5)
    second = count_repeats(first, _cause(**known, rank=7, pid=1, at=9.0))
    assert second is not None
    assert second.count == 2


@pytest.mark.parametrize("kind", FROM_OUTSIDE)
@pytest.mark.parametrize("step", [None, 0, 5])
@pytest.mark.parametrize("message", ["", "bad reply"])
def test_what_comes_from_outside_never_ends_a_job_early(kind: str, step: int | None, message: str) -> None:
    cause = _cause(exception_type=kind, message=message, step=step, exit_code=1)
    assert count_repeats(None, cause, Life(lived_s=2.0, has_saved=False, has_restored=False)) is None


def test_what_our_own_run_refuses_comes_again() -> None:
    kind = f"{WrongUseError.__module__}.{WrongUseError.__qualname__}"
    stack = f"{TRACEBACK}{kind}: give it the loss\n"
    assert count_repeats(None, _cause(exception_type=kind, message="give it the loss", step=3, stack=stack)) is not None


@pytest.mark.parametrize(("kind", "count"), [("unicron_elastic.WrongUseError", 2), ("ValueError", 1)])
def test_a_refusal_is_the_same_in_whichever_micro_batch_it_comes_first(kind: str, count: int) -> None:
    repeats = None
    for index in (3, 5):
        known = {"exception_type": kind, "message": f"micro-batch {index} failed", "stack": f"{TRACEBACK}{kind}: x\n"}
        repeats = count_repeats(repeats, _cause(**known, rank=index))
    assert repeats is not None
    assert repeats.count == count


@pytest.mark.parametrize("exit_code", [1, *(-number for number in (4, 6, 7, 8, 9, 11, 15))])
def test_without_an_exception_nothing_says_that_it_comes_again(exit_code: int) -> None:
    assert count_repeats(None, _cause(exit_code=exit_code)) is None


@pytest.mark.parametrize(
    ("first", "is_counted"), [("TimeoutError", False), ("requests.exceptions.ReadTimeout", False), ("KeyError", True)]
)
@pytest.mark.parametrize(
    "joined",
    [
        "The above exception was the direct cause of the following exception:",
        "During handling of the above exception, another exception occurred:",
    ],
)
def test_a_mistake_in_answer_to_what_came_from_outside_is_not_counted(
    first: str, is_counted: bool, joined: str
) -> None:
    stack = f"{TRACEBACK}{first}: x\n\n{joined}\n\n{TRACEBACK}ValueError: no batch\n"
    cause = _cause(exception_type="ValueError", message="no batch", stack=stack)
    assert (count_repeats(None, cause) is not None) is is_counted


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [
        ("bad reply 0", "bad reply 1", 1),
        ("no such key: /tmp/a1/x", "no such key: /tmp/b2/x", 1),
        ("<Batch object at 0x7f22ff731e10> is empty", "<Batch object at 0x55d15f6809da> is empty", 2),
        ("bad reply", "bad reply", 2),
    ],
)
@pytest.mark.parametrize("step", [0, 5])
def test_the_text_must_be_the_same_but_for_addresses(one: str, other: str, count: int, step: int) -> None:
    repeats = None
    for message in (one, other):
        repeats = count_repeats(repeats, _cause(exception_type="ValueError", message=message, step=step))
    assert repeats is not None
    assert repeats.count == count


def test_another_step_or_another_failure_starts_anew() -> None:
    known = {"exception_type": "KeyError", "message": "'x'"}
    first = count_repeats(None, _cause(**known))
    for changed in ({"step": 6}, {"message": "'y'"}, {"exception_type": "IndexError"}):
        cause = _cause(**{**known, **changed})
        repeats = count_repeats(first, cause)
        assert repeats is not None
        assert repeats.count == 1


@pytest.mark.parametrize(
    ("known", "is_counted"),
    [
        ({"exit_code": 1, "step": None}, False),
        ({"exception_type": "KeyError", "message": "'x'", "step": None}, False),
        ({"exit_code": 1, "step": 0}, False),  # all that is known of two failures: that they were failures
        ({"exit_code": -11, "step": 0}, False),
        ({"exception_type": "KeyError", "message": "'x'", "exit_code": 1, "step": 0}, True),
        ({"exit_code": 1, "step": 1}, False),
        ({"exception_type": "KeyError", "message": "'x'", "exit_code": 1, "step": 1}, True),
    ],
)
def test_what_cannot_be_told_to_be_the_same_is_not_counted(known: dict[str, Any], is_counted: bool) -> None:
    assert (count_repeats(None, _cause(**known)) is not None) is is_counted


@pytest.mark.parametrize("changed", [{"message": "'y'"}, {"exception_type": "IndexError"}, {"location": "train.py:9"}])
def test_before_the_first_step_the_exception_must_be_the_same(changed: dict[str, Any]) -> None:
    known = {"exception_type": "KeyError", "message": "'x'", "location": "train.py:88", "step": 0}
    first = count_repeats(None, _cause(**known))
    for cause, count in ((_cause(**known), 2), (_cause(**{**known, **changed}), 1)):
        repeats = count_repeats(first, cause)
        assert repeats is not None
        assert repeats.count == count


@pytest.mark.parametrize(
    "known",
    [
        {"exit_code": -9},
        {"exit_code": -15},
        {"exception_type": "RuntimeError", "message": "CUDA error: uncorrectable ECC error encountered"},
        {"exception_type": "RuntimeError", "message": "[/gloo/pair.cc:5] Connection closed by peer [::1]:4"},
    ],
)
def test_what_proves_no_bug_breaks_the_row(known: dict[str, Any]) -> None:
    assert count_repeats(_repeats(2), _cause(**known)) is None


def test_a_restart_is_counted_and_explained() -> None:
    verdict = judge(Policy(max_restarts=3), 1, None, (_failure(exit_code=1),))
    assert (verdict.restart, verdict.restarts_used, verdict.reason) == (True, 2, "Restart 2 of 3.")


@pytest.mark.parametrize(
    ("max_restarts", "used", "reason"),
    [
        (0, 0, "No restart: --max-restarts is 0."),
        (1, 1, "No restart: the only restart is used."),
        (2, 2, "No restart: all 2 restarts are used."),
        (2, 3, "No restart: all 2 restarts are used."),
    ],
)
def test_no_restart_is_left(max_restarts: int, used: int, reason: str) -> None:
    verdict = judge(Policy(max_restarts=max_restarts), used, None, (_failure(exit_code=1),))
    assert (verdict.restart, verdict.restarts_used, verdict.reason) == (False, used, reason)


def test_a_final_exit_code_of_any_worker_ends_the_job() -> None:
    failures = (_failure(exit_code=1, rank=0), _failure(exit_code=93, rank=6))
    verdict = judge(Policy(max_restarts=3), 0, None, failures)
    assert not verdict.restart
    assert verdict.reason == "No restart: rank 6 exited with code 93, by which a script asks not to be restarted."
    assert judge(Policy(max_restarts=3, no_restart_exit_codes=frozenset()), 0, None, failures).restart


@pytest.mark.parametrize(("limit", "count", "restart"), [(3, 2, True), (3, 3, False), (0, 99, True), (1, 1, False)])
def test_limit_of_equal_failures(limit: int, count: int, restart: bool) -> None:
    policy = Policy(max_restarts=9, same_failure_limit=limit)
    assert judge(policy, 0, _repeats(count), (_failure(exit_code=1),)).restart is restart


@pytest.mark.parametrize(
    ("kind", "step", "lived_s", "ends"),
    [
        ("SyntaxError", None, 2.0, True),
        ("ModuleNotFoundError", 0, 2.0, True),
        ("NameError", 0, 2.0, True),
        ("NameError", 1, 2.0, False),  # the data of that step may have led there
        ("NameError", None, 3600.0, False),
        ("ImportError", 0, 2.0, False),  # a library that this node lacks
        ("ValueError", 0, 2.0, False),
    ],
)
def test_what_comes_again_each_time_is_not_tried_again(kind: str, step: int | None, lived_s: float, ends: bool) -> None:
    cause = _cause(exception_type=kind, message="x", step=step, exit_code=1)
    repeats = count_repeats(None, cause, Life(lived_s=lived_s, has_saved=False, has_restored=False))
    verdict = judge(Policy(max_restarts=3), 0, repeats, (cause.fault.failure,))
    assert verdict.restart is not ends
    if ends:
        assert verdict.reason == f"No restart: {kind} before the first step comes again each time."
    assert judge(Policy(max_restarts=3, same_failure_limit=0), 0, repeats, (cause.fault.failure,)).restart


@pytest.mark.parametrize(
    ("kind", "step", "lived_s", "ends_after"),
    [
        ("ValueError", 0, 2.0, 2),
        ("KeyError", None, 2.0, 2),
        ("RuntimeError", None, 2.0, None),
        ("ValueError", None, 59.0, 2),
        ("ValueError", 0, 600.0, 3),  # it read data for minutes, or waited
        ("ValueError", 7, 2.0, 3),
        ("FileNotFoundError", 0, 2.0, None),  # of what is mounted soon
    ],
)
@pytest.mark.parametrize("limit", [1, 3, 0])
def test_an_exception_before_the_first_step_is_tried_again_once(
    kind: str, step: int | None, lived_s: float, ends_after: int | None, limit: int
) -> None:
    cause = _cause(exception_type=kind, message="x", step=step, exit_code=1)
    life = Life(lived_s=lived_s, has_saved=False, has_restored=False)
    policy, repeats, restarts = Policy(max_restarts=9, same_failure_limit=limit), None, []
    for _ in range(4):
        repeats = count_repeats(repeats, cause, life)
        restarts.append(judge(policy, 0, repeats, (cause.fault.failure,)).restart)
    tries = (ends_after and min(limit, ends_after)) or 5
    assert restarts == [number < tries for number in range(1, 5)]


def test_a_name_that_a_module_does_not_have_is_not_looked_for_again() -> None:
    message = "cannot import name 'nothing' from 'json' (/usr/lib/python3/json/__init__.py)"
    cause = _cause(exception_type="ImportError", message=message, step=0, exit_code=1)
    repeats = count_repeats(None, cause, Life(lived_s=2.0, has_saved=False, has_restored=False))
    verdict = judge(Policy(max_restarts=3), 0, repeats, (cause.fault.failure,))
    assert verdict.reason == "No restart: ImportError before the first step comes again each time."


def test_the_reason_says_where_it_repeats() -> None:
    policy = Policy(max_restarts=9)
    at_start = judge(policy, 0, _repeats(3, step=0), (_failure(exit_code=1, step=0),))
    first = judge(policy, 0, _repeats(3, step=1), (_failure(exit_code=1, step=1),))
    later = judge(policy, 0, _repeats(3, step=8), (_failure(exit_code=1, step=8),))
    assert at_start.reason.endswith("3 times in a row before the first step, without progress.")
    assert first.reason.endswith("3 times in a row after 1 step, without progress.")
    assert later.reason.endswith("3 times in a row after 8 steps, without progress.")


@pytest.mark.parametrize(("steps", "left"), [(99, 4), (100, 0), (101, 0), (None, 4)])
def test_enough_steps_forget_used_restarts(steps: int | None, left: int) -> None:
    assert restarts_after_progress(Policy(reset_after_steps=100), 4, [0, steps, None]) == left
    assert restarts_after_progress(Policy(reset_after_steps=0), 4, [0, steps, None]) == 4
    assert restarts_after_progress(Policy(reset_after_steps=100), 4, []) == 4
