"""A process knows whether it is the program that was asked for, and whether somebody watches it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ASK = """
import json, os, sys
sys.path[:0] = os.environ["IMPORTS"].split(os.pathsep)
from unicron_elastic.worker.start.likeness import how_different
asked = {"argv": list(sys.orig_argv), "env": {**os.environ, "OWN": "2"}}
%s
answer = how_different(asked["argv"], asked["env"], {"OWN"})
sys.settrace(None), sys.setprofile(None)
print(json.dumps(answer))
"""


def answer(folder: Path, change: str, *arguments: str) -> Any:
    """What a process says of which ``change`` is made before it is asked."""
    script = folder / "ask.py"
    script.write_text(ASK % change)
    env = {"IMPORTS": ":".join(filter(None, sys.path)), "OWN": "1", "WORD": "\udcff"}
    command = [sys.executable, "-u", str(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize("arguments", [(), ("-u", "a b", "", "ü", "\udcff")])
def test_one_that_is_what_was_asked_for(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert answer(tmp_path, "", *arguments) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("asked['argv'].insert(1, '-X')", "on the way its command became {python} -u ..."),
        ("asked['argv'].insert(2, 'train.py')", "on the way its command became {python} -u {script} ..."),
        ("asked['argv'].pop()", "on the way its command became {python} -u {script} x"),
        ("asked['argv'].append('y')", "on the way its command became {python} -u {script} x"),
        ("sys.orig_argv[0] = 'wrapper'", "on the way its command became wrapper ..."),
        ("sys.argv[1] = 'other'", "something has changed its arguments"),
        ("sys.argv[1:] = ['--client', 'x']", "something has changed its arguments"),
        ("asked['env']['LOST'] = ''", "its environment was changed on the way: LOST"),
        ("os.environ['SHLVL'] = os.environ['WORD'] = '1'", "its environment was changed on the way: SHLVL, WORD"),
        ("import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)", "a debugger or tracer, process {me}, watches it"),
        ("sys.settrace(lambda *_: None)", "a debugger, profiler or coverage tool is at work in it"),
        ("sys.setprofile(lambda *_: None)", "a debugger, profiler or coverage tool is at work in it"),
        ("import threading; threading.settrace(print)", "a debugger, profiler or coverage tool is at work in it"),
        pytest.param(
            "sys.monitoring.use_tool_id(1, 'coverage')",
            "a debugger, profiler or coverage tool is at work in it",
            marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="Python has it from 3.12 on"),
        ),
    ],
)
def test_one_that_is_not_says_how(tmp_path: Path, change: str, words: str) -> None:
    import os

    expected = words.format(python=sys.executable, script=tmp_path / "ask.py", me=os.getpid())
    assert answer(tmp_path, change, "x") == expected
