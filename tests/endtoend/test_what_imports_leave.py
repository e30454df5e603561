"""What imports leave in a warm worker is what they leave in a plain one: none of it is another process's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "what_imports_leave.py"
PAGE = Path(__file__).parents[2] / "docs" / "differences.md"
FILE_TIMES = r"(linecache\.cache|sys\.path_importer_cache)"
LIBRARY_ADDRESSES = range(0x5000_0000_0000, 0x8000_0000_0000)
# Differ between two plain starts and are the same in two forks; with the words that docs/differences.md has of it.
SAME_IN_FORKS = {
    r"sympy\.(?!core\.symbol:Dummy\._base).*\.dummy_index": "sympy's own dummies",
    r"torch\.distributed\._composable\.contract\.(STATE|REGISTRY)_KEY": "`torch.distributed._composable`",
    r"torch\._dynamo\.variables\.torch_function\.banned_attrs.*": "addresses",  # of what is in a set
}
# Differ between a plain start and a fork.
CHANGED = {
    r"os\.environ\._data\[b'(MASTER_PORT|TMPDIR|UNICRON_.*|TORCHELASTIC_(RUN_ID|ERROR_FILE))'\]": "`UNICRON_RUN_TOKEN`",
    r"os\.environ\._data\[b'TORCHINDUCTOR_CACHE_DIR'\]": "`TORCHINDUCTOR_CACHE_DIR`",
    r"sys\.path_importer_cache.*": "`sys.path_importer_cache`",
    r"linecache\.cache.*|inspect\.(_filesbymodname|modulesbyfile).*": "`linecache`",
    r"tempfile\.tempdir": "`tempfile`",
    r"torch\._dynamo\.variables\.torch_function\.banned_attrs.*": "addresses",
    r"torch\.cuda\._queued_calls.*": "where it was imported",
    r"torch\.(load|save|distributed\.checkpoint\..*|distributed\.distributed_c10d\._register_p.*)\(\d\)": "are wrapped",
    r"torch\.utils\.hooks:RemovableHandle\.next_id": "a hook of ours",
}


def left(launcher: Any, tool: str, *options: str) -> list[dict[str, Any]]:
    """What each of two ranks tells in each of two generations."""
    arguments = (*options, "--nproc-per-node=2", "--max-restarts=1", str(SCRIPT))
    run = launcher.run(*arguments, tool=tool, fast=False, env={"PYTHONHASHSEED": "0", "TMPDIR": str(launcher.folder)})
    assert run.process.returncode == 0, run.err
    assert "without the warm process" not in run.err, run.err
    paths = [launcher.folder / f"left-{count}-{rank}" for count in range(2) for rank in range(2)]
    told = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return told


def may_differ(path: str, allowed: dict[str, str]) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in allowed)


def is_address(text: str) -> bool:
    return text.isdigit() and int(text) in LIBRARY_ADDRESSES


def test_what_may_differ_is_told_to_users() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [words for words in (SAME_IN_FORKS | CHANGED).values() if words not in text] == []


@pytest.mark.slow
def test_what_imports_leave_is_of_the_process_itself(launcher: Any) -> None:
    plain = left(launcher, "torchrun")
    warm = left(launcher, "unicron-run", "--unicron-warm=on")
    assert len({json.dumps(each["draws"]) for each in warm}) == 4
    for each in (*plain, *warm):
        past = [path for path in each["past"] if not re.match(FILE_TIMES, path)]
        assert (past, each["pids"]) == ([], {})
    assert set(plain[0]["modules"]) <= set(warm[0]["modules"])
    assert sorted(plain[0]["living"].values()) == sorted(warm[0]["living"].values())
    starts, forks = [each["values"] for each in plain], [each["values"] for each in warm]
    wrong = {}
    for path, first in starts[0].items():
        before, now = [each.get(path) for each in starts], [each.get(path) for each in forks]
        if len(set(before)) == 1:
            is_wrong = set(now) != set(before) and not may_differ(path, CHANGED)
        else:
            is_wrong = len(set(now)) < len(set(before)) and not is_address(first)
            is_wrong = is_wrong and not may_differ(path, SAME_IN_FORKS | CHANGED)
        if is_wrong:
            wrong[path] = (before, now)
    assert wrong == {}, "\n".join(f"{path}: {both}" for path, both in wrong.items())
