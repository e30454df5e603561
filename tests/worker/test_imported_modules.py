"""What a worker says it has imported."""

from __future__ import annotations

import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_elastic.worker.process.imported_modules import ImportedModules, file_of, is_installed


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with installed modules, and beside it one with modules of the user's."""
    installed, own = tmp_path / "site-packages", tmp_path / "own"
    for folder, names in ((installed, ("im_one", "im_two", "im_three")), (own, ("im_own",))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text("")
        monkeypatch.syspath_prepend(str(folder))
    yield installed
    for name in [name for name in sys.modules if name.startswith("im_")]:
        del sys.modules[name]


@pytest.fixture
def environ() -> dict[str, str]:
    return {"IM_HERE": "1", "IM_SAME": "1"}


@pytest.fixture
def imported(environ: dict[str, str]) -> Iterator[ImportedModules]:
    made = ImportedModules(environ)
    yield made
    made.note_group()


def test_it_has_what_is_installed_in_order_and_what_came_after_the_first_group(
    path: Path, imported: ImportedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    import im_one
    import im_own
    import im_two

    imported.note_group()
    import im_three  # noqa: F401

    monkeypatch.setitem(sys.modules, "torch.im_late", types.ModuleType("torch.im_late"))

    assert imported.installed() == {name: str(path / f"{name}.py") for name in ("im_two", "im_one", "im_three")}
    assert imported.after_group == "im_three"
    assert (im_two.__name__, im_one.__name__, im_own.__name__) == ("im_two", "im_one", "im_own")


def test_it_has_the_variables_that_have_changed_by_then(imported: ImportedModules, environ: dict[str, str]) -> None:
    environ["IM_SET"] = "1"
    del environ["IM_HERE"]
    imported.note_group()
    assert imported.changed_since == ()
    environ["IM_LATER"] = "1"
    environ["IM_SET"] = "2"
    assert imported.changed_variables == {"IM_SET": "1", "IM_HERE": None}
    assert imported.changed_since == ("IM_LATER", "IM_SET")


@pytest.mark.usefixtures("path")
def test_to_draw_random_numbers_is_not_to_seed_them(imported: ImportedModules) -> None:
    for _ in range(3000):
        random.random()
    import im_one  # noqa: F401

    random.random()
    import im_two  # noqa: F401

    assert imported.seeded_before is None
    random.seed(1)
    import im_three  # noqa: F401

    assert imported.seeded_before == "im_three"


def test_a_seed_after_all_imports_is_before_none(imported: ImportedModules) -> None:
    random.seed(2)
    imported.note_group()
    assert imported.seeded_before == ""


def test_anything_may_stand_in_for_a_module() -> None:
    class Odd(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ValueError(name)

    odd = Odd("odd")
    del odd.__spec__
    assert file_of(odd) == ""


def test_what_is_installed_lies_in_pythons_own_folders() -> None:
    assert is_installed(os.__file__)
    assert is_installed("/x/lib/python3.11/site-packages/torch/__init__.py")
    assert is_installed("<frozen importlib._bootstrap>")
    assert not is_installed("/home/me/train.py")


def test_a_script_below_the_prefix_of_python_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # With a distribution's Python the prefix is /usr, and containers often keep the script in /usr/src/app.
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert not is_installed("/usr/src/app/train.py")
    assert is_installed("/usr/lib/python3/site-packages/torch/nn/modules/module.py")
