"""Exception propagation, between real processes: the script runs with our hooks, the test holds the agent's end."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.worker import exceptions
from unicron_elastic.worker.channel import Channel, ChannelClosed

ATTACH = "import unicron_elastic.worker.start.bootstrap as b, sys; b.attach(int(sys.argv.pop()), None); del b\n"


class Ended:
    """What a script said on its channel, on stderr and with its exit code."""

    def __init__(self, script: Path, source: str) -> None:
        script.write_text(ATTACH + textwrap.dedent(source))
        ours, theirs = Channel.pair()
        ours.settimeout(0)
        self.begun_ns = time.monotonic_ns()
        fd = theirs.fileno()
        done = subprocess.run(
            [sys.executable, str(script), str(fd)],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.ended_ns = time.monotonic_ns()
        theirs.close()
        self.code, self.stderr, self.stdout = done.returncode, done.stderr, done.stdout
        self.messages: list[dict[str, Any]] = []
        while True:
            try:
                self.messages.append(ours.receive()[0])
            except ChannelClosed:
                break
        ours.close()
        self.said = [message for message in self.messages if message.get("is") != "Ending"]

    @property
    def final(self) -> list[dict[str, Any]]:
        return [message["exception"] for message in self.said if message["is_final"]]


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_the_exception_that_ends_the_process_arrives(train: Path) -> None:
    ended = Ended(
        train,
        """
        import json
        def step(text):
            return json.loads(text)
        step("{")
        """,
    )
    assert ended.code == 1
    (message,) = ended.said
    assert message["is_final"] is True
    assert ended.begun_ns < message["at_ns"] < ended.ended_ns
    exception = message["exception"]
    assert exception["type"] == "json.decoder.JSONDecodeError"
    assert exception["message"].startswith("Expecting property name")
    assert exception["location"] == f"{train}:5 in step"  # not in the standard library, where it was raised
    assert exception["stack"].startswith("Traceback (most recent call last):\n")
    assert exception["stack"] == ended.stderr  # and the user sees what Python writes, once


def test_the_exceptions_of_a_chain_are_in_the_stack(train: Path) -> None:
    ended = Ended(
        train,
        """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise RuntimeError("training failed") from error
        """,
    )
    assert "ZeroDivisionError" in ended.final[0]["stack"]
    assert ended.final[0]["type"] == "RuntimeError"
    assert ended.final[0]["location"] == f"{train}:6 in <module>"


@pytest.mark.parametrize(
    ("source", "code"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os._exit(4)", 4), ("sys.exit('no data')", 1)],
)
def test_an_end_without_exception_says_nothing(train: Path, source: str, code: int) -> None:
    ended = Ended(train, source)
    assert (ended.code, ended.said) == (code, [])
    assert ({"is": "Ending"} in ended.messages) == ("_exit" not in source)


def test_an_exception_that_the_script_only_prints_is_not_final(train: Path) -> None:
    ended = Ended(
        train,
        """
        def survive():
            try:
                1 / 0
            except ZeroDivisionError:
                sys.excepthook(*sys.exc_info())
        survive()
        """,
    )
    assert ended.code == 0
    assert [message["is_final"] for message in ended.said] == [False]
    assert "ZeroDivisionError" in ended.stderr


def test_a_printed_exception_does_not_hide_the_one_that_ends_it(train: Path) -> None:
    ended = Ended(
        train,
        """
        try:
            1 / 0
        except ZeroDivisionError as error:
            sys.excepthook(*sys.exc_info())
            kept = error
        raise kept
        """,
    )
    assert [message["is_final"] for message in ended.said] == [False, True]


def test_a_wrapping_hook_as_torch_installs_it_reports_at_once(train: Path) -> None:
    ended = Ended(
        train,
        """
        import atexit
        old_hook = sys.excepthook
        def _distributed_excepthook(*args):
            sys.stderr.write("[rank0]: ")
            old_hook(*args)
        sys.excepthook = _distributed_excepthook
        atexit.register(lambda: print(b"teardown"))
        raise ValueError("bad")
        """,
    )
    assert [message["is_final"] for message in ended.said] == [True]
    assert ended.stderr.startswith("[rank0]: Traceback")


WRAPS_AS_TORCH = """
        old_hook = sys.excepthook
        def _distributed_excepthook(*args):
            sys.stderr.write("[rank0]: ")
            old_hook(*args)
        sys.excepthook = _distributed_excepthook
"""


@pytest.mark.parametrize("wraps", [WRAPS_AS_TORCH, ""])
@pytest.mark.parametrize("text", ["Connection closed by peer [::1]:9", "NCCL error: remote process exited", "bad data"])
def test_a_connection_that_breaks_as_a_node_departs_is_told_to_the_agent_alone(
    train: Path, wraps: str, text: str
) -> None:
    source = f"""
        {wraps.strip()}
        from unicron_elastic.worker.exceptions import hide_broken_connections
        hide_broken_connections()
        raise RuntimeError({text!r})
        """
    ended = Ended(train, source)
    assert [message["is_final"] for message in ended.said] == [True]
    assert ended.code == 1
    assert ("Traceback" in ended.stderr) == (text == "bad data")
    assert (ended.stderr == "") == (text != "bad data")


@pytest.mark.parametrize(
    "hook",
    [
        "lambda *args: None",
        "__import__('functools').partial(print, file=sys.stderr)",
        "type('H', (), {'__call__': print})()",
    ],
)
def test_a_hook_that_replaces_ours_is_made_up_for_at_exit(train: Path, hook: str) -> None:
    ended = Ended(train, f"sys.excepthook = {hook}\nraise ValueError('bad')")
    assert ended.code == 1
    assert [exception["type"] for exception in ended.final] == ["ValueError"]
    assert ended.final[0]["location"] == f"{train}:3 in <module>"


def test_an_exception_the_script_survived_is_not_reported_at_a_clean_end(train: Path) -> None:
    # As code.interact, pdb and pytest leave it behind.
    ended = Ended(
        train,
        """
        import code
        code.InteractiveInterpreter().runsource("1 / 0")
        """,
    )
    assert ended.code == 0
    assert ended.final == []


def test_a_syntax_error_is_where_it_stands(train: Path) -> None:
    broken = train.with_name("broken.py")
    broken.write_text("x = 1\ndef f(:\n    pass\n")
    ended = Ended(train, "import broken")
    assert ended.final[0]["type"] == "SyntaxError"
    assert ended.final[0]["location"] == f"{broken}:2"


def test_an_exception_that_cannot_be_printed(train: Path) -> None:
    ended = Ended(
        train,
        """
        class Odd(Exception):
            def __str__(self):
                raise KeyError("no text")
        raise Odd()
        """,
    )
    assert ended.code == 1
    (exception,) = ended.final
    assert exception["type"] == "Odd"
    assert exception["message"] == "<str() of this exception raised KeyError>"
    assert "Odd" in exception["stack"]


def test_a_forked_child_does_not_speak_for_the_worker(train: Path) -> None:
    ended = Ended(
        train,
        """
        import os
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
    )
    assert ended.stdout == "1\n"
    assert "in the child" in ended.stderr
    assert (ended.code, ended.said) == (0, [])


def test_a_gone_agent_costs_the_script_nothing(train: Path) -> None:
    train.write_text(ATTACH + "import os; os.write(1, b'up\\n'); os.read(0, 1)\nraise ValueError('bad')\n")
    ours, theirs = Channel.pair()
    fd = theirs.fileno()
    process = subprocess.Popen(
        [sys.executable, str(train), str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    ours.close()
    _, stderr = process.communicate("x", timeout=60)
    assert process.returncode == 1
    assert stderr.endswith("ValueError: bad\n")
    assert "unicron" not in stderr


def _raised(error: BaseException) -> dict[str, str | None]:
    try:
        raise error
    except BaseException as caught:
        return exceptions.describe(caught, caught.__traceback__)


def test_texts_are_bounded_and_keep_what_matters() -> None:
    described = _raised(ValueError("x" * 1_000_000 + " end"))
    assert len(described["message"]) == exceptions.MESSAGE_CHARS_MAX
    assert len(described["stack"]) <= exceptions.STACK_CHARS_MAX + 10
    assert described["stack"].endswith(" end\n")


def test_without_a_trace_there_is_no_location() -> None:
    assert exceptions.describe(ValueError("x"), None)["location"] is None


def test_a_type_of_another_module_is_qualified() -> None:
    assert _raised(subprocess.TimeoutExpired("x", 1))["type"] == "subprocess.TimeoutExpired"
    assert _raised(KeyError("x"))["type"] == "KeyError"
