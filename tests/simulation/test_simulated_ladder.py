"""The live system's recovery machine answers simulated faults: by severity, in place, and higher when that fails."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_cluster import DAY_S, cluster, fault, linear, ran

from unicron_elastic.faults import Severity, Status
from unicron_elastic.recovery.state import Phase
from unicron_elastic.simulation.history.events import KINDS
from unicron_elastic.simulation.live.faults import Strike
from unicron_elastic.simulation.live.recovery import OTHERS, RESTARTS_UNTIL_DRAINED, Ladder
from unicron_elastic.simulation.live.shows import Shows, shows
from unicron_elastic.simulation.model.accounting import Books, IncidentEntry
from unicron_elastic.simulation.model.durations import DURATIONS, STATE_BYTES
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.scenario import Scenario
from unicron_elastic.simulation.model.shape import STEP_S, shape_of
from unicron_elastic.simulation.model.study_result import SimulatedIncident
from unicron_elastic.simulation.model.training import Training

REGROUP_S = DURATIONS.regroup_s(32.0)
PROCESS_S = DURATIONS.process.value
FETCH_S = DURATIONS.fetch_s(7e9, 1)
PAIR = cluster(4, linear("a", 4))


def only(scenario: Scenario, kind: Status, **options: object) -> SimulatedIncident:
    """The incident that one fault leads to, under Unicron."""
    (found,) = ran(scenario, "unicron", fault(kind, **options)).incidents  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_is_answered_at_its_severity_by_the_machines_own_words(kind: Status) -> None:
    found = only(PAIR, kind, repair_s=3600.0)
    assert found.severity == KINDS[kind].severity
    assert found.reason.endswith(".")
    words = {
        Severity.SEV3: "All ranks connect anew (attempt 1 of 3).",
        Severity.SEV2: "ranks go on from the failed step.",
        Severity.SEV1: "ranks go on from the failed step." if shows(kind) is Shows.SILENCE else "This node leaves",
    }
    assert words[KINDS[kind].severity] in found.reason


def test_to_connect_anew_costs_the_notice_and_the_meeting() -> None:
    found = only(PAIR, Status.CONNECTION_REFUSED_OR_RESET)
    assert found.detection_s == pytest.approx(DURATIONS.notices[KINDS[Status.KILLED_BY_SIGNAL].method].value + 0.5)
    assert found.transition_s == pytest.approx(REGROUP_S, abs=STEP_S * 0.05)
    assert found.sub_healthy_s == 0.0


def test_a_lost_process_is_replaced_while_the_others_go_on() -> None:
    found = only(PAIR, Status.KILLED_BY_SIGNAL)
    # The survivors meet, do the rest of the step, and meet once more when the newcomer has the state.
    assert 2 * REGROUP_S < found.transition_s < 2 * REGROUP_S + STEP_S
    assert found.sub_healthy_s == pytest.approx(PROCESS_S + FETCH_S, abs=2 * REGROUP_S)


def test_what_was_measured_on_a_cluster_is_taken_for_it() -> None:
    own = {"process_s": 0.5, "communicators_s": 0.25, "meets_s": 0.05, "peer_bytes_per_s": 98e9}
    found = only(replace(PAIR, durations=own), Status.KILLED_BY_SIGNAL)
    assert 2 * 0.3 < found.transition_s < 2 * 0.3 + STEP_S
    assert found.sub_healthy_s <= 0.5 + 1.0


def test_a_node_may_take_longer_to_come_than_a_worker_to_be_replaced() -> None:
    def well_again_s(kind: Status, **own: float) -> float:
        scenario = replace(PAIR, durations={"process_s": 1.0, **own})
        return ran(scenario, "unicron", fault(kind, repair_s=3600.0)).curve[-1].at_s

    lost, killed = Status.LOST_CONNECTION, Status.KILLED_BY_SIGNAL
    assert well_again_s(lost, node_s=8.0) - well_again_s(lost) == pytest.approx(7.0)
    assert well_again_s(killed, node_s=8.0) == well_again_s(killed)


def test_a_hang_is_waited_for_as_long_as_the_live_policy_says() -> None:
    found = only(PAIR, Status.TASK_HANG)
    assert found.detection_s == pytest.approx(3.1 * STEP_S + 300.0)  # 30 s of patience, ten times that for data


def test_what_connecting_anew_does_not_cure_climbs_to_a_restart() -> None:
    worse = replace(PAIR, reattempt_fails=1.0)
    found = only(worse, Status.LINK_FLAPPING)
    assert found.severity == Severity.SEV2
    assert found.transition_s > 3 * REGROUP_S + 3 * 3.1 * STEP_S  # three attempts, each of which fails as the first did


def test_what_restarts_do_not_cure_climbs_to_isolation() -> None:
    worse = replace(PAIR, restart_fails=1.0)
    found = only(worse, Status.CUDA_ERROR)
    assert found.severity == Severity.SEV1
    assert "Worker" in found.reason
    assert "has failed 3 times within 60 min. This node leaves the job." in found.reason


def test_a_scripts_own_error_is_not_cured_by_another_node() -> None:
    worse = replace(PAIR, restart_fails=1.0)
    assert only(worse, Status.OTHER_SOFTWARE_ERROR).severity == Severity.SEV2


def test_a_broken_node_that_its_job_needs_restarts_until_it_is_drained() -> None:
    alone = cluster(1, linear("a", 1))
    found = only(alone, Status.ECC_ERROR, repair_s=3600.0)
    assert found.severity == Severity.SEV1
    assert "The node stays: it is the only node of the job." in found.reason
    assert found.transition_s > RESTARTS_UNTIL_DRAINED * PROCESS_S
    assert ran(alone, "unicron", fault(Status.ECC_ERROR, repair_s=3600.0)).curve[-1].waf_flops == 1e12


def test_without_partial_results_the_step_in_progress_is_lost() -> None:
    with_them, without = (ran(PAIR, name, fault(Status.KILLED_BY_SIGNAL)) for name in ("unicron", "no-partial"))
    assert without.lost_waf.transition > with_them.lost_waf.transition
    assert without.lost_waf.transition - with_them.lost_waf.transition <= STEP_S * 4e12


def test_without_nearest_state_all_goes_back_to_the_checkpoint() -> None:
    at_s = 1800.0 + 600.0
    (found,) = ran(PAIR, "no-nearest", fault(Status.KILLED_BY_SIGNAL, at_s=at_s)).incidents
    loaded_s = 7e9 * STATE_BYTES / DURATIONS.storage_bytes_per_s.value
    assert found.transition_s == pytest.approx(REGROUP_S + loaded_s + 600.0, rel=0.01)


def test_without_detection_the_time_out_is_waited_for() -> None:
    (found,) = ran(PAIR, "no-detection", fault(Status.ECC_ERROR, repair_s=DAY_S)).incidents
    assert found.detection_s == pytest.approx(1800.0)


def test_a_lost_node_is_noticed_by_a_survivor_who_decides() -> None:
    found = only(PAIR, Status.LOST_CONNECTION, node=2, repair_s=7200.0)
    assert found.detection_s == pytest.approx(DURATIONS.notices[KINDS[Status.LOST_CONNECTION].method].value)
    assert found.reason.startswith("node 2 is gone.")
    assert found.sub_healthy_s == pytest.approx(7200.0, abs=120.0)  # it has to join as well


class Lonely:
    """A job of two nodes that can spare one."""

    def __init__(self) -> None:
        self.isolated: list[Strike] = []

    def why_stay(self) -> str:
        return ""

    def isolate(self, strike: Strike) -> None:
        self.isolated.append(strike)


def ladder() -> tuple[SimulationEngine, Training, Ladder, Lonely]:
    engine, around = SimulationEngine(), Lonely()
    training = Training("a", 1.0, shape_of(linear("a", 2), 2, uneven=True), Books(), engine)
    training.resize(2)
    return engine, training, Ladder(engine, DURATIONS, training, around, host="n0", others=(OTHERS,)), around


def struck(kind: Status, local_rank: int = 0) -> Strike:
    entry = IncidentEntry(at_s=0.0, node=0, kind=kind, job="a", severity=KINDS[kind].severity)
    return Strike(
        status=kind,
        entry=entry,
        cure=KINDS[kind].severity,
        local_rank=local_rank,
        step_part=0.5,
        status_severity=KINDS[kind].severity,
    )


def test_a_second_fault_during_the_first_ends_with_everybody_at_work() -> None:
    for kind in KINDS:
        for second in KINDS:
            if Severity.SEV1 in (KINDS[kind].severity, KINDS[second].severity):
                continue
            engine, training, node, _ = ladder()
            node.strike(struck(kind))
            engine.run(5.0)
            node.strike(struck(second, local_rank=1))
            engine.run(2000.0)
            assert not training.stands, (kind, second)
            assert training.lost_part() == 0.0, (kind, second)
            assert node.state.phase is Phase.RUNNING
            node.state.validate()


def test_a_node_that_is_given_away_leaves_nothing_behind() -> None:
    engine, training, node, _ = ladder()
    node.strike(struck(Status.KILLED_BY_SIGNAL))
    engine.run(20.0)
    assert training.lost_part() > 0.0
    node.abandon()
    assert not training.stands
    assert training.lost_part() == 0.0
    engine.run(1000.0)
    assert training.lost_part() == 0.0


def test_a_broken_node_is_isolated_once() -> None:
    engine, training, node, around = ladder()
    node.strike(struck(Status.NVLINK_ERROR))
    engine.run(100.0)
    assert [strike.status for strike in around.isolated] == [Status.NVLINK_ERROR]
    assert node.is_over
    assert not training.stands
