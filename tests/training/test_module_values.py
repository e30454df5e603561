"""What decides how modules compute and is no tensor comes to newcomers, and ranks that differ in it hear of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from unicron_elastic import Run
from unicron_elastic.state.layout import Layout, flatten, rebuild
from unicron_elastic.training.replicas import Replicas
from unicron_elastic.training.step.comparison import ComparisonVerdict, judge
from unicron_elastic.training.step.module_values import decisive

pytestmark = pytest.mark.usefixtures("no_launcher")


class Own(nn.Module):
    """A layer of a script's own, with values of all plain types."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.rate, self.stage, self.is_on, self.label, self.window = 0.5, 1, False, None, (1, [2, 0.5])

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.rate, self.training)


LAYERS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (lambda: nn.Dropout(0.5), {"p": 0.0, "inplace": True}),
    (lambda: nn.AlphaDropout(0.5), {"p": 0.25}),
    (lambda: nn.BatchNorm1d(2), {"momentum": None, "eps": 0.5, "track_running_stats": False}),
    (lambda: nn.InstanceNorm1d(2, track_running_stats=True), {"momentum": 0.5, "track_running_stats": False}),
    (lambda: nn.LayerNorm(2), {"eps": 0.5}),
    (lambda: nn.GroupNorm(1, 2), {"eps": 0.5}),
    (nn.LeakyReLU, {"negative_slope": 0.5}),
    (lambda: nn.Conv2d(1, 1, 3), {"padding": (1, 1), "padding_mode": "circular", "stride": (2, 2)}),
    (lambda: nn.LSTM(2, 2, 2, dropout=0.5), {"dropout": 0.0}),
    (lambda: nn.MultiheadAttention(2, 1, dropout=0.5), {"dropout": 0.0}),
    (nn.GELU, {"approximate": "tanh"}),
    (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), {}),
    (Own, {"rate": 0.0, "stage": 2, "is_on": True, "label": "b", "window": (1, [2, 0.25]), "new": 1.5}),
]
OWN = len(LAYERS) - 1


def trees() -> st.SearchStrategy[Any]:
    """Trees of numbers of layers."""
    leaves = st.integers(0, len(LAYERS) - 1)
    return st.recursive(leaves, lambda part: st.lists(part, min_size=1, max_size=4), max_leaves=8)


def made(tree: Any) -> nn.Module:
    """The module of such a tree."""
    if isinstance(tree, int):
        return LAYERS[tree][0]()
    return nn.ModuleList(map(made, tree))


def leaves(tree: Any, path: str = "net") -> list[tuple[str, int]]:
    """The paths of its layers, with their numbers."""
    if isinstance(tree, int):
        return [(path, tree)]
    return [leaf for number, part in enumerate(tree) for leaf in leaves(part, f"{path}.{number}")]


def model_of(tree: Any) -> nn.Module:
    """The module of it, beside something that is trained."""
    torch.manual_seed(0)
    return nn.ModuleDict({"net": made(tree), "head": nn.Linear(1, 1)})


def given_away(run: Run, on_step: Callable[[int], None], steps: int = 3) -> Any:
    """What a newcomer gets in the last step."""
    state = None
    for step in run.steps(steps, 1):
        on_step(step.number)
        for _ in step:
            state = run._engine._registered.state_dict() if step.number == steps - 1 else None
            step.backward(run._model["head"](torch.ones(1, 1)).sum())
    dist.destroy_process_group()
    layout, tensors = flatten(state)
    return rebuild(Layout.parse(layout.to_json()), tensors)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_value_that_is_changed_on_the_way_comes_to_a_newcomer(data: st.DataObject) -> None:
    tree = data.draw(trees())
    changes = [(path, name, value) for path, number in leaves(tree) for name, value in LAYERS[number][1].items()]
    path, name, value = data.draw(st.sampled_from(changes or [("head", "in_features", 7)]))
    ours, theirs = model_of(tree), model_of(tree)
    step = data.draw(st.sampled_from([0, 1, 2]))

    def change(number: int) -> None:
        if number == step:
            setattr(ours.get_submodule(path), name, value)

    state = given_away(Run(model=ours), change)
    newcomer = Run(model=theirs)._engine._registered
    newcomer.load_state_dict(state)
    assert repr(getattr(theirs.get_submodule(path), name)) == repr(value)
    setattr(theirs.get_submodule(path), name, "as its script has it")
    newcomer.load_again()
    assert repr(getattr(theirs.get_submodule(path), name)) == repr(value)
    for (where, one), other in zip(ours.named_modules(), theirs.modules(), strict=True):
        assert repr(decisive(one, is_trained=True)) == repr(decisive(other, is_trained=True)), where


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_setting_of_torch_s_that_differs_is_found_and_named(data: st.DataObject) -> None:
    tree = data.draw(trees())
    of = [(path, each) for path, number in leaves(tree) for each in LAYERS[number][1].items() if number != OWN]
    path, (name, value) = data.draw(st.sampled_from(of or [("head", ("in_features", 7))]))
    ours, theirs = model_of(tree), model_of(tree)
    setattr(ours.get_submodule(path), name, value)
    sentence = f"after 1 step rank 0 differs from the others in model.{path}.{name}"
    assert found(ours, theirs).sentence in (
        sentence,
        f"{sentence} (and 1 more)",
    )  # the mode


def found(*models: nn.Module) -> ComparisonVerdict:
    """What is found of ranks that have these, and two that have the last one."""
    all_of = [Replicas(model, {"model": model}, 10) for model in (*models, models[-1], models[-1])]
    is_other = len({each.digest() for each in all_of}) > 1
    verdict = judge([each.told() for each in all_of], 1)
    assert is_other or not verdict.wrong
    return verdict


def test_a_rank_that_has_stayed_in_evaluation_is_found() -> None:
    ours, theirs = model_of([0, 2, OWN]), model_of([0, 2, OWN])
    ours.eval()
    verdict = found(ours, theirs)
    assert verdict.wrong == {0}
    assert verdict.sentence == ("after 1 step rank 0 differs from the others in model.net.0.training (and 1 more)")


def test_a_mode_that_decides_nothing_may_differ() -> None:
    encoder = nn.TransformerEncoderLayer(2, 1, dropout=0.0)
    for layer in (nn.LayerNorm(2), nn.LeakyReLU(), nn.Dropout(0.0), nn.LSTM(2, 2, 2), encoder):
        ours, theirs = nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))
        ours.eval()
        assert found(ours, theirs) == ComparisonVerdict(), layer


def test_what_a_script_asks_the_mode_for_nobody_knows_so_a_line_says_that_it_differs() -> None:
    ours, theirs = model_of([OWN]), model_of([OWN])
    ours.eval()
    verdict = found(ours, theirs)
    assert verdict.wrong == frozenset()
    assert verdict.sentence == "ranks differ in model.net.0.training, which is not compared any more"


def test_what_each_rank_has_as_it_likes_is_neither_compared_nor_given() -> None:
    class Likes(Own):
        """A layer with what may differ: a rank, a device, a count, and caches of two lengths."""

        def __init__(self, rank: int) -> None:
            super().__init__()
            self.rank, self.device, self.calls, self.size, self.cached = rank, f"cuda:{rank}", 0, None, None
            self.pairs, self.table = 0, None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.size != len(x):
                self.size, self.cached = len(x), torch.zeros(len(x))
            return x

        def pair(self) -> None:
            """Makes a table as it is first needed."""
            self.pairs, self.table = 9, object()

    class Net(nn.ModuleDict):
        """Calls the layer in each step."""

    ours, theirs = (Net({"own": Likes(rank), "late": Likes(0), "head": nn.Linear(1, 1)}) for rank in (0, 1))
    own = ours["own"]

    def call(*_: Any) -> None:
        own(torch.zeros(3))

    ours["head"].register_forward_hook(call)

    def change(number: int) -> None:
        if number == 1:
            own.rank, own.device = 2, "cuda:2"
            own(torch.zeros(7))
            own.rate = 0.0
            ours["head"].norm = 0.25
            ours["late"].pair()

    state = given_away(Run(model=ours), change)
    before = {**vars(theirs["own"])}
    Run(model=theirs)._engine._registered.load_state_dict(state)
    assert {name: each for name, each in vars(theirs["own"]).items() if before[name] is not each} == {"rate": 0.0}
    assert (theirs["late"].pairs, theirs["late"].table) == (0, None)
    theirs["head"].norm = 0.5
    with torch.no_grad():
        theirs.load_state_dict(ours.state_dict())
    assert found(ours, theirs) == ComparisonVerdict(left_out=frozenset({"model.head.hooks"}))


class Cached(nn.Module):
    """A layer that keeps a table of the length of its input, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.calls, self.size, self.table = 0.5, 0, 0, dict[int, Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.size != len(x):
            self.size, self.table = len(x), dict.fromkeys(range(len(x)))
        return x


class Caching(nn.ModuleDict):
    """Its head calls the layer beside it."""

    def __init__(self) -> None:
        super().__init__({"own": Cached(), "head": nn.Linear(1, 1)})
        self["head"].register_forward_hook(self._call)

    def _call(self, *_: Any) -> None:
        self["own"](torch.zeros(3))


@pytest.mark.parametrize(("is_evaluated", "rate"), [(False, 0.0), (True, 0.5)])
def test_values_that_tell_of_an_object_which_an_evaluation_replaced_are_not_given(
    is_evaluated: bool, rate: float
) -> None:
    ours, theirs = Caching(), Caching()

    def change(number: int) -> None:
        if number == 0 and is_evaluated:
            ours["own"](torch.zeros(3))
        if number == 0:
            ours["own"].rate = 0.0

    state = given_away(Run(model=ours), change)
    Run(model=theirs)._engine._registered.load_state_dict(state)
    own = theirs["own"]
    assert (own.rate, own.calls, own.size, len(own.table)) == (rate, 0, 0, 0)


def test_a_newcomer_gives_what_it_was_given() -> None:
    first, second, third = (model_of([OWN]) for _ in range(3))
    state = given_away(Run(model=first), lambda number: setattr(first["net"][0], "stage", 1 + (number > 0)))
    run = Run(model=second)
    run._engine._registered.load_state_dict(state)
    second_state = given_away(run, lambda _: None, steps=6)
    Run(model=third)._engine._registered.load_state_dict(second_state)
    assert (second["net"][0].stage, third["net"][0].stage) == (2, 2)


class Counted(nn.Linear):
    """Its forward pass moves what it gives besides tensors."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def test_extra_state_that_differs_is_told_of_and_may() -> None:
    ours, theirs = (nn.ModuleDict({"head": Counted()}) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    assert found(ours, theirs) == ComparisonVerdict()
    ours["head"].count = 3
    verdict = found(ours, theirs)
    assert (verdict.wrong, verdict.left_out) == (frozenset(), {"model.head.extra_state"})
    assert verdict.sentence == "ranks differ in model.head.extra_state, which is not compared any more"


def test_extra_state_that_a_forward_pass_moves_is_refused_where_it_has_to_be_the_same() -> None:
    def train(*, reproducible: bool) -> None:
        given_away(Run(model=nn.ModuleDict({"head": Counted()}), reproducible=reproducible), lambda _: None)

    train(reproducible=False)
    with pytest.raises(RuntimeError, match="a forward pass changes the extra state of head"):
        train(reproducible=True)


class Weighted(nn.Module):
    """`Weighted` keeps numbers that are no buffers, as scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.full((3,), 2.0)
        self.weights = numpy.ones(4, dtype=numpy.float32)
        self.mixed = [torch.zeros(2, dtype=torch.bfloat16), 1]
        self.phase = torch.zeros((), dtype=torch.complex64)
        self.cache: Any = None
        self.large = torch.zeros(2**16 + 1)


def _weighted() -> nn.Module:
    return nn.ModuleDict({"net": Weighted(), "head": nn.Linear(1, 1)})


def _taken(change: Callable[[Any], None], newcomer: nn.Module) -> Any:
    """Return what a newcomer has after it took what was changed in step 1."""
    torch.manual_seed(0)
    ours = _weighted()
    run = Run(model=ours)
    state = given_away(run, lambda step: change(ours["net"]) if step == 1 else None)
    other = Run(model=newcomer)
    other._engine._registered.load_state_dict(state)
    return newcomer["net"]


def _cool(net: Any) -> None:
    net.temperature = net.temperature * 0.5
    net.weights *= 3
    net.mixed = [torch.ones(2, dtype=torch.bfloat16), 2]
    net.phase.add_(1j)
    net.cache = torch.arange(4)


def test_small_tensors_and_arrays_that_a_script_changes_come_to_a_newcomer_in_place() -> None:
    newcomer = _weighted()
    known = newcomer["net"].temperature, newcomer["net"].weights
    net = _taken(_cool, newcomer)
    assert net.temperature is known[0]
    assert net.weights is known[1]
    assert net.temperature.tolist() == [1.0] * 3
    assert net.weights.tolist() == [3.0] * 4
    assert repr(net.mixed) == repr([torch.ones(2, dtype=torch.bfloat16), 2])
    assert net.phase.item() == 1j
    assert net.cache.tolist() == [0, 1, 2, 3]


def test_one_that_the_newcomer_s_script_has_otherwise_is_its_own() -> None:
    newcomer = _weighted()
    newcomer["net"].temperature = torch.full((3,), 7.0)
    assert _taken(_cool, newcomer).temperature.tolist() == [7.0] * 3


def test_a_tensor_of_a_graph_and_a_large_one_are_objects() -> None:
    def compute(net: Any) -> None:
        net.temperature = net.temperature * 0.5
        net.cache = torch.ones(2, requires_grad=True) * 2

    assert _taken(compute, _weighted()).temperature.tolist() == [2.0] * 3  # it may tell of what cannot be given
