"""A user without a home: the folder whose name all can guess is taken only if it is that user's alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import Ledger, default_ledger, find_ledgers, read_ledger
from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.base.state_folder import hold_own, state_folder
from unicron_elastic.launcher.agent.core import quarantine_file

ENTRY = Quarantined(node="node-a", reason="memory errors", since=1.0, until=None, by="ada")
INCIDENT = Incident(
    number=1,
    run_id="run",
    job="train.py",
    host="node-a",
    time="",
    generation=1,
    rank=0,
    status="killed by signal",
    severity=2,
    method="process supervision",
    reason="rank 0 was killed.",
    action="restart",
    decision="Restart 1 of 3.",
    restarts_used=1,
    max_restarts=3,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the state of a user without a home is; it is not there yet."""

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert state_folder().parent == tmp_path
    return state_folder()


def _record() -> list[str]:
    """Writes an incident to the default place; what was said of it."""
    said: list[str] = []
    Ledger(default_ledger("run", None), said.append).record(INCIDENT)
    return said


def test_it_is_made_closed_to_others_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert _record() == []
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    (path,) = find_ledgers(folder)
    assert [incident.reason for incident in read_ledger(path)[0]] == ["rank 0 was killed."]
    quarantine_file.add(quarantine_file.default_path({}), ENTRY)
    assert quarantine_file.read(quarantine_file.default_path({})) == (ENTRY,)


def _plant(folder: Path, elsewhere: Path, how: str) -> str:
    """What another user could have prepared, and what is said of it."""
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "run").mkdir()
    (elsewhere / "run" / "incidents.jsonl").write_text("")
    (elsewhere / quarantine_file.FILE_NAME).write_text('{"nodes": []}')
    match how:
        case "a link":
            folder.symlink_to(elsewhere)
            return "is no folder, but a link or a file that anybody may have made"
        case "a link to nowhere":
            folder.symlink_to(elsewhere / "nowhere")
            return "is no folder, but a link"
        case "a file":
            folder.write_text("")
            return "is no folder"
        case "open to all":
            elsewhere.rename(folder)
            folder.chmod(0o777)
            return "is open to other users (mode 0777, should be 0700)"
        case _:
            elsewhere.rename(folder)
            os.chown(folder, 12345, -1)
            return "belongs to the user 12345"


PLANTED = ["a link", "a link to nowhere", "a file", "open to all", "another's"]


@pytest.mark.parametrize("how", PLANTED)
def test_what_another_may_have_prepared_is_neither_written_nor_read(folder: Path, tmp_path: Path, how: str) -> None:
    if how == "another's" and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    wrong = _plant(folder, tmp_path / "elsewhere", how)
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}

    (said,) = _record()
    assert f"{folder} {wrong}" in said
    assert said.endswith("give --unicron-ledger, or set XDG_STATE_HOME. The job goes on.")
    assert Ledger(default_ledger("run", None)).keep_evidence("stacks") is None
    with pytest.raises(PermissionError):
        read_ledger(default_ledger("run", None))
    with pytest.raises(PermissionError):
        find_ledgers(folder)
    for use in (quarantine_file.read, lambda path: quarantine_file.add(path, ENTRY)):
        with pytest.raises(quarantine_file.QuarantineFileError) as caught:
            use(quarantine_file.default_path({}))
        assert wrong in str(caught.value)

    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "shared"
    elsewhere.mkdir(mode=0o777)
    hold_own(elsewhere / "incidents.jsonl", make=True)
