"""A newcomer that lacks a hook, a function or a class which the others have put into a module on the way is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unicron_elastic.training.replicas import Replicas
from unicron_elastic.training.step.code_of import code_of
from unicron_elastic.training.step.comparison import ComparisonVerdict, Told, judge
from unicron_elastic.training.step.guard import Guard

pytestmark = pytest.mark.usefixtures("no_launcher")


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2))


def _hook(*_: Any) -> None:
    """Stand for a hook of a script's."""


def _double(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x) * 2


def _replace_forward(model: nn.Sequential) -> None:
    model[0].forward = partial(_double, model[0].forward)


def _multiply_in(precision: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]


def _replace_layer(model: nn.Sequential) -> None:
    model[1] = nn.AlphaDropout(0.2)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "model.0.hooks": lambda model: model[0].register_forward_hook(_hook),
    "model.1.hooks": lambda model: model[1].register_forward_pre_hook(_hook),
    "model.hooks": lambda model: model.register_full_backward_hook(_hook),
    "model.0.weight.hooks": lambda model: model[0].weight.register_hook(_hook),
    "model.0.bias.hooks": lambda model: model[0].bias.register_post_accumulate_grad_hook(_hook),
    "model.0.forward": _replace_forward,
    "model.1.class": _replace_layer,
    "torch.get_default_dtype()": lambda _: torch.set_default_dtype(torch.float64),
    "torch.backends.mkldnn.matmul.fp32_precision": lambda _: _multiply_in("bf16"),
    "torch.are_deterministic_algorithms_enabled()": lambda _: torch.use_deterministic_algorithms(mode=True),
}


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    yield
    _reset()


def _reset() -> None:
    torch.set_default_dtype(torch.float32)
    _multiply_in("none")
    torch.use_deterministic_algorithms(mode=False)


def _told(
    *, first: Callable[[nn.Sequential], object] = str, later: Callable[[nn.Sequential], object] = str, is_copy: bool
) -> Told:
    """Of a rank whose script has done something before its first step, and something behind it."""
    model = _model()
    for parameter in model.parameters():
        parameter.data.zero_()
    replicas = Replicas(model, {"model": model}, 10)
    first(model)
    replicas.begin_training()
    later(model)
    if is_copy:
        replicas.copy()
    told = Told.parse(replicas.told().to_json())
    _reset()  # one process stands for all
    return told


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_copy_that_lacks_it_is_wrong_and_one_that_has_it_is_right(name: str, ranks: int) -> None:
    others = [_told(later=CHANGES[name], is_copy=False) for _ in range(ranks)]
    verdict = judge([*others, _told(is_copy=True)], 9)
    assert verdict.wrong == {ranks}
    assert verdict.sentence == f"after 9 steps rank {ranks} differs from the others in {name}"
    assert verdict.is_unsent
    assert judge([*others, _told(first=CHANGES[name], is_copy=True)], 9) == ComparisonVerdict()
    assert judge([*others, _told(later=CHANGES[name], is_copy=True)], 9) == ComparisonVerdict()


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_rank_has_of_its_own_from_the_beginning_is_its_own(name: str, *, is_copy: bool) -> None:
    own, other = _told(first=CHANGES[name], is_copy=False), _told(is_copy=is_copy)
    verdict = judge([own, other], 9)
    assert (verdict.wrong, verdict.left_out, verdict.sentence) == (set(), {name}, "")


def test_what_some_of_those_who_were_there_have_changed_is_their_own() -> None:
    some = [_told(later=CHANGES["model.0.hooks"], is_copy=False), _told(is_copy=False)]
    verdict = judge([*some, _told(is_copy=True)], 9)
    assert (verdict.wrong, verdict.left_out, verdict.sentence) == (set(), {"model.0.hooks"}, "")


def test_a_model_of_which_nobody_can_see_what_runs_trains_on_and_is_compared_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Closed(nn.Linear):
        """A `Closed` shows nobody its hooks."""

        @property
        def _forward_hooks(self) -> Any:
            raise ValueError("not yours")

        @_forward_hooks.setter
        def _forward_hooks(self, _hooks: Any) -> None:
            pass

    model = Closed(1, 1)
    replicas = Replicas(model, {"model": model}, 10)
    replicas.begin_training()
    replicas.begin_training()
    assert capsys.readouterr().err.count("cannot compare: ValueError: not yours") == 1
    assert replicas.digest() is not None  # until the others have heard of it
    replicas.accept(ComparisonVerdict(is_last=True), is_silent=True)
    replicas.begin(10, is_last=False)
    assert replicas.digest() is None
    assert capsys.readouterr().err == ""


def test_what_this_package_hangs_on_is_not_named() -> None:
    model = _model()
    before = dict(code_of("model.", model[0]))
    guard = Guard()
    model[0].weight.register_post_accumulate_grad_hook(guard._not_reduced.append)
    model[0].register_forward_hook(guard.look)
    assert dict(code_of("model.", model[0])) == before
    assert before == {
        "model.class": "torch.nn.modules.linear.Linear",
        "model.forward": "",
        "model.hooks": "",
        "model.weight.hooks": "",
        "model.bias.hooks": "",
    }
