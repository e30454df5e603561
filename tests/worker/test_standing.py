"""What a process hands on is the same in its fork, and another where somebody has set it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unicron_elastic.worker.process.standing import kind_of_stream, standing, walls, why_elsewhere

SHOW = "import json; from unicron_elastic.worker.process.standing import standing; print(json.dumps(standing()))"


def of_child(*wrap: str, cwd: Path | None = None) -> dict[str, str]:
    """That of a process which is started through ``wrap``."""
    command = [*wrap, sys.executable, "-c", SHOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=cwd)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def changed(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {what for what in one.keys() | other.keys() if one.get(what) != other.get(what)}


def test_a_child_has_that_of_its_parent() -> None:
    mine = standing()
    assert changed(mine, of_child()) == set()
    assert {"umask", "limits", "control group", "pid namespace", "user", "groups", "processors"} <= mine.keys()


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("umask 0123", {"umask"}),
        ("ulimit -n 97", {"limits"}),
        ("ulimit -c 0 -s 1024", {"limits"}),
        ("renice -n 7 $$ > /dev/null 2>&1 || exec nice -n 7 \"$@\"", {"scheduling"}),
        ("echo 500 > /proc/self/oom_score_adj", {"out-of-memory score"}),
        ("cd /", {"current folder"}),
    ],
)  # fmt: skip
def test_what_was_set_for_a_launch_is_seen(how: str, what: set[str], tmp_path: Path) -> None:
    found = of_child("bash", "-c", f'{how}; exec "$@"', "bash", cwd=tmp_path)
    assert changed(of_child(cwd=tmp_path), found) == what


def test_one_processor_is_not_all() -> None:
    mine = os.sched_getaffinity(0)
    if len(mine) == 1:
        pytest.skip("there is one")
    assert changed(standing(), of_child("taskset", "-c", str(min(mine)))) == {"processors"}


def test_the_walls_around_another_process_are_seen_from_outside() -> None:
    mine = walls(os.getpid())
    assert mine.items() <= standing().items()
    assert {"user", "capabilities", "control group", "pid namespace", "root folder"} <= mine.keys()
    for wrap, what in (
        ([], None),
        (["unshare", "--uts"], "uts namespace"),
        (["setpriv", "--no-new-privs"], "capabilities"),
    ):
        with subprocess.Popen([*wrap, "sh", "-c", "echo here; exec sleep 600"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = process.stdout.readline()
            found = why_elsewhere(mine, walls(process.pid)) if told else "it could not be started"
            process.kill()
        if told:  # else no namespace may be made here
            assert found == (what and f"this launch has another {what}")


def test_of_a_process_that_is_gone_nothing_is_seen() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait(30.0)
    with pytest.raises(OSError, match="No such"):
        walls(process.pid)


def test_kinds_of_streams(tmp_path: Path) -> None:
    terminal = os.openpty()
    pipe = os.pipe()
    with open(tmp_path / "file", "w") as file, open(os.devnull) as null:
        kinds = [kind_of_stream(fd) for fd in (terminal[1], pipe[0], file.fileno(), null.fileno())]
    for fd in (*terminal, *pipe):
        os.close(fd)
    assert kinds[0].endswith(" terminal")
    assert len(set(kinds)) == 4
