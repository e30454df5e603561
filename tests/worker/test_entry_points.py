"""Entry points are attached to once they are imported, and whatever goes wrong there ends nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unicron_elastic.worker.process.entry_points import ENTRY_POINTS, watch_entry_points

ENTRY, OURS = "attached_to", "attached_by"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Watch a module that a test may import, for one that stands for ours."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / f"{ENTRY}.py").write_text("")
    watch_entry_points({ENTRY: OURS})
    yield tmp_path
    for name in (ENTRY, OURS):
        sys.modules.pop(name, None)


def imported(folder: Path, text: str) -> ModuleType:
    (folder / f"{OURS}.py").write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module(ENTRY)


def test_what_a_script_imports_is_attached_to(folder: Path) -> None:
    module: Any = imported(folder, "def attach(module): module.is_attached_to = True")
    assert module.is_attached_to


def test_nothing_is_imported_before(folder: Path) -> None:
    assert folder.exists()
    assert not {ENTRY, OURS} & {*sys.modules}


@pytest.mark.parametrize("text", ["def attach(module): raise KeyError('Trainer')", "raise KeyError('Trainer')"])
def test_what_cannot_be_attached_to_is_as_it_is_without(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert imported(folder, text).__name__ == ENTRY
    why = f"unicron: {ENTRY} is as it is without us, and keeps no state in memory: KeyError: 'Trainer'\n"
    assert capsys.readouterr().err == why


def test_what_is_named_is_there() -> None:
    for ours in ENTRY_POINTS.values():
        assert callable(importlib.import_module(ours).attach)
