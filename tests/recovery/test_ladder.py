"""The ladder of severities, by itself."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_elastic.faults import Failure, Fault, Severity, classify
from unicron_elastic.recovery.policy import Attempt, Policy, climb

POLICY = Policy(retries=2, isolate_after=3, attempts_window_s=600.0)
KILLED = {"exit_code": -9}
RESET = {"exception_type": "RuntimeError", "message": "NET/IB : Got async event : port error"}


def _fault(local_rank: int = 1, **known: Any) -> Fault:
    return classify(Failure(**{"at": 1.0, "rank": 8 + local_rank, "local_rank": local_rank, "pid": 1, **known}))


def _climb(*faults: Fault, policy: Policy = POLICY, every_s: float = 1.0) -> list[tuple[Severity, str]]:
    attempts: tuple[Attempt, ...] = ()
    rungs = []
    for number, fault in enumerate(faults):
        attempts, rung = climb(attempts, fault, number * every_s, policy)
        rungs.append((rung.severity, rung.reason))
    return rungs


def test_the_third_failure_of_a_worker_isolates_its_node() -> None:
    assert _climb(*[_fault(**KILLED)] * 3) == [
        (Severity.SEV2, ""),
        (Severity.SEV2, ""),
        (Severity.SEV1, "Worker 1 has failed 3 times within 10 min."),
    ]


def test_a_rank_whose_state_is_not_that_of_most_speaks_against_its_node_and_other_exceptions_do_not() -> None:
    odd = {"exception_type": "unicron_elastic.OddReplicaError", "message": "rank 9 differs from the others"}
    assert _climb(*[_fault(**odd)] * 3)[-1] == (Severity.SEV1, "Worker 1 has failed 3 times within 10 min.")
    unsure = {**odd, "exception_type": "unicron_elastic.ReplicasDifferError"}
    assert {severity for severity, _ in _climb(*[_fault(**unsure)] * 9)} == {Severity.SEV2}


def test_failures_of_different_workers_weigh_half() -> None:
    rungs = _climb(*(_fault(number, **KILLED) for number in range(6)))
    assert [severity for severity, _ in rungs] == [Severity.SEV2] * 5 + [Severity.SEV1]
    assert rungs[-1][1] == "The workers of this node have failed 6 times within 10 min."


def test_what_is_longer_ago_than_the_window_is_forgotten() -> None:
    assert {severity for severity, _ in _climb(*[_fault(**KILLED)] * 9, every_s=301.0)} == {Severity.SEV2}
    assert _climb(*[_fault(**KILLED)] * 3, every_s=300.0)[-1][0] is Severity.SEV1


def test_a_network_fault_climbs_one_rung_after_the_other() -> None:
    severities = [severity for severity, _ in _climb(*[_fault(**RESET)] * 5)]
    assert severities == [Severity.SEV3] * 2 + [Severity.SEV2] * 2 + [Severity.SEV1]
    assert _climb(*[_fault(**RESET)] * 3)[-1] == (Severity.SEV2, "It was tried again 2 times within 10 min.")


@pytest.mark.parametrize(
    "known",
    [
        {"exit_code": 1},
        {"exit_code": -15},
        {"exit_code": -6},  # as torch's watchdog ends healthy ones
        {"exception_type": "ValueError", "message": "bad"},
        {"exit_code": -9, "why_killed": "out of memory"},
        {"exception_type": "torch.OutOfMemoryError", "message": "CUDA out of memory."},
        {"exception_type": "RuntimeError", "message": "Connection closed by peer [10.0.0.1]:44696"},
    ],
)
def test_a_script_or_a_peer_at_fault_does_not_cost_the_node(known: dict[str, Any]) -> None:
    rungs = _climb(*[_fault(**known)] * 12)
    assert len(set(rungs)) == 1
    assert rungs[0][0] is not Severity.SEV1


def test_only_faults_of_the_network_use_up_its_tries() -> None:
    rungs = _climb(_fault(**KILLED), _fault(**KILLED), _fault(**RESET))
    assert rungs[-1] == (Severity.SEV3, "")


def test_isolation_can_be_switched_off() -> None:
    off = Policy(isolate_after=0)
    assert {severity for severity, _ in _climb(*[_fault(**KILLED)] * 20, policy=off)} == {Severity.SEV2}


def test_a_broken_device_needs_no_second_time() -> None:
    broken = _fault(exception_type="RuntimeError", message="CUDA error: uncorrectable ECC error encountered")
    assert _climb(broken) == [(Severity.SEV1, "")]
