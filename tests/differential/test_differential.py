"""Plain torch beside ``unicron_elastic.Run``: once each way in which the two have differed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from differential.case import Case
from differential.churn import CHURNS
from differential.draw import draw
from differential.known import known_faults
from differential.launch import MARK as MARK_OF_TRIALS
from differential.launch import Launched, Log
from differential.reference import Came, alone, plain, restored
from differential.trace import departures
from differential.trial import Trials
from differential.verdict import apart, is_of_one_run, judge, tolerance
from warm_launcher import MARK, WarmLaunchers


def killed(place: str, step: int, phase: str = "forward") -> dict[str, Any]:
    return {"kind": "kill", "place": place, "step": step, "phase": phase}


JOINS_LATE = {
    "nodes": 1,
    "ranks": 1,
    "steps": 10,
    "gate": "begun",
    "faults": [{"kind": "node-join", "place": "b", "step": 5}],
}
STALE = {
    "loop": "number-early",
    "gate": "",
    "between_s": 0.03,
    "steps": 40,
    "join_patience_s": 0.05,
    "load_s": 0.3,
    "ranks": 3,
    "micro_batches": 6,
    "faults": [killed("a1", 3), killed("a2", 4, "joining")],
}
pytestmark = pytest.mark.timeout(300)  # a job that hangs is ended before, and the test says so


@pytest.fixture(scope="module")
def trials(warm_launchers: WarmLaunchers) -> Iterator[Trials]:
    """Their agents are forks of a process with torch, and so are the workers of these."""

    def begin(words: Any, env: Any, folder: Path, streams: Any) -> Any:
        with open(os.devnull, "rb") as null:
            marked = {**env, MARK: env[MARK_OF_TRIALS]}
            return warm_launchers.start(words, marked, folder, [null, *streams], forks_keeper=True)

    with Trials(begin=begin) as begun:
        yield begun


def case(name: str, **values: Any) -> Any:
    return pytest.param(values, id=name)


@pytest.mark.parametrize(
    "values",
    [
        case("layers", blocks=["batchnorm", "groupnorm", "layernorm", "instancenorm", "shared-norm", "weightnorm"]),
        case("types", blocks=["bf16", "fp32", "odd", "tied"], optimizer="master", scheduler="step", ema=True),
        case("overflow", blocks=["sometimes", "unused", "dropout"], optimizer="adamw", scaler="overflow"),
        case("freeze", hows=["freeze"]),
        case("unfreeze", hows=["unfreeze"]),
        case("buffers", blocks=["counter", "moving", "spectral"]),
        case("cumulative", blocks=["batchnorm-cumulative", "sometimes"]),
        case("evaluates-at-the-top", evaluate="top", follows="plateau", scheduler="plateau", odd_state=True),
        case("swaps", evaluate="end", follows="swap", ema=True, shadow=True, perturb=True),
    ],
)
@pytest.mark.parametrize("reproducible", [False, True])
def test_alone_it_is_as_plain_torch(values: dict[str, Any], reproducible: bool, tmp_path: Path) -> None:
    tried = Case.of({**values, "reproducible": reproducible})
    expected, found = plain(tried, tmp_path), alone(tried, tmp_path)
    assert (expected.error, found.error) == ("", "")
    assert apart(found.final, expected.final, tolerance(tried)) == ""


@pytest.mark.parametrize("how", CHURNS)
def test_statistics_are_those_of_the_layers_that_are_there(how: str, tmp_path: Path) -> None:
    tried = Case.of({"churn": how, "blocks": ["batchnorm"]})
    expected, found = plain(tried, tmp_path), alone(tried, tmp_path)
    assert (expected.error, found.error) == ("", "")
    assert apart(found.final, expected.final, tolerance(tried)) == ""


@pytest.mark.parametrize("loop", ["caught-and-left", "caught-backward", "caught-forward", "zero-grad-inside"])
def test_what_a_script_caught_costs_no_share_without_a_word(loop: str, tmp_path: Path) -> None:
    tried = Case.of({"loop": loop, "reproducible": False})
    expected, found = plain(tried, tmp_path), alone(tried, tmp_path)
    if found.error:
        assert found.is_ours, found.error
    else:
        assert apart(found.final, expected.final, tolerance(tried)) == ""


def test_what_is_saved_is_what_is_there(tmp_path: Path) -> None:
    tried = Case.of({"loop": "save", "blocks": ["batchnorm", "moving-replaced", "spectral"], "micro_batches": 1})
    tried_folder = tmp_path / "alone-folder"
    expected = plain(tried, tmp_path)
    assert alone(tried, tmp_path).error == ""
    found = restored(tried, tried_folder)
    assert found.error == ""
    assert apart(found.saved, expected.saved, tolerance(tried)) == ""


@pytest.mark.parametrize(
    "values",
    [
        case("unfreeze", hows=["unfreeze"]),
        case("newcomer", blocks=["bf16", "constant-hidden"], optimizer="master", faults=[killed("a1", 3)]),
        case("buffers", blocks=["counter", "spectral-old", "moving-hidden"], faults=[killed("a0", 3)]),
        case("mean", loop="evaluation", faults=[killed("a1", 4, "evaluation")]),
        case(
            "three-losses",
            steps=10,
            faults=[killed("a1", 2), killed("a1", 4), killed("a1", 6)],
        ),
        case("epochs", loop="epochs", steps=9, faults=[killed("a1", 5)]),
        case("number", **STALE),
        case("rate", evaluate="top", follows="rate", same_seed=True, faults=[killed("a1", 3, "evaluation")]),
    ],
)
def test_ranks_that_are_lost_change_nothing(values: dict[str, Any], trials: Trials) -> None:
    result = trials.result("", Case.of(values))
    assert result.problems == [], result.err[-20_000:]


@pytest.mark.parametrize(
    "values",
    [
        case(
            "stopped-agent",
            nodes=2,
            steps=40,
            pace_s=0.1,
            faults=[{"kind": "agent-stop", "place": "b", "step": 5}],
        ),
        case("joins-as-the-job-ends", **JOINS_LATE),
        case("joins-after-the-last-step", **JOINS_LATE, after_s=3.0),
        case(
            "join-beside-own-collectives",
            nodes=2,
            steps=30,
            pace_s=0.05,
            loop="own-collective",
            faults=[{"kind": "node-join", "place": "c", "step": 2}],
        ),
    ],
)
def test_nodes_that_come_and_go_change_nothing(values: dict[str, Any], trials: Trials) -> None:
    result = trials.result("", Case.of(values))
    assert result.problems == [], result.err[-20_000:]


def test_a_case_is_its_own_description() -> None:
    for number in range(50):
        drawn = draw(1, number)
        assert Case.from_json(drawn.to_json()) == drawn == draw(1, number)


def test_known_faults_are_cases() -> None:
    assert all(Case.from_json(each) for each in known_faults())


def test_the_verdict_names_the_first_step_at_which_a_rank_departs_and_in_what() -> None:
    def span(step: int, rate: float, model: str) -> dict[str, Any]:
        return {"what": "span", "step": step, "rates": [rate], "digests": {"parameter": model, "scheduler": "s"}}

    end = {"what": "end"}
    one = Log("a0", 1, [span(3, 0.1, "x"), span(4, 0.1, "y"), end])
    other = Log("a1", 2, [span(3, 0.1, "x"), span(4, 0.2, "z"), span(5, 0.2, "z"), end])
    expected = Came(rates={3: [0.1], 4: [0.1], 5: [0.1]})
    found = departures(Case(), Launched(logs=[one, other]), expected, None, is_one_run=True)
    assert list(found) == [
        "departs: a1 at step 4 in learning rates: [0.2] and not [0.1]",
        "departs: a1 at step 4 from a0 in parameter",
    ]


def test_ranks_of_two_runs_one_after_the_other_are_not_compared_bit_for_bit() -> None:
    ends = [Log(place, number, [{"what": "end"}]) for number, place in enumerate(["a0", "a1", "a0"])]
    assert is_of_one_run(Launched(logs=ends[:2]))
    assert not is_of_one_run(Launched(logs=ends))


@pytest.mark.parametrize(
    ("types", "found"),
    [
        (["WrongUseError", "NoStateLeft"], []),
        (["NoStateLeft"], ["refused: with NoStateLeft"]),
        (["RuntimeError", "KeyError"], ["refused: with KeyError"]),
    ],
    ids=["a-newcomer-lost-all-others", "nobody-says-why", "another-kind"],
)
def test_a_refusal_has_a_sentence_of_who_is_refused(types: list[str], found: list[str]) -> None:
    raised = [{"what": "raised", "type": each, "text": "why", "ours": True} for each in types]
    logs = [Log(f"a{number}", number, [line]) for number, line in enumerate(raised)]
    launched = Launched(codes={"a": [1]}, logs=logs)
    assert judge(Case(loop="caught-and-left"), launched, Came(), None, None) == found
