"""What torch's callers are told of failed workers, against torch's own writer and reader of error files."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure, record

from unicron_elastic.faults import Failure, RootCause, classify, root_cause
from unicron_elastic.launcher.agent.core.failures import process_failures, recorded_exception, write_error_file
from unicron_elastic.worker.exceptions import describe


class Wrapped:
    class Odd(Exception):
        """One whose qualified name has a dot."""


def _raise(error: BaseException) -> None:
    raise error


def _bad_json() -> None:
    json.loads("{")


ENDS: dict[str, Callable[[], None]] = {
    "with a text": lambda: _raise(ValueError("bad input: 7")),
    "without a text": lambda: _raise(RuntimeError()),
    "of a module": _bad_json,
    "of a class in a class": lambda: _raise(Wrapped.Odd("a: b: c\nsecond line")),
    "not ASCII": lambda: _raise(OSError(2, "no such file", "tr\u00e4in-\udcff.py")),
}


def _failure(**known: Any) -> Failure:
    return Failure(**{"at": 1.0, "rank": 4, "local_rank": 0, "pid": 4242, **known})


def _caught(end: Callable[[], None]) -> Failure:
    """The failure as the agent hears of it: described in the worker, its values made text."""
    try:
        end()
    except Exception as error:
        told = describe(error, sys.exc_info()[2])
        return _failure(exception_type=told["type"], message=told["message"], stack=told["stack"])
    raise AssertionError("nothing was raised")


def _cause(*failures: Failure) -> RootCause:
    return root_cause([classify(failure) for failure in failures])


@pytest.fixture
def by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], Path]:
    """Has torch's own handler write an error file."""

    def write(end: Callable[[], None]) -> Path:
        path = tmp_path / "torch.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        try:
            end()
        except Exception as error:
            ErrorHandler().record_exception(error)
        return path

    return write


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_the_error_file_is_the_one_torch_would_have_written(
    end: Callable[[], None], by_torch: Callable[[Callable[[], None]], Path], tmp_path: Path
) -> None:
    ours = tmp_path / "ours.json"
    write_error_file(str(ours), _caught(end))
    told = json.loads(ours.read_text())
    expected = json.loads(by_torch(end).read_text())
    for content in (told, expected):
        assert abs(int(content["message"]["extraInfo"].pop("timestamp")) - time.time()) < 60
        # Both end with the frame that raised; they begin in the two places that caught it.
        stack = content["message"]["extraInfo"]["py_callstack"].splitlines(keepends=True)
        assert stack[0] == "Traceback (most recent call last):\n"
        caught_in = next(i for i, line in enumerate(stack) if " end()" in line)
        content["message"]["extraInfo"]["py_callstack"] = "".join(stack[caught_in + 1 :])
    assert told == expected


def test_torch_reads_our_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(str(path), _caught(ENDS["with a text"]))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.message["message"] == "ValueError: bad input: 7"
    assert abs(failure.timestamp - time.time()) < 60
    assert "in _raise" in ChildFailedError("train.py", {0: failure}).format_msg()


def test_a_file_that_the_script_wrote_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text("the script's own")
    write_error_file(str(path), _failure(exception_type="ValueError", message="ours"))
    assert path.read_text() == "the script's own"


def test_what_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    raised = _failure(exception_type="ValueError", message="x")
    write_error_file(str(tmp_path / "gone" / "error.json"), raised)
    write_error_file(os.devnull, raised)
    write_error_file("", raised)
    write_error_file(str(tmp_path / "error.json"), _failure(exit_code=1))  # without an exception there is nothing
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_record_wrote_is_read_back(
    end: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(Exception) as raised:
        record(end)()
    found = recorded_exception(str(path))
    assert found is not None
    assert (found["type"], found["message"]) == (type(raised.value).__name__, str(raised.value))
    assert found["stack"].startswith("Traceback (most recent call last):\n")
    assert found["stack"].rstrip().endswith(f"{found['type']}: {found['message']}".rstrip(": "))


def test_our_own_error_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    failure = _caught(ENDS["of a class in a class"])
    write_error_file(str(path), failure)
    assert recorded_exception(str(path)) == {"type": "Odd", "message": failure.message, "stack": failure.stack}


def test_a_message_that_is_plain_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "ValueError: bad input", "timestamp": 7}))
    assert recorded_exception(str(path)) == {"type": "ValueError", "message": "bad input", "stack": ""}


NO_ERROR_FILES = [
    "",
    "{",
    "[]",
    "7",
    '{"message": 7}',
    '{"message": {"text": ""}}',
    '{"message": {"message": "x", "extraInfo": 7}}',
    "\ud800",
]


@pytest.mark.parametrize("content", NO_ERROR_FILES)
def test_what_is_no_error_file_tells_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    assert recorded_exception(str(path)) is None
    assert recorded_exception(str(tmp_path / "gone.json")) is None
    assert recorded_exception("") is None


def _found(codes: dict[int, int], error_files: dict[int, str], cause: RootCause | None) -> dict[int, ProcessFailure]:
    pids = {local_rank: 100 + local_rank for local_rank in codes}
    return process_failures(codes, pids, error_files, cause)


def _error_file(path: Path, timestamp: int) -> str:
    extra = {"py_callstack": "Traceback\n", "timestamp": str(timestamp)}
    path.write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": extra}}))
    return str(path)


def test_who_ended_badly_is_named_and_nobody_else() -> None:
    found = _found({0: 0, 1: 3, 2: -9}, {}, None)
    assert [(f.local_rank, f.pid, f.exitcode) for f in found.values()] == [(1, 101, 3), (2, 102, -9)]
    assert list(found) == [1, 2]


def test_the_root_cause_is_torchs_first_failure_whatever_the_files_say(tmp_path: Path) -> None:
    # The consequence was recorded a second before the cause, or the cause left no file and is dated now.
    files = {0: _error_file(tmp_path / "0.json", 1_000), 2: _error_file(tmp_path / "2.json", 2_000)}
    codes = {0: 1, 1: -15, 2: 1, 3: -9}
    for root, code in codes.items():
        found = _found(codes, files, _cause(_failure(local_rank=root, rank=4 + root, exit_code=code)))
        assert list(found) == [root, *(rank for rank in codes if rank != root)]
        assert ChildFailedError("train.py", found).get_first_failure() == (root, found[root])


def test_the_root_cause_is_named_even_if_it_ended_well() -> None:
    # It raised, and something that it registered with atexit ended it with code 0.
    cause = _cause(_failure(local_rank=1, rank=5, exception_type="ValueError", message="x"))
    assert list(_found({0: -15, 1: 0, 2: -15, 3: 0}, {}, cause)) == [1, 0, 2]


@pytest.mark.parametrize("content", ["", '{"message": {"mess', "[]", '{"message": {"message": "x"}}'])
def test_a_worker_that_died_while_it_wrote_its_error_file_is_reported_without_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    found = _found({0: -9, 1: 1}, {0: str(path)}, None)
    assert [failure.exitcode for failure in found.values()] == [-9, 1]


def test_a_job_that_failed_elsewhere_can_be_reported() -> None:
    # Another node failed for good and all workers here ended well when they were told to. torch makes no
    # ChildFailedError without a failure.
    found = _found({0: 0, 1: 0}, {}, None)
    assert "train.py FAILED" in ChildFailedError("train.py", found).format_msg()
