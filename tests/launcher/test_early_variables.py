"""What can be read from a script before it runs, and which files are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from unicron_elastic.launcher.agent.process.early_variables import early_variable, source_files


@pytest.mark.parametrize(
    ("source", "variable"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n", "OMP_NUM_THREADS"),
        ("import os\nos.environ.update(OMP_NUM_THREADS='1')\n", "OMP_NUM_THREADS"),
        ("import os\nos.environ |= {'TORCH_LOGS': '+dynamo'}\n", "TORCH_LOGS"),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '1')\n", "MKL_NUM_THREADS"),
        ("from os import putenv\nputenv('KMP_AFFINITY', 'x')\n", "KMP_AFFINITY"),
        ("import os\nNAME = 'PYTORCH_JIT'\nos.environ[NAME] = '0'\n", "PYTORCH_JIT"),
        ("import os\nthreads = os.environ.get('OMP_NUM_THREADS', '1')\n", None),
        ("import os\nthreads = os.environ['OMP_NUM_THREADS']\n", None),
        ("import os\nif 'OMP_NUM_THREADS' in os.environ:\n    pass\n", None),
        ("import os\nos.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING'] = '1'\n", None),
        ("import os\nos.environ['MASTER_PORT'] = '1'\n", None),
        ("# OMP_NUM_THREADS\nprint('set OMP_NUM_THREADS yourself')\n", None),
        ("this is no Python (\n", None),
        ("\x00", None),
        ("'\\d'\nimport os\nos.environ['OMP_WAIT_POLICY'] = 'PASSIVE'\n", "OMP_WAIT_POLICY"),
    ],
)
def test_variables_that_must_be_set_before_an_import(tmp_path: Path, source: str, variable: str | None) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    assert early_variable(str(script)) == variable


def test_a_missing_file_or_one_too_long_to_parse_sets_nothing(tmp_path: Path) -> None:
    long = tmp_path / "long.py"
    long.write_text("import os; os.environ['OMP_NUM_THREADS'] = '1'\n" + "#" * (1 << 20))
    assert early_variable(str(long)) is None
    assert early_variable(str(tmp_path / "missing.py")) is None
    assert early_variable(str(tmp_path)) is None


def test_what_comes_through_a_pipe_is_left_to_the_worker(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert early_variable(str(tmp_path / "fifo")) is None  # to open it would wait for a writer
    source, writer = os.pipe()
    os.write(writer, b"import os; os.environ['OMP_NUM_THREADS'] = '1'")
    os.close(writer)
    assert early_variable(f"/proc/self/fd/{source}") is None
    assert os.read(source, 100).startswith(b"import os")
    os.close(source)


def test_the_files_that_a_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("outer/__init__.py", "outer/inner/__init__.py", "outer/inner/__main__.py", "outer/tool.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("raise SystemExit('imported')\n")
    python = sys.executable

    def relative(*argv: str) -> list[str]:
        return [str(Path(path).relative_to(tmp_path)) for path in source_files([python, "-u", *argv])]

    assert relative("-m", "outer.tool", "-m", "x") == ["outer/__init__.py", "outer/tool.py"]
    assert relative("-m", "outer.inner") == ["outer/__init__.py", "outer/inner/__init__.py", "outer/inner/__main__.py"]
    assert source_files([python, "-u", "train.py", "-m", "outer"]) == ["train.py"]
    assert source_files([python, "outer/inner"]) == ["outer/inner/__main__.py"]
    assert source_files([python, "-m", "no_such_module.x"]) == []
    assert source_files([python, "-m"]) == []
    assert source_files([python, "-u"]) == []
    assert source_files([python, "-u", "-", "train.py"]) == []
