"""A script that can be read once is left to the worker that runs it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

TELL = """
import json, os, sys
told = [sys.argv, sys.path[0], __name__, globals().get("__file__"), os.environ["WORLD_SIZE"]]
os.write(1, f"TOLD {json.dumps(told)}\\n".encode())
"""


def told(launcher: Any, tool: str, *arguments: str, stdin: int | None = None) -> list[Any]:
    """What those workers say that found a script; each ends well."""
    more = {} if stdin is None else {"stdin": stdin}
    run = launcher.start(*arguments, tool=tool, **more)
    if stdin is not None:
        os.close(stdin)
    run.wait()
    assert run.process.returncode == 0, run.err
    return [json.loads(line.removeprefix("TOLD ")) for line in run.out.splitlines() if line.startswith("TOLD ")]


def piped(text: str) -> int:
    """The end to read of a pipe with ``text``."""
    read_end, write_end = os.pipe()
    os.write(write_end, text.encode())
    os.close(write_end)
    return read_end


@pytest.mark.parametrize(
    ("script", "ranks", "options"),
    [
        ("-", 1, []),  # two would each read some of its bytes, under torchrun too
        pytest.param("-", 1, ["--unicron-warm=off"], marks=pytest.mark.slow),
        pytest.param("/dev/stdin", 1, [], marks=pytest.mark.slow),
    ],
)
def test_a_script_on_standard_input_runs_in_the_worker_that_reads_it(
    launcher: Any, script: str, ranks: int, options: list[str]
) -> None:
    arguments = [f"--nproc-per-node={ranks}", script, "train.py", "-m"]
    expected = told(launcher, "torchrun", *arguments, stdin=piped(TELL))
    found = told(launcher, "unicron-run", *options, *arguments, stdin=piped(TELL))
    assert found == expected
    assert [argv for argv, *_ in found] == [[script, "train.py", "-m"]]


def test_a_script_in_a_named_pipe_is_read_once(launcher: Any) -> None:
    fifo = launcher.folder / "train.py"
    os.mkfifo(fifo)
    threading.Thread(target=lambda: Path(fifo).write_text(TELL), daemon=True).start()
    ((argv, *_),) = told(launcher, "unicron-run", "--nproc-per-node=1", str(fifo))
    assert argv == [str(fifo)]


def test_a_module_beside_it_goes_before_one_that_was_preloaded(launcher: Any) -> None:
    launcher.script("colorsys.py", "MINE = True\n")
    stdin = piped("import colorsys, os\nos.write(1, b'TOLD %d\\n' % colorsys.MINE)\n")
    assert told(launcher, "unicron-run", "--unicron-preload=colorsys", "--nproc-per-node=1", "-", stdin=stdin) == [1]
