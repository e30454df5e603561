"""The variables for torch's NCCL back end."""

from __future__ import annotations

import pytest

from unicron_elastic.launcher.agent.process.nccl import nccl_defaults

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
DUMP_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


def test_without_recovery_in_the_process_they_are_torchruns() -> None:
    assert nccl_defaults({"PATH": "/bin"}) == {HANDLING: "1"}


def test_a_worker_that_outlives_a_peer_is_not_ended_by_its_watchdog() -> None:
    assert nccl_defaults({}, in_process=True) == {HANDLING: "2", DUMP_MS: "500"}


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("name", [HANDLING, "NCCL_ASYNC_ERROR_HANDLING"])
@pytest.mark.parametrize("value", ["0", "3", ""])
def test_what_the_user_set_is_never_overridden(name: str, value: str, in_process: bool) -> None:
    assert HANDLING not in nccl_defaults({name: value}, in_process=in_process)


def test_each_variable_is_looked_at_by_itself() -> None:
    assert nccl_defaults({DUMP_MS: "15000"}, in_process=True) == {HANDLING: "2"}
    assert nccl_defaults({HANDLING: "0"}, in_process=True) == {DUMP_MS: "500"}
