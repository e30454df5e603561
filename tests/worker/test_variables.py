"""Which variables count as read by what is preloaded."""

from __future__ import annotations

import os
import types

import pytest

from unicron_elastic.worker.start.variables import ImportedVariables


@pytest.mark.parametrize(("module", "is_read"), [("tqdm.utils", False), ("some.module", True)])
def test_who_goes_through_all_for_its_own_reads_no_other(
    module: str, *, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_NCOLS", "80")
    monkeypatch.setenv("SOME_NAME", "1")
    variables = ImportedVariables(os.environ)
    there = types.ModuleType(module)
    with variables.watching(keeps_changes=True):
        exec("import os\nfound = {k: v for k, v in os.environ.items()}", vars(there))
    assert (variables.read_of(["SOME_NAME"]) is not None) is is_read
    assert variables.read_of(["TQDM_NCOLS"]) == "TQDM_NCOLS"


def test_what_is_asked_for_by_its_name_is_read() -> None:
    variables = ImportedVariables(os.environ)
    with variables.watching(keeps_changes=True):
        os.environ["PATH"]
    assert variables.read_of(["HOME", "PATH"]) == "PATH"
