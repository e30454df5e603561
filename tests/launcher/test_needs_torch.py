"""Whether a script seems to import torch, by its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron_elastic.launcher.common.needs_torch import needs_torch

OWN = {
    "plain.py": "import json\n",
    "deep.py": "import plain\n",
    "heavy.py": "def load():\n    import torch\n",
    "package/__init__.py": "",
    "json_like.py": "from json import loads\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("print('x')", False),
        ("import os, sys.path\nfrom collections.abc import Iterator", False),
        ("import numpy as np", False),
        ("import plain, json_like", False),
        ("def f(:", False),  # it ends with that
        ("import torch", True),
        ("if __name__ == '__main__':\n    from torch.distributed import init_process_group", True),
        ("import transformers", True),  # and whatever else is not known
        ("import unicron_elastic", True),
        ("import heavy", True),
        ("import deep", True),  # of which no more is read
        ("import package", True),
        ("from . import plain", True),
        ("import importlib\nimportlib.import_module('to' + 'rch')", True),
        ("__import__('torch')", True),
        ("exec(open('other').read())", True),
    ],
)
def test_a_script_is_read_for_its_imports(folder: Path, source: str, needs: bool) -> None:
    script = folder / "train.py"
    script.write_text(source)
    assert needs_torch([str(script)]) is needs


def test_what_cannot_be_read_may_need_it(folder: Path) -> None:
    assert needs_torch([])
    assert needs_torch([str(folder / "nowhere.py")])
    (folder / "bytes.py").write_bytes(b"\0")
    assert needs_torch([str(folder / "bytes.py"), str(folder / "heavy.py")])
    assert needs_torch([str(folder / "plain.py"), str(folder / "heavy.py")])
    assert not needs_torch([str(folder / "plain.py")])


def test_a_module_of_the_script_is_taken_before_one_of_python(folder: Path) -> None:
    (folder / "queue.py").write_text("import torch\n")
    (folder / "train.py").write_text("import queue\n")
    assert needs_torch([str(folder / "train.py")])
