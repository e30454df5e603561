"""What workers have imported is imported for those that come after them, as far as none of them could tell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from warm_lab import Forked, Warmer

from unicron_elastic.launcher.agent.process.warm import WarmProcess, sentence_of
from unicron_elastic.worker.helper_tasks import Learned, NotLearned
from unicron_elastic.worker.notices import Imported
from unicron_elastic.worker.start.learning import FAILURES_MAX

if TYPE_CHECKING:
    from conftest import Lab

SHOW = """
import sys
found = sorted({"good", "bad", "last"} & set(sys.modules))
import bad, good, last
print(*found, good.VALUE, bad.VALUE, last.VALUE)
"""
GOOD = "VALUE = 'good'\n"


class Learner:
    """A warm process, installed modules that it may learn, and what people are told of that."""

    def __init__(self, warmer: Warmer) -> None:
        self.warmer = warmer
        self.lab = warmer.lab
        self.folder = warmer.folder / "site-packages"
        self.folder.mkdir()
        self.env = {"PYTHONPATH": str(self.folder)}
        self.words: list[str] = []
        warmer.script.write_text(SHOW)
        for name in ("good", "last"):
            self.write(name, GOOD)

    def write(self, name: str, text: str) -> None:
        path = self.folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def begin(self, preload: str = "colorsys", **env: str) -> WarmProcess:
        self.env |= env
        warm = self.warmer.begin(preload, **self.env)
        warm.learned_at_least = 1
        warm.on_word = self.words.append
        assert warm.wait_ready(), warm.refusal
        return warm

    def tell(self, warm: WarmProcess, *names: str, **more: Any) -> None:
        """Has it learn these modules."""
        files: dict[str, str] = {}
        for name in names:
            parts = name.split(".")
            for count in range(1, len(parts)):
                package = self.folder.joinpath(*parts[:count], "__init__.py")
                files[".".join(parts[:count])] = str(package) if package.exists() else ""
            files[name] = str(self.folder / f"{name.replace('.', '/')}.py")
        imported = Imported(modules=files, **{"changed": {}, **more})
        worker = {"RANK": "0", "LOCAL_RANK": "0"}
        warm.learn(imported, {**os.environ, **self.env, **worker}, list(worker))

    def learn(self, warm: WarmProcess, *names: str, **more: Any) -> str:
        """Has it learn them, and returns what people read of it."""
        self.tell(warm, *names, **more)
        self.lab.wait(lambda: self.words)
        return self.words[-1]

    def fork(self, warm: WarmProcess, rank: int = 0) -> Forked:
        worker = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return self.warmer.fork(warm, env={**os.environ, **self.env, **worker})


@pytest.fixture
def learner(lab: Lab, tmp_path: Path) -> Iterator[Learner]:
    warmer = Warmer(lab, tmp_path)
    yield Learner(warmer)
    warmer.close()


def test_a_worker_finds_imported_what_those_before_it_had_imported(learner: Learner, lab: Lab) -> None:
    learner.write("bad", GOOD)
    warm = learner.begin()
    assert not learner.words
    assert learner.learn(warm, "good", "bad").startswith("The next start finds 2 more modules imported, in ")
    for _ in range(2):
        forked = learner.fork(warm)
        assert forked.output() == ("bad good good good good\n", "")
        assert lab.exit_of(forked.pid).exit_code == 0
    assert not warm.may_learn  # once is enough


BAD = {
    "thread": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n", "thread"),
    "rank": ("import os\nVALUE = os.environ.get('RANK')\n", "bad: it reads RANK"),
    "set by the script": ("import os\nVALUE = os.environ.get('SET')\n", "bad: it reads SET"),
    "sets": ("import os\nos.environ['NEW'] = '1'\n", "bad: it changes NEW in the environment"),
    "socket": ("import socket\nS = socket.socket()\n", "bad: it changes open descriptors"),
    "file": ("import os\nF = open(os.getcwd() + '/log', 'w')\n", "bad: it changes open descriptors"),
    "child": ("import os\nos.posix_spawn('/bin/sleep', ['sleep', '60'], {})\n", "changes its children"),
    "signal": ("import signal\nsignal.signal(signal.SIGUSR1, print)\n", "bad: it changes a handler of a signal"),
    "path": ("import sys\nsys.path.append('/x')\n", "bad: it changes sys.path"),
    "hook": ("import sys\nsys.displayhook = print\n", "bad: it changes a hook of the interpreter"),
    "raises": ("import os\nif os.getppid() != KEEPER: raise ValueError('here')\n", "with NameError: name 'KEEPER'"),
    "exits": ("import os\nif 'KEEP' not in os.environ: os._exit(0)\n", "bad: its import ends the process"),
    "shared memory": ("import mmap\nM = mmap.mmap(-1, 100)\n", "bad: it makes memory that forks share"),
    "random": ("import random\nVALUE = random.random()\n", "bad: it draws random numbers, and the script may have"),
    "entropy": ("import os\nVALUE = os.urandom(1)\n", "bad: it draws from the system's entropy"),
    "secret": ("import secrets\nVALUE = secrets.randbits(9)\n", "bad: it draws from the system's entropy"),
    "uuid": ("import uuid\nVALUE = uuid.uuid4()\n", "bad: it draws from the system's entropy"),
    "generator": ("import numpy\nVALUE = numpy.random.default_rng()\n", "bad: it draws from the system's entropy"),
    "another": ("import sys\nimport other\n", "other: the workers did not import it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_module_that_a_fork_could_tell_is_left_to_the_workers(learner: Learner, name: str) -> None:
    body, why = BAD[name]
    learner.write("bad", body + "VALUE = globals().get('VALUE', 'bad')\n")
    (learner.warmer.folder / "other.py").write_text("")
    preload = {"uuid": "uuid", "generator": "numpy.random"}.get(name, "colorsys")
    more = {"KEEP": "", "PYTHONPATH": f"{learner.folder}:{learner.warmer.folder}"} if name == "another" else {}
    warm = learner.begin(preload, **more)
    said = learner.learn(warm, "good", "bad", "last", changed={"SET": "1"}, seeded_before="bad")
    assert said.startswith("The next start finds 2 more modules imported, in "), said
    assert why in said
    learner.env["KEEP"] = ""
    learner.warmer.script.write_text(
        "import sys\nprint(*sorted({'good', 'bad', 'last'} & set(sys.modules)))\nKEEPER = 1\nimport good, last\n"
    )
    assert learner.fork(warm, rank=3).output() == ("good last\n", "")


LATE = {
    "group": ("import torch.distributed\nVALUE = torch.distributed.is_initialized()\n", "bad: it asks for the process"),
    "torch's": (
        "import torch.distributed.optim\n",
        "it is torch's own, and the workers had a process group by then",
    ),
    "sets": ("import os\nos.environ['NEW'] = '1'\n", "bad: it changes NEW in the environment"),
    "set since": ("import os\nVALUE = os.environ.get('SET')\n", "bad: it reads SET"),
    "random": ("import random\nVALUE = random.random()\n", "bad: it draws random numbers"),
}


@pytest.mark.parametrize("name", LATE)
def test_of_what_came_after_the_first_group_nothing_is_learned_that_could_tell(learner: Learner, name: str) -> None:
    body, why = LATE[name]
    learner.write("bad", body + "VALUE = globals().get('VALUE', 'bad')\n")
    warm = learner.begin("torch.distributed" if "torch" in body else "colorsys")
    said = learner.learn(warm, "good", "bad", "last", changed={"NEW": "1"}, changed_since=("SET",), after_group="bad")
    assert why in said
    learner.warmer.script.write_text("import sys\nprint(*sorted({'good', 'bad', 'last'} & set(sys.modules)))\n")
    assert learner.fork(warm).output() == ("good last\n", "")


def test_a_script_that_sets_torchs_default_type_is_left_as_it_is(learner: Learner) -> None:
    said = learner.learn(learner.begin(), "good", has_other_type=True)
    assert said.endswith("no more modules imported than this one: the script sets torch's default type.")


def test_what_is_drawn_while_nothing_was_seeded_does_not_matter(learner: Learner) -> None:
    learner.write("bad", "import random\nVALUE = random.random()\n")
    warm = learner.begin()
    assert "Left" not in learner.learn(warm, "bad", "good", seeded_before="good")


def test_a_package_whose_module_cannot_be_learned_is_left_to_the_workers_with_who_needs_it(learner: Learner) -> None:
    learner.write("bad", "import os\nVALUE = os.environ.get('RANK')\n")
    learner.write("good", "import bad\nVALUE = bad.VALUE\n")
    warm = learner.begin()
    said = learner.learn(warm, "good", "bad", "last")
    assert said.endswith(" Left to each worker: bad: it reads RANK.")
    assert learner.fork(warm, rank=3).output() == ("last 3 3 good\n", "")


def test_many_modules_that_cannot_be_learned_take_none_along_that_can(learner: Learner) -> None:
    learner.write("bad", GOOD)
    many = [f"many{number}" for number in range(FAILURES_MAX)]
    for name in many:
        learner.write(name, "import os\nVALUE = os.environ.get('RANK')\n")
    warm = learner.begin()
    said = learner.learn(warm, "good", "bad", *many, "last")
    assert said.startswith("The next start finds 2 more modules imported, in ")
    assert said.endswith("; 47 more.")
    assert learner.fork(warm).output() == ("bad good good good good\n", "")


def test_a_variable_that_an_import_sets_is_what_it_became_in_the_worker(learner: Learner) -> None:
    learner.write("bad", "import os\nos.environ.setdefault('NEW', '1')\nVALUE = os.environ['NEW']\n")
    learner.warmer.script.write_text("import os, bad\nprint(os.environ['NEW'], bad.VALUE)\n")
    warm = learner.begin()
    assert "Left" not in learner.learn(warm, "bad", changed={"NEW": "1"})
    assert learner.fork(warm).output() == ("1 1\n", "")


def test_a_module_known_to_keep_the_rank_has_that_of_its_worker(learner: Learner) -> None:
    name = "torchmetrics.utilities.prints"
    for package in ("torchmetrics", "torchmetrics.utilities"):  # before one that is installed
        learner.write(f"{package}.__init__", "")
    learner.write(
        name, "import os\ndef rank_zero_only(): pass\nrank_zero_only.rank = int(os.environ.get('LOCAL_RANK', 0))\n"
    )
    learner.warmer.script.write_text(f"import sys\nprint(sys.modules['{name}'].rank_zero_only.rank)\n")
    warm = learner.begin()
    assert "Left" not in learner.learn(warm, name)
    assert [learner.fork(warm, rank).output() for rank in range(2)] == [("0\n", ""), ("1\n", "")]


def test_what_a_module_says_while_it_is_learned_is_not_said_again(learner: Learner, capfd: Any) -> None:
    learner.write("bad", "import os, sys\nprint('hello')\nos.write(2, b'there')\nVALUE = 'bad'\n")
    warm = learner.begin()
    learner.learn(warm, "bad")
    assert learner.fork(warm).output() == ("bad good bad good\n", "")
    assert "hello" not in capfd.readouterr().out


def _edit(learner: Learner) -> str:
    learner.write("good", "VALUE = 'new'\n")
    return f"{learner.folder / 'good.py'} has changed"


def _install(learner: Learner) -> str:
    learner.write("another", "")
    return f"{learner.folder} has changed"


def _shadow(learner: Learner) -> str:
    path = learner.warmer.folder / "good.py"
    path.write_text("VALUE = 'new'\n")
    return f"{path.with_suffix('')} stands in for a module that was preloaded"


@pytest.mark.parametrize(("change", "value"), [(_edit, "new"), (_install, "good"), (_shadow, "new")])
def test_what_was_learned_is_forgotten_when_files_have_changed(
    learner: Learner, change: Callable[[Learner], str], value: str
) -> None:
    learner.write("bad", GOOD)
    warm = learner.begin()
    learner.learn(warm, "good", "bad")
    why = change(learner)
    assert learner.fork(warm).output() == (f"{value} good good\n", "")
    assert learner.words[1:] == [f"What was imported for the next start is not used: {why}."]
    assert warm.may_learn  # what is there now


def test_a_worker_that_is_wanted_while_it_learns_is_forked_at_once(learner: Learner) -> None:
    os.mkfifo(learner.folder / "fifo")
    learner.write("bad", f"import os\nos.open({str(learner.folder / 'fifo')!r}, os.O_WRONLY)\n")
    learner.write("good", GOOD)
    warm = learner.begin()
    learner.tell(warm, "last", "bad")
    fifo = os.open(learner.folder / "fifo", os.O_RDONLY)  # opens once the import has come to that
    learner.warmer.script.write_text("import sys\nprint('last' in sys.modules)\n")
    assert learner.fork(warm).output() == ("False\n", "")
    assert os.read(fifo, 1) == b""  # nobody has it open any more
    os.close(fifo)
    assert (learner.words, warm.may_learn) == ([], True)


def _learned_pid(warm: WarmProcess) -> int:
    with open(f"/proc/{warm.pid}/task/{warm.pid}/children") as children:
        (pid,) = map(int, children.read().split())
    return pid


def test_its_death_costs_no_worker(learner: Learner, lab: Lab) -> None:
    learner.write("bad", GOOD)
    warm = learner.begin()
    learner.learn(warm, "good")
    pid = _learned_pid(warm)
    os.kill(pid, signal.SIGKILL)
    lab.wait_for_death(pid)  # in the very moment of its death nobody knows, and an agent starts that worker plainly
    assert learner.fork(warm).output() == ("good good good\n", "")


def test_it_ends_with_the_warm_process(learner: Learner, lab: Lab) -> None:
    warm = learner.begin()
    learner.learn(warm, "good")
    pid = _learned_pid(warm)
    pidfd = os.pidfd_open(pid)
    warm.end()
    lab.wait_for_death(pid)
    os.close(pidfd)


def test_a_script_that_sets_what_code_in_c_may_read_is_left_as_it_is(learner: Learner) -> None:
    warm = learner.begin()
    said = learner.learn(warm, "good", changed={"ARROW_DEFAULT_MEMORY_POOL": "system"})
    assert said == (
        "The next start finds no more modules imported than this one: the script sets ARROW_DEFAULT_MEMORY_POOL."
    )
    assert not warm.may_learn


def test_people_read_what_was_learned_and_what_was_not() -> None:
    left_out = tuple(NotLearned(module=name, why="it reads RANK") for name in "abcde")
    said = Learned(modules=1, grown_bytes=12_400_000, left_out=left_out)
    assert sentence_of(said) == (
        "The next start finds one more module imported, in 12 MB that all workers share. "
        "Left to each worker: a: it reads RANK; b: it reads RANK; c: it reads RANK; 2 more."
    )
