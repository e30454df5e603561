"""Parameters that are frozen and unfrozen between steps are trained as plain torch trains them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unicron_elastic import Run
from unicron_elastic.base.world import Member, World
from unicron_elastic.compat.tensors import walked
from unicron_elastic.engine.protocol.said import Said
from unicron_elastic.training import engine
from unicron_elastic.training.group import arrival
from unicron_elastic.training.group.assembly import Assembly
from unicron_elastic.training.group.handover import Handover
from unicron_elastic.training.micro_batch_counts import MicroBatchCounts
from unicron_elastic.training.step.module_values import ModuleValues
from unicron_elastic.training.step.randomness import Randomness
from unicron_elastic.training.step.trainable import Trainable
from unicron_elastic.worker.instructions import Invitation

MICRO_BATCHES = 4
STEPS = 8

both = pytest.mark.parametrize("reproducible", [False, True])


pytestmark = pytest.mark.usefixtures("no_launcher")


class Net(nn.Module):
    """Layers of several types, with a head to which another may be added."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh())
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 1)
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(self.base(x).double()).float()
        result: Tensor = self.head(h)
        return result if self.adapter is None else result + self.adapter(h)


def _freeze_first(net: Net, step: int) -> None:
    if step == 0:
        net.base.requires_grad_(False)
    if step == 3:
        net.base.requires_grad_(True)


def _freeze_later(net: Net, step: int) -> None:
    if step == 2:
        net.base.requires_grad_(False)
        net.base.eval()
    if step == 5:
        net.head.bias.requires_grad_(False)


def _to_and_fro(net: Net, step: int) -> None:
    net.wide.requires_grad_(step % 2 == 0)
    net.base.requires_grad_(step % 3 == 0)


def _replace(net: Net, step: int) -> None:
    """The optimizer keeps the old one, whose gradient is none of the model's any more."""
    if step == 4:
        net.head.weight = nn.Parameter(net.head.weight.detach() * 2)


def _add(net: Net, step: int) -> None:
    if step == 4:
        net.adapter = nn.Linear(4, 1)
        nn.init.ones_(net.adapter.weight)
        nn.init.zeros_(net.adapter.bias)


def _optimizer(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)


def _loss(net: Net, step: int, index: int) -> Tensor:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + index))
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def _add_to(optimizer: torch.optim.Optimizer, net: Net) -> None:
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if new := [parameter for parameter in net.parameters() if id(parameter) not in known]:
        optimizer.add_param_group({"params": new})


def _trained_plainly(change: Callable[[Net, int], None]) -> Net:
    torch.manual_seed(0)
    net = Net()
    optimizer = _optimizer(net)
    for step in range(STEPS):
        change(net, step)
        _add_to(optimizer, net)
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            (_loss(net, step, index) / MICRO_BATCHES).backward()
        optimizer.step()
    return net


@both
@pytest.mark.parametrize("change", [_freeze_first, _freeze_later, _to_and_fro, _replace, _add])
def test_what_changes_between_steps_is_trained_as_by_plain_torch(
    reproducible: bool, change: Callable[[Net, int], None]
) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = _optimizer(net)
    run = Run(model=net, optimizer=optimizer, reproducible=reproducible, seed=None)
    for step in run.steps(STEPS, MICRO_BATCHES):
        change(net, step.number)
        _add_to(optimizer, net)
        for index in step:
            step.backward(_loss(net, step.number, index))
        optimizer.step()
    plain = _trained_plainly(change)
    for (name, ours), theirs in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name


@both
def test_who_is_frozen_has_no_gradient_and_no_memory_for_it(reproducible: bool) -> None:
    net = Net()
    run = Run(model=net, reproducible=reproducible)
    sizes = []
    for step in run.steps(3, MICRO_BATCHES):
        net.wide.requires_grad_(step.number == 1)
        for index in step:
            step.backward(_loss(net, step.number, index))
        assert (net.wide.weight.grad is None) == (step.number != 1)
        gradients, _ = run._engine._parts()
        sizes.append(sum(bucket.local.numel() for bucket in gradients.buckets if bucket.local.dtype == torch.float64))
    assert sizes == [0, 20, 0]


@both
def test_a_model_may_be_frozen_after_the_run_was_made(reproducible: bool) -> None:
    net = Net()
    run = Run(model=net, reproducible=reproducible)
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    for step in run.steps(1, MICRO_BATCHES):
        for index in step:
            step.backward(_loss(net, step.number, index))
        assert [parameter.grad is None for parameter in net.parameters()] == [True] * 6 + [False] * 2


def test_a_parameter_has_one_hook_however_often_it_was_frozen() -> None:
    net = Net()
    run = Run(model=net)
    for step in run.steps(STEPS, MICRO_BATCHES):
        _to_and_fro(net, step.number)
        for index in step:
            step.backward(_loss(net, step.number, index))
        all_hooks = [(parameter._post_accumulate_grad_hooks or {}).values() for parameter in net.parameters()]
        hooks = [sum(getattr(each, "__name__", "") == "append" for each in of_one) for of_one in all_hooks]
        assert hooks == [int(parameter.requires_grad) for parameter in net.parameters()]


@both
def test_who_is_unfrozen_within_a_step_is_named(reproducible: bool) -> None:
    net = Net()
    net.head.requires_grad_(False)
    run = Run(model=net, reproducible=reproducible)

    def unfreeze_too_late() -> None:
        for step in run.steps(1, MICRO_BATCHES):
            for index in step:
                net.head.requires_grad_(True)
                step.backward(_loss(net, 0, index))

    with pytest.raises(RuntimeError, match=r"head.weight got a gradient, and was frozen when the step began"):
        unfreeze_too_late()


def test_what_a_newcomer_gets_is_what_was_trained_when_the_step_began() -> None:
    ours, theirs = Net(), Net()
    ours.base.requires_grad_(False)
    ours.base.eval()
    source, newcomer = Trainable(ours), Trainable(theirs)
    ours.head.requires_grad_(False)
    ours.train()
    newcomer.load_state_dict(source.state_dict())
    assert [parameter.requires_grad for parameter in theirs.parameters()] == [False] * 4 + [True] * 4
    assert [module.training for module in theirs.modules()] == [True, False, False, False, False, True, True]


class Newcomer:
    """The membership of one that is invited, and whose world is not asked for here."""

    is_fixed = False

    def enter(self) -> Invitation:
        return Invitation(sources=({"until": 4, "step": 4},))

    def is_ready(self, _state: int) -> None: ...

    def newer_than(self, number: int) -> tuple[World, int]:  # noqa: ARG002
        members = tuple(Member(name=name, node="n", local_rank=0) for name in ("source", "newcomer"))
        return World(number=2, members=members, store="h:1"), 1

    def is_left(self) -> bool:
        return False

    def tell(self, _message: dict[str, Any]) -> None: ...


class Source:
    """Of a state that was fetched."""

    bytes, took_s, sources = 0, 0.0, ()

    def release(self) -> None: ...


def test_a_newcomer_trains_what_its_source_does_also_if_no_step_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Net()
    source.base.requires_grad_(False)
    given = {**Run(model=source)._engine._registered.state_dict(), "until": 4}
    said: list[Said] = []
    monkeypatch.setattr(engine, "membership", lambda *_: Newcomer())
    monkeypatch.setattr(arrival, "fetch_state", lambda handover, _: handover.load_state_dict(given) or Source())

    def say(_assembly: Assembly, _number: int, here: Said, **_: bool) -> None:
        said.append(here)
        raise InterruptedError

    monkeypatch.setattr(Assembly, "say", say)
    with pytest.raises(InterruptedError):
        Run(model=Net())._engine.join(4, MicroBatchCounts(MICRO_BATCHES))
    assert [each.trained for each in said] == [frozenset(range(4, 8))]


def test_what_an_optimizer_has_and_the_model_has_not_is_not_trained_without_a_word() -> None:
    net, head = Net(), nn.Linear(1, 7)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    run = Run(model=net, optimizer=optimizer, head=head)

    def train() -> None:
        for index in (step := next(run.steps(1, MICRO_BATCHES))):
            step.backward(head(net(torch.ones(1, 3))).mean() + index)

    with pytest.raises(RuntimeError, match=r"of shape \(7,( 1)?\) got a gradient that is not reduced"):
        train()


@both
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam], ids=["sgd", "adagrad", "adam"]
)
def test_sparse_gradients_become_dense(reproducible: bool, kind: Any) -> None:
    tables = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(9, 2, sparse=sparse)
        optimizer = kind(table.parameters(), lr=0.1)
        run = Run(model=table, optimizer=optimizer, reproducible=reproducible)
        for step in run.steps(3, MICRO_BATCHES):
            for index in step:
                step.backward(table(torch.tensor([index, index + step.number, index])).square().mean())
            optimizer.step()
        dist.destroy_process_group()
        tables.append(table.weight)
    assert torch.equal(*tables)


def test_sparse_adam_is_refused_before_the_first_step() -> None:
    table = nn.Embedding(9, 2, sparse=True)
    run = Run(model=table, optimizer=torch.optim.SparseAdam(table.parameters()))
    with pytest.raises(TypeError, match="SparseAdam takes sparse gradients alone"):
        next(run.steps(1, MICRO_BATCHES))


def test_an_optimizer_may_have_copies_of_the_parameters() -> None:
    net = Net()
    copies = [parameter.detach().double().requires_grad_() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    run = Run(model=net, optimizer=optimizer)
    for step in run.steps(2, MICRO_BATCHES):
        for index in step:
            step.backward(_loss(net, step.number, index))
        for copied, parameter in zip(copies, net.parameters(), strict=True):
            copied.grad = parameter.grad.double()
        optimizer.step()


class State:
    """Of a run, as far as it matters here."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


def _handovers(*, is_named: bool = False) -> list[tuple[Net, torch.optim.Optimizer, Handover]]:
    """Those of a giver and a taker whose optimizers have one layer each."""
    made = []
    for _ in range(2):
        net = Net()
        given: Any = net.wide.named_parameters() if is_named else net.wide.parameters()
        optimizer = torch.optim.AdamW(given, lr=0.1)
        randomness = Randomness(0, torch.device("cpu"))
        run = State(optimizer)
        handover = Handover(run, Trainable(net), ModuleValues({}), [optimizer], lambda: 1, randomness=randomness)
        made.append((net, optimizer, handover))
    return made


@pytest.mark.parametrize("is_named", [False, True])
def test_a_newcomer_has_the_groups_that_were_added_on_the_way(is_named: bool) -> None:
    (ours, giver, gives), (theirs, taker, takes) = _handovers(is_named=is_named)
    bias, base = ([("bias", ours.head.bias)], [*ours.base.named_parameters()])
    giver.add_param_group({"params": bias if is_named else [ours.head.bias], "lr": 0.5})
    giver.add_param_group({"params": base if is_named else [*ours.base.parameters()], "weight_decay": 0.25})
    takes.load_state_dict(copy.deepcopy(gives.state_dict()))
    wanted = [[*theirs.wide.parameters()], [theirs.head.bias], [*theirs.base.parameters()]]
    assert _ids(taker) == [list(map(id, each)) for each in wanted]
    assert [(group["lr"], group["weight_decay"]) for group in taker.param_groups] == [
        (group["lr"], group["weight_decay"]) for group in giver.param_groups
    ]


def _ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in optimizer.param_groups]


def test_a_newcomer_adds_itself_the_group_that_is_added_in_the_step_in_which_it_comes() -> None:
    (ours, giver, gives), (theirs, taker, takes) = _handovers()
    giver.add_param_group({"params": [ours.head.bias]})
    gives.note_yield()
    giver.add_param_group({"params": [*ours.base.parameters()], "lr": 0.5})
    takes.load_state_dict(copy.deepcopy(gives.state_dict()))
    takes.rewind()
    taker.add_param_group({"params": [*theirs.base.parameters()], "lr": 0.5})
    takes.load_again()
    wanted = [[*theirs.wide.parameters()], [theirs.head.bias], [*theirs.base.parameters()]]
    assert _ids(taker) == [list(map(id, each)) for each in wanted]
    assert [group["lr"] for group in taker.param_groups] == [0.1, 0.1, 0.5]


def test_a_model_is_walked_through_as_torch_does() -> None:
    shared = nn.Linear(2, 2)
    net = nn.ModuleDict({"a": nn.Sequential(shared, nn.Tanh()), "b": Net(), "c": nn.Sequential(nn.Sequential(shared))})
    net["b"].tied = net["a"]
    net["b"].nothing = None
    net["b"].register_parameter("none", None)
    net["c"].weight = shared.weight
    modules, parameters = walked(net)
    assert modules == list(net.modules())
    assert list(map(id, parameters)) == list(map(id, net.parameters()))
    assert walked(torch.jit.script(shared))[1] == list(torch.jit.script(shared).parameters())


def test_it_is_told_who_trains_what() -> None:
    ours, theirs = Net(), Net()
    theirs.base.requires_grad_(False)
    ours.head.bias.requires_grad_(False)
    trainable, other = Trainable(ours), Trainable(theirs)
    assert trainable.tell_apart(other.positions) == (
        "trains 1 parameter (head.bias) that this rank has frozen and has frozen 4 parameters "
        "(base.0.weight, base.0.bias, base.1.weight, ...) that this rank trains"
    )


def test_a_step_is_told_from_another_and_from_one_that_trains_something_else() -> None:
    net = Net()
    trainable = Trainable(net)
    stamps = {trainable.stamp(1), trainable.stamp(2)}
    net.head.requires_grad_(False)
    assert trainable.look()
    assert not trainable.look()
    assert len({*stamps, trainable.stamp(1)}) == 3


def _positions_in_order(trainable: Trainable) -> list[int]:
    place = {id(each): position for position, each in enumerate(trainable.parameters)}
    return [place[id(each)] for each in trainable.in_order]


def _came(trainable: Trainable, *names: str) -> list[torch.Tensor]:
    return [dict(trainable._model.named_parameters())[name] for name in names]


def test_the_order_of_use_is_that_in_which_gradients_came_from_its_end() -> None:
    net = Net()
    trainable = Trainable(net)
    own = list(trainable.in_order)
    assert own == trainable.trained
    assert not trainable.knows_order
    came = _came(trainable, "base.0.bias", "head.bias", "base.0.bias", "head.weight")
    order = trainable.order_of(came)
    assert not trainable.look()
    stamp = trainable.stamp(1)
    trainable.take_order(order)
    assert trainable.knows_order
    assert trainable.look()
    assert not trainable.look()
    assert trainable.stamp(1) != stamp
    used = _came(trainable, "head.weight", "base.0.bias", "head.bias")
    assert [id(each) for each in trainable.in_order[-3:]] == [id(each) for each in used]
    without_gradient = [each for each in own if not any(each is other for other in used)]
    assert [id(each) for each in trainable.in_order[:-3]] == [id(each) for each in without_gradient]


def test_the_models_own_order_changes_nothing_and_is_known() -> None:
    trainable = Trainable(Net())
    trainable.take_order(trainable.order_of(trainable.trained[::-1]))
    assert trainable.knows_order
    assert not trainable.look()


def test_who_trains_something_else_learns_the_order_again() -> None:
    net = Net()
    trainable = Trainable(net)
    trainable.take_order(trainable.order_of(trainable.trained))
    net.head.requires_grad_(False)
    assert trainable.look()
    assert not trainable.knows_order
    assert trainable.in_order == trainable.trained


@pytest.mark.parametrize("is_own_order", [False, True])
def test_a_newcomer_has_the_order_and_knows_that_it_is_known(is_own_order: bool) -> None:
    source, newcomer = Trainable(Net()), Trainable(Net())
    source.take_order(source.order_of(source.trained[:: -1 if is_own_order else 1]))
    source.look()
    newcomer.load_state_dict(source.state_dict())
    newcomer.look()
    assert newcomer.knows_order
    assert newcomer.stamp(1) == source.stamp(1)
    assert _positions_in_order(source) == _positions_in_order(newcomer)


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16, lambda model: model.half()])
def test_parameters_of_another_type_are_laid_out_anew(change: Any) -> None:
    model = nn.Linear(2, 2)
    trainable = Trainable(model)
    assert not trainable.look()
    change(model)  # which leaves each parameter the object that it is
    assert trainable.look()
    assert not trainable.look()
