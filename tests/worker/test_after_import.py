"""Callbacks after the import of a module, and nothing else changed about that import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unicron_elastic.worker.process.after_import import after_import


class Modules:
    """Modules that a test writes, imports and loses again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[str] = []

    def write(self, name: str, text: str = "") -> None:
        (self.folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()

    def hear(self, module: ModuleType) -> None:
        self.heard.append(f"{module.__name__} {getattr(module, 'state', None)}")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Modules(tmp_path)
    for name in [name for name in sys.modules if name.startswith("probed")]:
        del sys.modules[name]


def test_it_calls_back_once_when_the_module_is_complete(modules: Modules) -> None:
    modules.write("probed", "state = 'begun'\nstate = 'complete'\n")
    finders = list(sys.meta_path)
    after_import("probed", modules.hear)
    assert modules.heard == []
    assert "probed" not in sys.modules
    module = importlib.import_module("probed")
    assert modules.heard == ["probed complete"]
    assert sys.meta_path == finders
    assert importlib.import_module("probed") is module
    importlib.reload(module)
    assert modules.heard == ["probed complete"]


def test_what_is_imported_already_is_told_at_once(modules: Modules) -> None:
    finders = list(sys.meta_path)
    after_import("sys", modules.hear)
    assert modules.heard == ["sys None"]
    assert sys.meta_path == finders


def test_the_module_looks_as_it_would_without_us(modules: Modules) -> None:
    modules.write("probed_plain")
    plain = importlib.import_module("probed_plain")
    modules.write("probed_watched")
    after_import("probed_watched", modules.hear)
    watched = importlib.import_module("probed_watched")
    assert type(watched.__loader__) is type(plain.__loader__)
    assert watched.__spec__ is not None
    assert watched.__spec__.loader is watched.__loader__
    assert vars(watched).keys() == vars(plain).keys()


def test_other_imports_pass(modules: Modules) -> None:
    modules.write("probed_other", "state = 'other'\n")
    after_import("probed", modules.hear)
    assert importlib.import_module("probed_other").state == "other"
    assert modules.heard == []


def test_several_may_wait_for_one_module(modules: Modules) -> None:
    modules.write("probed", "state = 1\n")
    after_import("probed", modules.hear)
    after_import("probed", modules.hear)
    importlib.import_module("probed")
    assert modules.heard == ["probed 1", "probed 1"]


def test_a_module_that_does_not_exist_is_missing_as_ever(modules: Modules) -> None:
    after_import("probed_nowhere", modules.hear)
    with pytest.raises(ModuleNotFoundError, match="probed_nowhere"):
        importlib.import_module("probed_nowhere")
    assert modules.heard == []


def test_a_module_that_fails_fails_with_its_own_error_and_is_not_told(modules: Modules) -> None:
    modules.write("probed", "raise KeyError('from the module')\n")
    after_import("probed", modules.hear)
    with pytest.raises(KeyError, match="from the module"):
        importlib.import_module("probed")
    assert "probed" not in sys.modules
    assert modules.heard == []


def test_a_callback_that_fails_later_costs_one_line_and_now_raises(
    modules: Modules, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_module: ModuleType) -> None:
        raise RuntimeError("from the callback")

    modules.write("probed")
    after_import("probed", fail)
    importlib.import_module("probed")
    assert "probed" in sys.modules
    assert "probed is not watched in this worker: RuntimeError: from the callback" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="from the callback"):
        after_import("probed", fail)


def test_a_script_that_replaces_all_finders_is_not_disturbed(modules: Modules) -> None:
    class Everything(MetaPathFinder):
        """A script's own; it asks whatever was there before."""

        def __init__(self, before: list[Any]) -> None:
            self.before = before

        def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
            found = (finder.find_spec(fullname, path, target) for finder in self.before)
            return next((spec for spec in found if spec is not None), None)

    modules.write("probed", "state = 2\n")
    after_import("probed", modules.hear)
    sys.meta_path[:] = [Everything([*sys.meta_path][1:])]
    assert importlib.import_module("probed").state == 2
    assert modules.heard == []
