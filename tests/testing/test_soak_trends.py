"""What a soak is judged by: trends, incidents, losses, and a schedule that a seed says."""

from __future__ import annotations

import random
import sys
from itertools import islice
from pathlib import Path

import pytest

from unicron_elastic.base.incident import Incident

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))

from _soak_chaos import KINDS, Struck, draw
from _soak_incidents import open_incidents, outcomes, unexplained
from _soak_report import lasting_leases
from _soak_steps import Back, Made, compare, last_step, moments, parse_step, read_steps, went_back
from _soak_trends import BOUNDS, Bound, Series, climb, second_half, slopes, trend

MEMORY = BOUNDS["memory, MiB"]


def grown(minutes: int, per_hour: float, start: float = 100.0, at: float = 0.0, seed: int = 0) -> Series:
    """A sample each 15 s, with noise and outliers."""
    chance = random.Random(seed)
    times = [at + 15.0 * number for number in range(4 * minutes)]
    spikes = [50.0 if chance.random() < 0.1 else 0.0 for _ in times]
    values = [
        start + per_hour * (time - at) / 3600 + chance.gauss(0.0, 0.5) + spike
        for time, spike in zip(times, spikes, strict=True)
    ]
    return Series(tuple(times), tuple(values))


@pytest.mark.parametrize(("per_hour", "is_leak"), [(0.0, False), (2.0, False), (8.0, True), (-9.0, False)])
def test_a_leak_is_found_under_noise_and_outliers_do_not_make_one(per_hour: float, is_leak: bool) -> None:
    found = trend([grown(90, per_hour)], MEMORY)
    assert found.growth == pytest.approx(per_hour, abs=0.5)
    assert found.is_leak == is_leak


def test_processes_that_begin_anew_at_a_low_level_hide_no_leak_and_a_later_one_that_is_larger_is_none() -> None:
    assert trend([grown(12, 20.0, at=720.0 * number, seed=number) for number in range(6)], MEMORY).is_leak
    larger = [grown(12, 0.0, start=100.0 + 5 * number, at=720.0 * number, seed=number) for number in range(6)]
    assert not trend(larger, MEMORY).is_leak


def test_what_a_process_takes_while_it_starts_is_no_leak() -> None:
    times = tuple(15.0 * number for number in range(60))
    assert trend([Series(times, tuple(min(at, 100.0) for at in times))], MEMORY).growth == 0.0


def test_short_lives_say_nothing() -> None:
    found = trend([grown(3, 100.0)], MEMORY)
    assert (found.growth, found.is_leak, found.lives) == (None, False, 1)
    assert trend([], MEMORY).growth is None


def test_stairs_of_the_oldest_process_are_seen_beside_many_that_live_for_a_short_time() -> None:
    times = tuple(15.0 * number for number in range(480))
    oldest = Series(times, tuple(58.0 + 10 * (at // 1800) for at in times))
    young = [Series(times[start : start + 60], (58.0,) * 60) for start in range(0, 400, 10)]
    bound = BOUNDS["descriptors"]
    assert not trend([oldest, *young], bound).is_leak
    assert climb([oldest, *young]) == pytest.approx(20.0, abs=5.0)
    assert climb([Series(times, (58.0,) * 480), *young]) == 0.0
    assert climb(young) is None


def test_slopes_are_per_hour_and_of_pairs() -> None:
    assert slopes(Series((0.0, 3600.0, 3600.0), (1.0, 3.0, 4.0))) == [2.0, 3.0]
    assert second_half(Series((0.0, 10.0, 20.0), (1.0, 2.0, 3.0))) == Series((10.0, 20.0), (2.0, 3.0))
    assert Bound(4.0, 0.1, "").of(100.0) == 10.0


def test_what_is_said_of_lost_nodes_for_ten_minutes_is_no_growth_of_leases() -> None:
    counted = {"leases_granted": 30.0, "leases_expired": 3.0, "leases_revoked": 5.0}
    assert lasting_leases({"etcd": {**counted, "keys": {"nodes/N": 8, "jobs/N/lost/N": 6}}}) == 16
    assert lasting_leases({"etcd": {"leases_granted": 4.0, "keys": {}}}) == 4


def test_the_same_seed_breaks_the_same_things() -> None:
    first, again, other = (list(islice(draw(seed, 35.0), 2000)) for seed in (1, 1, 2))
    assert first == again != other
    assert {each.kind for each in first} == set(KINDS)
    assert sum(each.after_s for each in first) / len(first) == pytest.approx(35.0, rel=0.1)


def incident(number: int, noticed_at: float | None, **more: object) -> Incident:
    fixed = {"job": "train.py", "time": "", "generation": 1, "rank": 0, "severity": 2, "method": "", "reason": ""}
    told = {"run_id": "chat", "host": "a", "status": "killed by signal", "action": "go on", "decision": "", **fixed}
    return Incident(number=number, noticed_at=noticed_at, restarts_used=0, max_restarts=9, **{**told, **more})  # type: ignore[arg-type]


def test_a_fault_is_told_of_by_the_incidents_of_its_job_until_the_next_one() -> None:
    struck = [
        Struck(1000.0, "kill", "a", "chat"),
        Struck(1020.0, "lose", "b", "chat"),
        Struck(1030.0, "kill", "c", "code"),
    ]
    known = [incident(1, 0.5), incident(2, 21.5, status="lost connection"), incident(3, 500.0)]
    made = {"chat": [999.0, 1000.0, 1004.0, 1005.0, 1019.0, 1020.0, 1021.0], "code": []}
    kill, lose, code = outcomes(struck, known, made, monotonic_at=1000.0, end=1100.0)
    assert (kill.noticed_s, kill.stood_s, kill.statuses) == (0.5, 14.0, ("killed by signal",))
    assert (lose.noticed_s, lose.stood_s, lose.statuses) == (1.5, 1.0, ("lost connection",))
    assert (code.noticed_s, code.stood_s, code.statuses) == (None, None, ())


def test_an_incident_stays_open_unless_a_step_or_the_next_or_the_end_of_its_host_closed_it() -> None:
    struck = [Struck(1100.0, "lose", "b", "chat"), Struck(1100.0, "kill", "a", "chat")]
    closed = [
        incident(1, 10.0, first_step_at=11.0),
        incident(2, 10.0, superseded_by=3),
        incident(4, 10.0, action="observe"),
        incident(9, 10.0, left="The node has left the job."),
    ]
    cut = incident(5, 99.0, host="b")
    left = [incident(6, 99.0), incident(7, 101.5, host="b")]
    too_late = incident(8, 400.0)
    assert open_incidents([*closed, cut, *left, too_late], struck, 1000.0, last_at=1300.0) == (left, 1)


def test_an_incident_without_a_fault_before_it_is_told() -> None:
    struck = [Struck(1000.0, "kill", "a", "chat"), Struck(1500.0, "lose", "b", "code")]
    explained = [incident(1, 20.0), incident(2, 30.0, run_id="code"), incident(3, 510.0)]
    known = [*explained, incident(4, 30.0, run_id="code", host="c"), incident(5, 400.0)]
    assert [each.number for each in unexplained(known, struck, 1000.0)] == [4, 5]


def test_every_step_is_compared_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "a-1.steps").write_text("10.0 0 0x1.8p+1 ab\n11.0 1 0x1.0p+0\n12.5 2 0x1.0p-1\n13.0 3 0x1.")
    (tmp_path / "b-2.steps").write_text("10.5 0 0x1.8p+1 ab\n10.9 1 0x1.1p+0\n")
    made = list(read_steps(tmp_path))
    right = [Made(0.0, 0, "0x1.8p+1", "ab"), Made(0.0, 1, "0x1.0p+0")]
    found = compare(made, right)
    assert (found.steps, found.lines, found.again, found.digests, found.unknown) == (3, 5, 2, 2, 1)
    assert found.different == (1,)
    assert moments(made) == [10.0, 10.5, 10.9, 11.0, 12.5]
    assert last_step(tmp_path) == 2


def test_a_job_that_goes_back_has_lost_work_and_ranks_that_are_a_step_apart_have_not() -> None:
    numbers = [0, 1, 1, 2, 3, 2, 4, 5, 6, 2, 3, 3, 4, 7, 0]
    made = [Made(float(at), step, "0x0p+0") for at, step in enumerate(numbers)]
    assert went_back(reversed(made)) == [Back(9.0, 7, 2), Back(14.0, 8, 0)]
    assert [each.steps for each in went_back(made)] == [5, 8]


@pytest.mark.parametrize("line", ["", "1.0 2\n", "1.0 2 0x1p+0", "1.0 x 0x1p+0\n", "1.0 2 0x1p+0 ab cd\n"])
def test_half_a_line_is_no_step(line: str) -> None:
    assert parse_step(line) is None
