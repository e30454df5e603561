"""The kernel shows the command that a process says it is, and nothing else of it changes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SHOW = """
import json, os, subprocess, sys
from unicron_elastic.worker.process.show_command import show_command
def of_kernel(name):
    with open(f"/proc/self/{name}", "rb") as file:
        return file.read()
def seen():
    stat = of_kernel("stat").decode().rpartition(")")[2].split()
    return [of_kernel("environ").decode(), os.readlink("/proc/self/exe"), stat[22:26], stat[42:45], stat[47:49]]
before = seen()
argv = json.loads(sys.argv[1])
is_shown = show_command(argv)
if os.fork() == 0:
    same = seen() == before
    words = [os.fsdecode(word) for word in of_kernel("cmdline").split(b"\\0")[:-1]]
    ps = subprocess.run(["ps", "-o", "args=", "-p", str(os.getpid())], capture_output=True, text=True).stdout
    print(json.dumps([is_shown, same, words == argv, ps.rstrip("\\n")]), flush=True)
    show_command(argv[:1])
    assert show_command(argv)
    os._exit(0)
assert os.wait()[1] == 0
memory = [bytearray(1 << 20) for _ in range(50)]  # the heap still grows
"""


@pytest.mark.parametrize(
    "argv",
    [["python", "-u", "train.py"], ["python", "train.py", "--x", "", "a b"], ["x", *["long" * 500] * 20], ["python"]],
)
def test_it_shows_what_it_is_told(argv: list[str]) -> None:
    command = [sys.executable, "-c", SHOW, json.dumps(argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    is_shown, same, is_in_fork, ps = json.loads(done.stdout)
    if not is_shown:
        pytest.skip("this kernel cannot be told")
    assert same
    assert is_in_fork
    assert ps.startswith(" ".join(argv)[:60])
