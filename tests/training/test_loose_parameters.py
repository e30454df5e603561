"""Parameters that a registered optimizer has and no registered module are in each state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unicron_elastic import Run
from unicron_elastic.state.layout import Layout, flatten, rebuild
from unicron_elastic.training.loose_parameters import loose_parameters, take_loose

pytestmark = pytest.mark.usefixtures("no_launcher")


class Masters:
    """A model in bf16 whose optimizer steps on copies in fp32."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.masters = [nn.Parameter(each.detach().float()) for each in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, 0.01, momentum=0.9)
        self.run = Run(model=self.model, optimizer=self.optimizer)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(4, 3, dtype=torch.bfloat16)).float().square().mean().backward()
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            self.optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                    parameter.copy_(master)


def by_memory(one: Masters, other: Masters, _: Path) -> None:
    layout, tensors = flatten(one.run.state_dict())
    other.run.load_state_dict(rebuild(Layout.parse(layout.to_json()), [each.clone() for each in tensors]))


def by_storage(one: Masters, other: Masters, folder: Path) -> None:
    one.run.save(folder, 5)
    one.run.wait_saved()
    assert other.run.restore(folder) == 5


@pytest.mark.parametrize("by", [by_memory, by_storage])
def test_masters_go_on_where_they_were(by: Callable[[Masters, Masters, Path], None], tmp_path: Path) -> None:
    one, other = Masters(), Masters(seed=1)
    one.train(5)
    by(one, other, tmp_path)
    one.train(5)
    other.train(5)
    for mine, theirs in zip(one.masters, other.masters, strict=True):
        assert torch.equal(mine, theirs)


class Adapted(nn.Module):
    """A model whose ``state_dict`` has its head alone, and that is trained as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.tied = self.head.weight

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        whole = super().state_dict(*arguments, **named)
        return {name: each for name, each in whole.items() if name.startswith("head")}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        return super().load_state_dict(state_dict, strict=False)


def test_what_a_model_s_own_state_leaves_out_goes_on_where_it_was() -> None:
    def made(seed: int) -> tuple[Adapted, Run]:
        torch.manual_seed(seed)
        model = Adapted()
        return model, Run(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))

    (one, mine), (other, theirs) = made(0), made(1)
    state = mine.state_dict()
    assert [list(each.shape) for each in state["loose"]["optimizer"]] == [[3, 3], [3]], "and not what is tied"
    theirs.load_state_dict(state)
    for here, there in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(here, there)


def test_each_is_found_once_and_none_of_a_module_s() -> None:
    model, head, own = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([*model.parameters(), own], 0.1)
    outer = torch.optim.SGD([own, *head.parameters()], 0.1)
    objects: dict[str, Any] = {"inner": inner, "model": model, "outer": outer, "counts": {"own": own}}
    found = loose_parameters(objects)
    assert {name: [id(each) for each in some] for name, some in found.items()} == {
        "inner": [id(own)],
        "outer": [id(each) for each in head.parameters()],
    }
    assert loose_parameters({**objects, "head": head}) == {"inner": [own]}


def test_a_state_of_others_is_refused_by_name_and_changes_none() -> None:
    own = nn.Parameter(torch.zeros(3))
    objects = {"optimizer": torch.optim.SGD([own], 0.1), "other": torch.optim.SGD([nn.Parameter(torch.zeros(2))], 0.1)}
    state: dict[str, list[Tensor]] = {"optimizer": [torch.ones(3)], "other": [torch.ones(4)]}
    with pytest.raises(ValueError, match=r"^other has other parameters than .*: float32 \[2\] here, and float32 \[4\]"):
        take_loose(objects, state)
    assert own.tolist() == [0.0, 0.0, 0.0]


def test_what_an_optimizer_changes_may_be_in_a_registered_dict() -> None:
    def made() -> tuple[Run, nn.Parameter]:
        model, weights = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([*model.parameters(), weights], 0.1)
        return Run(model=model, optimizer=optimizer, loss={"weights": weights}), weights

    (one, mine), (other, theirs) = made(), made()
    with torch.no_grad():
        mine.fill_(2.0)
    other.load_state_dict(one.state_dict())
    assert theirs.tolist() == [2.0, 2.0]


def test_ranks_that_begin_with_others_are_told_apart() -> None:
    one, other = Masters(), Masters(seed=1)
    digests = [each.run._registered.digests() for each in (one, other)]
    assert digests[0] != digests[1]
    other.run._registered.some(["optimizer"]).load_state_dict(one.run._registered.some(["optimizer"]).state_dict())
    assert one.run._registered.digests() == other.run._registered.digests()
