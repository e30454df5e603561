"""What a job leaves for the next: the same command starts its workers from it, and anything else starts plainly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

USED = "The workers start from a warm process that is held since "
NOT_USED = "The warm process that is held"
SCRIPT = """
import os, sys, time
with open("/proc/self/cmdline") as file:
    assert file.read().split("\\0")[:-1] == sys.orig_argv
with open(os.environ["PROBE"] + "/ran", "a") as file:
    file.write(f"{os.getpid()} {os.getppid()} {' '.join(sys.argv[1:])}\\n")
os.write(1, f"out of {os.environ['RANK']}\\n".encode())
while os.path.exists(os.environ["PROBE"] + "/wait"):
    time.sleep(0.01)
sys.exit(int(os.environ.get("CODE", "0")))
"""
PLAIN = 'exec "$@"'


class Jobs:
    """Launches with the same variables, but for what a test says; each leaves its warm process to the next."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        self.mark = uuid.uuid4().hex
        self.runtime_dir = Path(launcher.folder) / "runtime"
        self.runtime_dir.mkdir(mode=0o700)
        launcher.script("train.py", SCRIPT)

    def start(self, *arguments: str, wrap: str | None = None, script: str = "train.py", **env: str) -> Any:
        """Launch the script with two ranks."""
        own = {"XDG_RUNTIME_DIR": str(self.runtime_dir), "UNICRON_WARM_FOR_NEXT": "60", "TEST_RUN": self.mark}
        own |= {"TMPDIR": str(self.launcher.folder), **env}
        how = {} if wrap is None else {"wrap": wrap}
        run = self.launcher.start("--standalone", "--nproc-per-node=2", script, *arguments, env=own, **how)
        run.mark = self.mark
        return run

    def run(self, *arguments: str, code: int = 0, **how: Any) -> str:
        """Launch it, wait for the end, and return what the launcher said."""
        run = self.start(*arguments, **how)
        assert run.wait() == code, run.err
        return str(run.err)

    def held(self) -> dict[str, int]:
        """{name: pid} of what waits for the next launch."""
        found = self.launcher.runs[0].carriers()
        assert len(set(found.values())) == len(found), found
        return {name: pid for pid, name in found.items()}

    def ran(self) -> list[list[str]]:
        """What each worker wrote since this was asked last: its pid, its parent, and its arguments."""
        path = Path(self.launcher.folder) / "ran"
        lines = [line.split() for line in path.read_text().splitlines()]
        path.unlink()
        return lines

    def wait_gone(self) -> None:
        self.launcher.runs[0].assert_gone()

    def wait_until_left(self, count: int, but: Collection[int] = ()) -> None:
        """Wait until so many processes live, and none of those in ``but``."""
        end = time.monotonic() + 20.0
        while len(left := self.launcher.runs[0].carriers()) != count or set(but) & set(left):
            assert time.monotonic() < end, left
            time.sleep(0.01)

    def end(self) -> None:
        """End what is held, and nothing else."""
        for pid in self.launcher.runs[0].carriers() if self.launcher.runs else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def jobs(launcher: Any) -> Iterator[Jobs]:
    made = Jobs(launcher)
    yield made
    made.end()


def test_the_next_launch_uses_what_is_held_and_so_does_the_one_after(jobs: Jobs) -> None:
    first = jobs.run()
    assert USED not in first
    assert NOT_USED not in first
    jobs.ran()
    held = jobs.held()
    assert set(held) == {"unicron-keeper", "unicron-warm"}
    for _ in range(2):
        said = jobs.run()
        assert said.count(USED) == 1, said
        assert {parent for _, parent, *_ in jobs.ran()} == {str(held["unicron-keeper"])}
        assert jobs.held() == held


def test_it_may_be_held_for_longer_than_the_kernel_can_wait(jobs: Jobs) -> None:
    jobs.run(UNICRON_WARM_FOR_NEXT="1e12")
    assert USED in jobs.run(UNICRON_WARM_FOR_NEXT="1e12")


def test_a_script_that_was_edited_and_fails_or_not_uses_it(jobs: Jobs) -> None:
    jobs.run()
    jobs.launcher.script("train.py", "import sys\nprint('edited', flush=True)\nsys.exit(7)\n")
    run = jobs.start()
    assert run.wait() == 1
    assert USED in run.err, run.err
    assert "edited" in run.out
    jobs.launcher.script("train.py", SCRIPT)
    assert USED in jobs.run()


def test_a_killed_launcher_that_had_taken_it_up_takes_all_along(jobs: Jobs) -> None:
    jobs.run()
    jobs.launcher.script("train.py", "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    run = jobs.start()
    run.until_line("up", 2)
    run.until(lambda: USED in run.err, "word of it")
    run.process.kill()
    run.wait()
    jobs.wait_gone()


def test_one_that_is_told_to_end_leaves_it(jobs: Jobs) -> None:
    jobs.launcher.script("train.py", "import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    for count in range(2):
        run = jobs.start()
        run.until_line("up", 2)
        run.until(lambda: (USED in run.err) == bool(count), "word of it")  # noqa: B023
        run.process.send_signal(signal.SIGTERM)
        run.wait()
    assert set(jobs.held()) == {"unicron-keeper", "unicron-warm"}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"NEW": "1"}, "the environment has another NEW"),
        ({"wrap": 'umask 0123; exec "$@"'}, "this launch has another umask"),
        ({"wrap": 'ulimit -c 0; ulimit -n 500; exec "$@"'}, "this launch has another limits"),
        ({"wrap": 'exec nice -n 3 "$@"'}, "this launch has another scheduling"),
        ({"wrap": 'cd sub; ln -sf ../train.py .; exec "$@"'}, "the environment has another PWD"),
        ({"wrap": 'exec "$@" | cat'}, "a standard stream is of another kind"),
    ],
    ids=["variable", "umask", "limit", "nice", "folder", "pipe"],
)
def test_another_launch_starts_plainly_and_says_why(jobs: Jobs, how: dict[str, str], why: str) -> None:
    (jobs.launcher.folder / "sub").mkdir()
    jobs.run(wrap=PLAIN)
    held = jobs.held()
    jobs.ran()
    said = jobs.run(**{"wrap": PLAIN, **how})
    assert said.count(NOT_USED) == 1
    assert f" is not used: {why}." in said
    assert str(held["unicron-keeper"]) not in {parent for _, parent, *_ in jobs.ran()}
    assert not set(held.values()) & set(jobs.launcher.runs[0].carriers())


def test_other_arguments_make_no_difference(jobs: Jobs) -> None:
    jobs.run("--lr", "1")
    jobs.ran()
    for arguments in (["--lr", "2", "--rank", "${local_rank}"], [], ["--lr", "1"]):
        assert USED in jobs.run(*arguments)
        wanted = [[word.replace("${local_rank}", rank) for word in arguments] for rank in "01"]
        assert sorted(ran for _, _, *ran in jobs.ran()) == wanted


def test_another_script_starts_plainly(jobs: Jobs) -> None:
    jobs.launcher.script("other.py", SCRIPT)
    jobs.run()
    assert " is not used: it was held for another command." in jobs.run(script="other.py")
    assert USED in jobs.run(script="other.py")


def test_another_namespace_starts_plainly(jobs: Jobs) -> None:
    if subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no namespace may be made here")
    jobs.run(wrap=PLAIN)
    assert " is not used: this launch has another uts namespace." in jobs.run(wrap='exec unshare --uts "$@"')


LEARNS = """
import sys
FOUND = "mailbox" in sys.modules
import asyncio, email.mime.text, http.client, mailbox, os, sqlite3, unittest.mock, logging.config, ftplib, tarfile, time
import xml.dom.minidom, xmlrpc.client
import torch
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.1)
parameter.sum().backward()
optimizer.step()
os.write(1, f"FOUND {FOUND}\\n".encode())
while not os.path.exists("learned"):
    time.sleep(0.02)
"""


def test_what_one_job_has_learned_the_next_one_finds(jobs: Jobs) -> None:
    jobs.launcher.script("train.py", LEARNS)
    begin = jobs.launcher.start
    jobs.launcher.start = lambda *words, **how: begin(*words, fast=False, **how)
    first = jobs.start()
    first.until(lambda: "The next start finds" in first.err, "what was learned")
    jobs.launcher.script("learned", "")
    assert first.wait() == 0
    assert first.out.count("FOUND False") == 2
    for _ in range(2):
        run = jobs.start("--other")
        assert run.wait() == 0
        assert USED in run.err, run.err
        assert "The next start finds" not in run.err  # it is known
        assert run.out.count("FOUND True") == 2, run.err


def remove_group(group: Path) -> None:
    """Remove a control group; the kernel may be about to let its last process go."""
    end = time.monotonic() + 20.0
    while group.exists():
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        assert time.monotonic() < end, (group / "cgroup.procs").read_text()
        time.sleep(0.01)


def test_another_control_group_starts_plainly(jobs: Jobs) -> None:
    group = Path(f"/sys/fs/cgroup/freezer/unicron-{jobs.mark}")
    if not group.parent.is_dir():
        group = Path(f"/sys/fs/cgroup/unicron-{jobs.mark}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control group may be made here")
    try:
        jobs.run(wrap=PLAIN)
        said = jobs.run(wrap=f'echo $$ > {group}/cgroup.procs && exec "$@"')
        assert " is not used: this launch has another control group." in said
    finally:
        jobs.end()
        jobs.wait_gone()
        remove_group(group)


def test_a_changed_file_of_what_is_preloaded_starts_plainly(jobs: Jobs) -> None:
    library = jobs.launcher.folder / "library"
    library.mkdir()
    (library / "mine.py").write_text("VALUE = 1\n")
    jobs.launcher.script("train.py", "import os, mine\nos.write(1, f'VALUE {mine.VALUE}\\n'.encode())\n")
    env = {"PYTHONPATH": str(library), "UNICRON_PRELOAD": "mine"}
    run = jobs.launcher.start
    jobs.launcher.start = lambda *words, **how: run(*words, fast=False, **how)
    jobs.run(**env)
    assert USED in jobs.run(**env)
    (library / "mine.py").write_text("VALUE = 2\n")
    changed = jobs.start(**env)
    assert changed.wait() == 0
    assert f" is not used: {library}/mine.py has changed." in changed.err
    assert changed.out.count("VALUE 2") == 2


@pytest.mark.parametrize("name", ["unicron-keeper", "unicron-warm"])
def test_one_that_was_killed_or_told_to_end_is_gone(jobs: Jobs, name: str) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        jobs.run()
        os.kill(jobs.held()[name], number)
        jobs.wait_gone()
        said = jobs.run()
        assert USED not in said
        assert NOT_USED not in said
        jobs.end()
        jobs.wait_gone()


@pytest.mark.parametrize("name", ["unicron-keeper", "unicron-warm"])
def test_one_that_was_stopped_costs_two_seconds(jobs: Jobs, name: str) -> None:
    jobs.run()
    held = jobs.held()
    os.kill(held[name], signal.SIGSTOP)
    began = time.monotonic()
    run = jobs.start()
    assert run.wait() == 0
    assert " is not used: it does not answer." in run.err
    assert time.monotonic() - began < 20.0
    with contextlib.suppress(ProcessLookupError):
        os.kill(held[name], signal.SIGCONT)
    jobs.wait_until_left(2, but=held.values())


def test_it_is_gone_when_its_time_is_over(jobs: Jobs) -> None:
    jobs.run(UNICRON_WARM_FOR_NEXT="2")
    jobs.wait_gone()
    assert list((jobs.runtime_dir / "unicron").iterdir()) == []


def test_of_two_launches_at_once_one_uses_it(jobs: Jobs) -> None:
    jobs.run()
    (jobs.launcher.folder / "wait").touch()
    runs = [jobs.start() for _ in range(2)]
    ran = jobs.launcher.folder / "ran"
    runs[0].until(lambda: ran.read_text().count("\n") == 6, "all workers of both")
    (jobs.launcher.folder / "wait").unlink()  # or one may have ended before the other begins
    assert [run.wait() for run in runs] == [0, 0]
    assert sum(USED in run.err for run in runs) == 1, [run.err for run in runs]
    jobs.wait_until_left(2)


def test_who_does_not_ask_for_it_neither_looks_nor_leaves_anything(jobs: Jobs) -> None:
    jobs.run()
    held = jobs.held()
    said = jobs.run(UNICRON_WARM_FOR_NEXT="0")
    assert USED not in said
    assert NOT_USED not in said
    assert jobs.held() == held


def test_a_folder_that_others_may_enter_is_not_used(jobs: Jobs) -> None:
    (jobs.runtime_dir / "unicron").mkdir(mode=0o777)
    (jobs.runtime_dir / "unicron").chmod(0o777)
    said = jobs.run()
    assert f"is not used: {jobs.runtime_dir}/unicron is open to other users" in said
    jobs.wait_gone()


def test_a_reader_of_the_output_sees_its_end_with_the_launcher(jobs: Jobs) -> None:
    run = jobs.start(wrap='"$@" 2>&1 | cat > both; echo ended')
    assert run.wait() == 0
    assert "ended" in run.out
    assert set(jobs.held()) == {"unicron-keeper", "unicron-warm"}
