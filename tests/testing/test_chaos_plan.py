"""The plan as text, as values and in words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.testing.chaos_plan import (
    PHASED,
    UNDRAWABLE,
    UNTIMED,
    ChaosFault,
    ChaosKind,
    ChaosPhase,
    ChaosPlan,
    How,
    RandomFaults,
)
from unicron_elastic.testing.explain_chaos import explain
from unicron_elastic.testing.parse_chaos import parse


def test_a_plan_of_everything() -> None:
    plan = parse(
        "kill:rank=1,step=50; hang : rank = 0 , step=20, phase=backward ;"
        "slow:rank=2,step=100,factor=3,steps=50,how=cpu;"
        "exception:rank=all,restart=any,text=CUDA error: gone%2C really;mtbf=30,seed=7,kinds=kill|hang;"
    )
    assert plan == ChaosPlan(
        (
            ChaosFault(kind=ChaosKind.KILL, rank=1, step=50),
            ChaosFault(kind=ChaosKind.HANG, rank=0, step=20, phase=ChaosPhase.BACKWARD),
            ChaosFault(kind=ChaosKind.SLOW, rank=2, step=100, factor=3.0, steps=50, how=How.CPU),
            ChaosFault(kind=ChaosKind.EXCEPTION, rank=None, restart=None, text="CUDA error: gone, really"),
        ),
        (RandomFaults(mtbf=30.0, seed=7, kinds=(ChaosKind.KILL, ChaosKind.HANG)),),
    )


@pytest.mark.parametrize("kind", [kind.value for kind in ChaosKind if kind is not ChaosKind.DISK])
def test_a_kind_needs_nothing_but_a_rank(kind: str) -> None:
    assert parse(f"{kind}:rank=0").faults == (ChaosFault(kind=ChaosKind(kind), rank=0),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the plan is empty; kill:rank=1,step=50 would be one"),
        (" ; ", "the plan is empty; kill:rank=1,step=50 would be one"),
        (
            "kil:rank=1",
            "in 'kil:rank=1': 'kil' is no fault; there are kill, segv, abort, exit, exception, hang, hang-gil, sleep",
        ),
        ("kill", "in 'kill': it needs rank=NUMBER, or rank=all"),
        ("kill:rank", "in 'kill:rank': 'rank' has no value; settings are written NAME=VALUE and separated by commas"),
        ("kill:rank=1,rank=2", "in 'kill:rank=1,rank=2': rank is given twice"),
        ("kill:rank=-1", "in 'kill:rank=-1': rank='-1' is not possible; it takes a whole number from 0 on, or all"),
        ("kill:rank=0,step=0", "in 'kill:rank=0,step=0': step='0' is not possible; it takes a whole number from 1 on"),
        (
            "kill:rank=0;hang:rank=0,phase=forwards",
            "it takes forward, backward, before-reduce, during-reduce, after-reduce or optimizer",
        ),
        (
            "kill:rank=0,code=3",
            "in 'kill:rank=0,code=3': kill has no setting 'code'; it has rank, step, phase, nth, after, restart",
        ),
        (
            "slow:rank=0,phase=forward",
            "slow has no setting 'phase'; it has rank, step, after, restart, factor, how, steps",
        ),
        (
            "exit:rank=0,code=256",
            "in 'exit:rank=0,code=256': code='256' is not possible; it takes a whole number from 0 to 255",
        ),
        (
            "slow:rank=0,factor=1",
            "in 'slow:rank=0,factor=1': factor='1' is not possible; it takes a number above 1",
        ),
        (
            "slow:rank=0,how=well",
            "in 'slow:rank=0,how=well': how='well' is not possible; it takes sleep or cpu",
        ),
        (
            "sleep:rank=0,seconds=nan",
            "seconds='nan' is not possible; it takes a number of seconds above 0, or inf",
        ),
        (
            "kill:rank=0,after=inf",
            "in 'kill:rank=0,after=inf': after='inf' is not possible; it takes a number of seconds above 0",
        ),
        (
            "kill:rank=0,step=2,after=3",
            "after and step exclude each other; a fault has a time, or a place in a step",
        ),
        ("disk:rank=0", "in 'disk:rank=0': it needs folder=FOLDER, the folder to fill"),
        ("exception:rank=0,text=", "in 'exception:rank=0,text=': text='' is not possible; it takes a text without NUL"),
        (
            "kill:rank=0,restart=last",
            "in 'kill:rank=0,restart=last': restart='last' is not possible; it takes a whole number from 0 on, or any",
        ),
        ("seed=7", "in 'seed=7': it needs mtbf=SECONDS, the mean time between two faults of the job"),
        ("random:mtbf=0", "in 'random:mtbf=0': mtbf='0' is not possible; it takes a number of seconds above 0"),
        (
            "mtbf=3,kinds=kill|disk",
            "hang, hang-gil, sleep, skip, slow or leak, several of them separated by |",
        ),
        ("mtbf=3,rank=1", "in 'mtbf=3,rank=1': random has no setting 'rank'; it has mtbf, seed, kinds, restart"),
        ("kill:rank=" + "1" * 19, "is not possible; it takes a whole number from 0 on, or all"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


_NUMBERS = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
_OR_INF = st.floats(min_value=0, exclude_min=True, allow_nan=False)
_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
_COUNTS = st.integers(min_value=1, max_value=10**17)
_NAUGHTS = st.integers(min_value=0, max_value=10**17)


@st.composite
def faults(draw: Any) -> ChaosFault:
    kind = draw(st.sampled_from(ChaosKind))
    values: dict[str, Any] = {"rank": draw(st.none() | _NAUGHTS), "restart": draw(st.none() | _NAUGHTS)}
    if kind not in UNTIMED and draw(st.booleans()):
        values["after"] = draw(_NUMBERS)
    else:
        values["step"] = draw(_COUNTS)
        if kind in PHASED:
            values |= {"phase": draw(st.sampled_from(ChaosPhase)), "nth": draw(_COUNTS)}
    own: dict[ChaosKind, dict[str, Any]] = {
        ChaosKind.EXIT: {"code": st.integers(0, 255)},
        ChaosKind.EXCEPTION: {"text": _TEXTS},
        ChaosKind.SLEEP: {"seconds": _OR_INF},
        ChaosKind.HANG_GIL: {"seconds": _OR_INF},
        ChaosKind.SLOW: {
            "factor": st.floats(min_value=1, exclude_min=True, allow_infinity=False),
            "how": st.sampled_from(How),
            "steps": st.none() | _COUNTS,
        },
        ChaosKind.LEAK: {"mb_per_step": _NUMBERS, "limit_mb": _OR_INF},
        ChaosKind.DISK: {"folder": _TEXTS, "limit_mb": _OR_INF},
        ChaosKind.XID: {"xid": _COUNTS},
    }
    return ChaosFault(kind=kind, **values, **{name: draw(strategy) for name, strategy in own.get(kind, {}).items()})


_DRAWABLE = sorted(frozenset(ChaosKind) - UNDRAWABLE, key=lambda kind: kind.value)
_RANDOMS = st.builds(
    RandomFaults,
    mtbf=_NUMBERS,
    seed=_NAUGHTS,
    kinds=st.lists(st.sampled_from(_DRAWABLE), min_size=1).map(tuple),
    restart=st.none() | _NAUGHTS,
)
_PLANS = st.builds(ChaosPlan, st.lists(faults()).map(tuple), st.lists(_RANDOMS).map(tuple)).filter(str)


@given(_PLANS)
def test_a_plan_survives_being_written_and_read(plan: ChaosPlan) -> None:
    assert parse(str(plan)) == plan


@given(_PLANS)
def test_every_plan_can_be_explained(plan: ChaosPlan) -> None:
    sentences = explain(plan)
    assert len(sentences) == len(plan.faults) + len(plan.random)
    assert all(sentence.endswith(".") and sentence[0].isupper() for sentence in sentences)


@given(st.text())
def test_any_text_is_a_plan_or_one_clear_error(text: str) -> None:
    try:
        plan = parse(text)
    except ValueError:
        return
    assert parse(str(plan)) == plan


def test_who_is_struck_in_which_generation() -> None:
    plan = parse("kill:rank=1;hang:rank=all,restart=any;exit:rank=0,restart=2")
    kinds = {
        (rank, restart): [fault.kind.value for fault in plan.faults_of(rank, restart)]
        for rank in (0, 1)
        for restart in (0, 2)
    }
    assert kinds == {(0, 0): ["hang"], (1, 0): ["kill", "hang"], (0, 2): ["hang", "exit"], (1, 2): ["hang"]}


def test_ranks_that_a_job_lacks() -> None:
    plan = parse("kill:rank=1;kill:rank=7;hang:rank=all;exit:rank=4;exit:rank=4")
    assert plan.missing_ranks(4) == [4, 7]
    assert plan.missing_ranks(8) == []
