"""A warm process that may be held serves another launch of its script, unless what it has imported has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from warm_lab import Warmer

from unicron_elastic.launcher.agent.process.warm import WarmProcess, launch_of, sets_of
from unicron_elastic.worker.helper_tasks import HelperReady, TakeUp, Unfit
from unicron_elastic.worker.process.mark import mark_of

if TYPE_CHECKING:
    from conftest import Lab

PRELOAD = "colorsys,mine"
MINE = "import os\nVALUE = os.environ.get('READ_EARLY')\n"


class Reused:
    """A warm process with a library of the user's, and the launches that ask for it."""

    def __init__(self, lab: Lab, warmer: Warmer) -> None:
        self._lab = lab
        self.warmer = warmer
        self.library = warmer.folder / "library"
        self.library.mkdir()
        (self.library / "mine.py").write_text(MINE)
        self.env = {**os.environ, "PYTHONPATH": str(self.library)}
        self.warm = WarmProcess(lab.loop, lab.processes, PRELOAD)

    def begin(self, *, may_be_held: bool = True) -> None:
        self.warm.may_be_held = may_be_held
        self.warm.begin(self.warmer.command(), self.env, os.getcwd(), [0, 1, 2])
        assert self.warm.wait_ready(), self.warm.refusal

    def ask(self, *arguments: str, argv: list[str] | None = None) -> str | None:
        """Why it does not serve this launch; None if it does."""
        command = argv or self.warmer.command(*arguments)
        mark = mark_of(self._lab.processes.token, 99)
        channel = self.warm._channel
        assert channel is not None
        channel.settimeout(30.0)
        channel.send(TakeUp(launch=launch_of(command, self.env, PRELOAD), sets=sets_of(command), mark=mark))
        answer = channel.hear([HelperReady, Unfit])
        return answer.reason if isinstance(answer, Unfit) else None


@pytest.fixture
def reused(lab: Lab, tmp_path: Path) -> Iterator[Reused]:
    warmer = Warmer(lab, tmp_path)
    made = Reused(lab, warmer)
    yield made
    made.warm.end()
    warmer.close()


def test_it_serves_one_launch_after_the_other_and_shows_what_they_are(reused: Reused) -> None:
    reused.begin()
    for arguments in ((), ("--lr", "1"), ("--lr", "2", "a b"), ()):
        assert reused.ask(*arguments) is None
        command = Path(f"/proc/{reused.warm.pid}/cmdline").read_text().split("\0")[:-1]
        assert command == reused.warmer.command(*arguments)
    assert b".00000099\0" in Path(f"/proc/{reused.warm.pid}/environ").read_bytes()
    assert {os.readlink(f"/proc/{reused.warm.pid}/fd/{stream}") for stream in (0, 1, 2)} == {os.devnull}


def _edit(reused: Reused) -> str:
    (reused.library / "mine.py").write_text(MINE + "MORE = 1\n")
    return f"{reused.library}/mine.py has changed"


def _touch(reused: Reused) -> str:
    os.utime(reused.library / "mine.py", ns=(0, 0))
    return f"{reused.library}/mine.py has changed"


def _hide_in_library(reused: Reused) -> str:
    (reused.library / "colorsys.py").write_text("")
    return f"{reused.library}/colorsys stands in for a module that was preloaded"


def _hide_beside_script(reused: Reused) -> str:
    (reused.warmer.folder / "colorsys.py").write_text("")
    return f"{reused.warmer.folder}/colorsys stands in for a module that was preloaded"


def _set_what_was_read(reused: Reused) -> str:
    reused.warmer.script.write_text("import os\nos.environ['READ_EARLY'] = '1'\n")
    return "the script sets READ_EARLY, which is read when what is preloaded is imported"


@pytest.mark.parametrize(
    "change", [_edit, _touch, _hide_in_library, _hide_beside_script, _set_what_was_read], ids=lambda each: each.__name__
)
def test_what_has_changed_since_is_said(reused: Reused, change: Callable[[Reused], str]) -> None:
    reused.begin()
    assert reused.ask() is None
    why = change(reused)
    assert reused.ask() == why


def test_another_interpreter_or_script_is_another_command(reused: Reused) -> None:
    reused.begin()
    _, *rest = reused.warmer.command()
    assert reused.ask(argv=["/usr/bin/another-python", *rest]) == "it was held for another command"


def test_one_that_was_not_to_be_held_says_so(reused: Reused) -> None:
    reused.begin(may_be_held=False)
    assert reused.ask() == "it was not to be held"
