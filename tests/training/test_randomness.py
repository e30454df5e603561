"""What micro-batches draw: by the script's own seeds, by step and index, and by nothing else."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unicron_elastic import Run
from unicron_elastic.training.step.randomness import OF_SCRIPT, Generators, Randomness

CPU = torch.device("cpu")
Drawn = tuple[float, float, float]


@pytest.fixture(autouse=True)
def generators_as_before() -> Any:
    """Leave them as they are for other tests."""
    with Generators().kept():
        yield


def seed_script(torchs: int, pythons: int, numpys: int) -> None:
    torch.manual_seed(torchs)
    random.seed(pythons)
    np.random.seed(numpys)


def draw() -> Drawn:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def drawn(randomness: Randomness, step: int, index: int) -> Drawn:
    randomness.take_seeds()
    randomness.seed(step, index)
    return draw()


def test_each_kind_of_generator_goes_by_the_seed_that_the_script_gave_it() -> None:
    found = []
    for seeds in ((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)):
        seed_script(*seeds)
        found.append(drawn(Randomness(OF_SCRIPT, CPU), 3, 4))
    first, again, *others = found
    assert first == again
    for kind, other in enumerate(others):
        assert [mine == first[each] for each, mine in enumerate(other)] == [each != kind for each in range(3)]


def test_what_torch_has_drawn_since_it_was_seeded_does_not_matter() -> None:
    seed_script(1, 1, 1)
    first = drawn(Randomness(OF_SCRIPT, CPU), 0, 0)
    seed_script(1, 1, 1)
    torch.rand(5)
    assert drawn(Randomness(OF_SCRIPT, CPU), 0, 0) == first


def test_nothing_is_drawn_of_what_the_script_began_with() -> None:
    seed_script(0, 0, 0)
    begun = draw()
    seed_script(0, 0, 0)
    assert not set(begun) & set(drawn(Randomness(OF_SCRIPT, CPU), 0, 0))
    assert not set(begun) & set(drawn(Randomness(0, CPU), 0, 0))


def test_steps_indices_and_parts_differ() -> None:
    found = [drawn(Randomness(7, CPU, part), step, index) for part in (0, 1) for step in (0, 1) for index in (0, 1)]
    assert len({each for one in found for each in one}) == 3 * len(found)


def test_who_comes_later_has_the_seeds_of_the_others() -> None:
    seed_script(1, 1, 1)
    ours = Randomness(OF_SCRIPT, CPU)
    first = drawn(ours, 5, 1)
    seed_script(2, 2, 2)
    theirs = Randomness(OF_SCRIPT, CPU)
    given = ours.state_dict()
    assert {each.dtype for each in given.values()} == {torch.uint8}  # storage has bytes, and would cut off others
    theirs.load_state_dict(given)
    assert drawn(theirs, 5, 1) == first


def test_what_was_cut_off_is_no_seed() -> None:
    seed_script(1, 1, 1)
    ours = Randomness(OF_SCRIPT, CPU)
    first = drawn(ours, 5, 1)
    theirs = Randomness(OF_SCRIPT, CPU)
    seed_script(1, 1, 1)
    theirs.load_state_dict({**theirs.state_dict(), "seeds": torch.tensor([23, 103, 242], dtype=torch.uint8)})
    assert drawn(theirs, 5, 1) == first


def test_all_of_a_replica_have_those_of_its_first_process() -> None:
    seed_script(1, 1, 1)
    told: list[str] = []
    first, second = Randomness(OF_SCRIPT, CPU), Randomness(OF_SCRIPT, CPU)

    def share(own: str) -> list[str]:
        told.append(own)
        return told

    first.take_seeds(share)
    seed_script(2, 2, 2)
    second.take_seeds(share)
    assert drawn(first, 1, 1) == drawn(second, 1, 1)


@pytest.mark.parametrize("of_state", [0, 1])
def test_who_has_them_of_a_state_has_them_for_all_of_its_replica(of_state: int) -> None:
    """What one process kept may be read by a replica of several, of which the others have what the script seeded."""
    seed_script(1, 1, 1)
    before = Randomness(OF_SCRIPT, CPU)
    before.take_seeds()
    each = [Randomness(OF_SCRIPT, CPU) for _ in range(2)]
    each[of_state].load_state_dict(before.state_dict())
    seed_script(2, 2, 2)
    told, all_have_told = ["", ""], threading.Barrier(2)

    def take(place: int) -> None:
        def share(own: str) -> list[str]:
            told[place] = own
            all_have_told.wait(10)
            return told

        each[place].take_seeds(share)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take, range(2)))
    assert [drawn(one, 1, 1) for one in each] == [drawn(before, 1, 1)] * 2


def test_a_run_takes_what_the_script_has_seeded_when_its_steps_begin() -> None:
    def dropped(of_script: int, **options: Any) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5))
        run = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), **options)
        torch.manual_seed(of_script)
        found: list[float] = []
        for step in run.steps(1, 1):
            for _ in step:
                found = (model(torch.ones(1, 1)) != 0).flatten().tolist()
                step.backward(model(torch.ones(1, 1)).sum())
            run._registered.objects["optimizer"].step()
        return found

    assert dropped(1) == dropped(1) != dropped(2)
    assert dropped(1, seed=3) == dropped(2, seed=3) != dropped(1)


def test_after_a_restart_from_storage_micro_batches_draw_what_they_would_have(tmp_path: Path) -> None:
    def numbers(folder: Path, total: int) -> list[Drawn]:
        seed_script(1, 2, 3)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Run(model=model, optimizer=optimizer)
        run.restore(folder)
        found = []
        for step in run.steps(total, 2):
            for _ in step:
                found.append(draw())
                step.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            run.save(folder, step.number + 1)
        run.wait_saved()
        return found

    undisturbed = numbers(tmp_path / "undisturbed", 4)
    assert len(set(undisturbed)) == 8
    assert numbers(tmp_path / "stopped", 2) + numbers(tmp_path / "stopped", 4) == undisturbed


def test_what_is_no_seed_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="seed must be a whole number, None or 'script', got 'scripts'"):
        Run(model=model, seed="scripts")
    with pytest.raises(TypeError, match="seed"):
        Run(model=model, seed=1.5)  # type: ignore[arg-type]
