"""The vocabulary against the paper's table 1, and the values it promises."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

import unicron_elastic.faults as package
from unicron_elastic.faults import SEVERITY_OF, Failure, Severity, Status

PAPER_TABLE_1 = {
    Severity.SEV1: {"lost connection", "ECC error", "invalid DMA mapping", "NVLink error", "GPU driver error"},
    Severity.SEV2: {"exited abnormally", "illegal memory access", "CUDA error", "task hang", "other software error"},
    Severity.SEV3: {"collective time-out", "link flapping", "connection refused or reset", "other network error"},
}
OURS = {"out of GPU memory", "out of host memory", "storage error", "killed by signal", "stopped by request"}


@pytest.mark.parametrize("severity", Severity)
def test_paper_table_1(severity: Severity) -> None:
    found = {str(status) for status, its in SEVERITY_OF.items() if its is severity} - OURS
    assert found == PAPER_TABLE_1[severity]


def test_every_status_has_a_severity_and_prints_as_its_value() -> None:
    assert set(SEVERITY_OF) == set(Status)
    assert [f"{status}" for status in Status] == [status.value for status in Status]
    assert "%s" % Status.ECC_ERROR == "ECC error"  # noqa: UP031 (logging formats this way)


def test_severity_one_is_worst_and_actions_differ() -> None:
    assert min(Severity) is Severity.SEV1
    assert len({severity.action for severity in Severity}) == len(Severity)
    assert "isolate" in Severity.SEV1.action
    assert "restart" in Severity.SEV2.action
    assert "in place" in Severity.SEV3.action


def test_failure_is_a_value() -> None:
    failure = Failure(at=1.0, rank=0, local_rank=0, pid=1)
    assert failure == Failure(at=1.0, rank=0, local_rank=0, pid=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        failure.rank = 2  # type: ignore[misc]


def test_public_names_exist() -> None:
    assert {name for name in package.__all__ if not hasattr(package, name)} == set()
    assert {"Failure", "Fault", "RootCause", "Severity", "Status", "classify", "root_cause", "signature"} <= set(
        package.__all__
    )


FORBIDDEN = {"torch", "socket", "subprocess", "threading", "time", "datetime", "asyncio", "os", "random", "megatron"}


@pytest.mark.parametrize("path", sorted(Path(package.__path__[0]).glob("*.py")), ids=lambda path: path.name)
def test_package_is_pure(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported & FORBIDDEN == set()
