"""What the table says of each XID."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Level
from unicron_elastic.health.gpu.xid import XIDS, explain_xid, xid_finding

# Immediate actions of NVIDIA's catalogue ("Analyzing Xid Errors with the Xid Catalog"), as they stand there.
RESTART_APP = {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, *range(68, 73), 75, 76, 77, 80, *range(82, 87), 88, 89, 94}
RESTART_APP |= {*range(96, 106), *range(126, 136), 139}
RESET_GPU = {46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 149, 150}
RESTART_NODE_OR_VM_OR_CHECK = {54, 78, 79, 151}
IGNORE = {14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161}


@pytest.mark.parametrize("number", sorted(RESTART_APP))
def test_the_application_is_restarted(number: int) -> None:
    assert (XIDS[number].severity, XIDS[number].level) == (Severity.SEV2, Level.CRITICAL)


@pytest.mark.parametrize("number", sorted(RESET_GPU | RESTART_NODE_OR_VM_OR_CHECK | {48, 74}))
def test_the_node_is_isolated(number: int) -> None:
    assert (XIDS[number].severity, XIDS[number].level) == (Severity.SEV1, Level.CRITICAL)


@pytest.mark.parametrize("number", sorted(IGNORE | {45, 154}))
def test_nothing_is_done_at_once(number: int) -> None:
    assert XIDS[number].level is Level.WARN


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (13, Status.ILLEGAL_MEMORY_ACCESS),
        (31, Status.ILLEGAL_MEMORY_ACCESS),
        (43, Status.CUDA_ERROR),
        (45, Status.EXITED_ABNORMALLY),
        (48, Status.ECC_ERROR),
        (63, Status.ECC_ERROR),
        (64, Status.ECC_ERROR),
        (74, Status.NVLINK_ERROR),
        (79, Status.GPU_DRIVER_ERROR),
        (92, Status.ECC_ERROR),
        (94, Status.ECC_ERROR),
        (95, Status.ECC_ERROR),
        (119, Status.GPU_DRIVER_ERROR),
        (140, Status.ECC_ERROR),
        (145, Status.NVLINK_ERROR),
    ],
)
def test_statuses(number: int, status: Status) -> None:
    assert XIDS[number].status is status


def test_the_table_is_whole() -> None:
    assert all(row.number == number and row.words and row.action for number, row in XIDS.items())
    assert len(XIDS) > 100
    unused = {*range(1, 8), 9, 10, 12, *range(15, 25), *range(26, 31), 42, 47, *range(49, 54), 65, 73, 81, 87, 138}
    assert XIDS.keys() & unused == set()


@given(number=st.integers(min_value=0, max_value=2**64 - 1))
def test_every_number_has_a_sentence_that_names_it(number: int) -> None:
    found = xid_finding(number, "GPU 0", 5.0)
    assert f"GPU 0 reported XID {number}, " in found.reason
    assert found.reason.endswith(".")
    assert found.level is not Level.OK
    assert (found.subject, found.at, found.probe) == ("GPU 0", 5.0, "gpu.xid")
    if number not in XIDS:
        assert (found.level, found.severity) == (Level.WARN, Severity.SEV2)
        assert explain_xid(number).number == number
