"""The text of a script tells whether a replacement runs what the others run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_elastic.training.group.script_text import how_else, script_text


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "st_model.py"
    path.write_text("WIDTH = 1\n")
    __import__("st_model")
    yield path
    del sys.modules["st_model"]


@pytest.mark.usefixtures("module")
def test_it_has_the_scripts_own_modules_and_no_others() -> None:
    found = script_text()
    assert "st_model" in found
    assert __name__ in found
    assert not {"os", "torch", "pytest", "unicron_elastic"} & found.keys()


def test_what_was_edited_is_named(module: Path) -> None:
    before = script_text()
    assert how_else(script_text(), before) == ""
    module.write_text("WIDTH = 2\n")
    os.utime(module, ns=(1, 1))
    assert how_else(script_text(), before) == f"the others began when there was another text in {module}"
    module.write_text("WIDTH = 1\n")
    assert how_else(script_text(), before) == ""


@pytest.mark.usefixtures("module")
def test_what_one_of_them_alone_has_imported_does_not_count() -> None:
    before = script_text()
    assert how_else({**before, "more": "1"}, {**before, "others": "2"}) == ""


def test_of_many_some_are_named() -> None:
    own, theirs = ({f"no_module_{number}": text for number in range(5)} for text in "ab")
    assert how_else(own, theirs).endswith("in no_module_0, no_module_1, no_module_2, ...")


def test_a_pipe_is_not_read(module: Path) -> None:
    module.unlink()
    os.mkfifo(module)
    assert "st_model" not in script_text()
