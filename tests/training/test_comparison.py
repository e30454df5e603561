"""What ranks conclude from the digests of their states, and from what they tell of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unicron_elastic.training import replicas as replicas_module
from unicron_elastic.training.replicas import Replicas
from unicron_elastic.training.step.buffers import Buffers
from unicron_elastic.training.step.comparison import MODEL, ComparisonVerdict, Told, differ, in_place, judge, written

digests = st.integers(0, 2**64 - 1)


def summed(told: list[int | None]) -> list[float]:
    """As an all-reduce of fp32 does."""
    return torch.tensor([written(each) for each in told], dtype=torch.float32).sum(0).tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(digests | st.none(), min_size=1, max_size=9))
def test_a_difference_is_seen_from_the_sums_alone(told: list[int | None]) -> None:
    assert differ(summed(told)) == (len({each for each in told if each is not None}) > 1)


def test_a_digest_between_two_others_does_not_hide_them() -> None:
    assert differ(summed([0x1, 0x2, 0x3]))


def test_many_ranks_are_counted_exactly() -> None:
    all_ones = 2**64 - 1
    exact = [each * 50_000 for each in written(all_ones)]
    assert max(exact) < 2**24
    assert not differ(exact)


def tells(
    kind: str = "a",
    caches: tuple[str, ...] = (),
    own: tuple[str, ...] = (),
    is_copy: bool = False,
    **tensors: int | tuple[str, int],
) -> Told:
    """With digests by name; and types, if they matter. ``model_x`` stands for "model.x"."""
    whole = {
        name.replace("model_", MODEL): each if isinstance(each, tuple) else ("fp32", each)
        for name, each in tensors.items()
    }
    told = Told(tensors=whole, caches=frozenset(caches), own=frozenset(own), kind=kind, is_copy=is_copy)
    return Told.parse(told.to_json())


def test_most_are_right() -> None:
    verdict = judge([tells(a=1, b=2), tells(a=1, b=3), tells(a=1, b=2), tells(a=1, b=2)], 7)
    assert verdict.wrong == {1}
    assert verdict.sentence == "after 7 steps rank 1 differs from the others in b"


def test_several_may_be_wrong_in_several_ways() -> None:
    verdict = judge([tells(a=4, b=2), tells(a=1, b=3), tells(a=1, b=2), tells(a=1, b=2), tells(a=1, b=2)], 7)
    assert verdict.wrong == {0, 1}
    assert verdict.sentence == "after 7 steps ranks 0 and 1 differ from the others in a (and 1 more)"


@pytest.mark.parametrize("told", [[tells(a=1), tells(a=2)], [tells(a=1), tells(a=1), tells(a=2), tells(a=2)]])
def test_without_a_majority_nobody_is_right(told: list[Told]) -> None:
    verdict = judge(told, 100)
    assert verdict.wrong == set(range(len(told)))
    assert verdict.sentence == "after 100 steps the ranks differ in a, and no majority says who is right"


def test_what_one_rank_alone_has_is_a_difference() -> None:
    assert judge([tells(a=1), tells(a=1), tells(a=1, b=1)], 1).wrong == {2}
    assert judge([tells(a=1), tells(a=1), tells(a=("bf16", 1))], 1).wrong == {2}


def test_caches_may_have_another_shape_and_no_other_content() -> None:
    def cache(what: str, digest: int) -> Told:
        return tells(caches=("c",), a=1, c=(what, digest))

    verdict = judge([cache("[1]", 1), cache("[2]", 2), tells(a=1)], 1)
    assert (verdict.wrong, verdict.left_out, verdict.sentence) == (set(), {"c"}, "")
    assert judge([cache("[1]", 1), cache("[1]", 1), cache("[1]", 2)], 1).wrong == {2}


def test_what_is_a_process_s_own_may_have_another_content_and_is_told_of() -> None:
    own = tells(caches=("c",), own=("c",), a=1, c=2)
    verdict = judge([own, tells(caches=("c",), a=1, c=1), tells(caches=("c",), a=1, c=1)], 1)
    assert (verdict.wrong, verdict.left_out) == (set(), {"c"})
    assert verdict.sentence == "ranks differ in c, a cache as it seems, which is not compared any more"
    assert judge([own, tells(caches=("c",), a=1, c=1), tells(caches=("c",), a=7, c=1)], 1).wrong == {2}


def test_an_optimizer_of_which_each_rank_has_a_part_is_not_compared() -> None:
    verdict = judge([tells(model_a=1, b=1), tells(model_a=1, c=1), tells(model_a=1, d=1, c=1)], 1)
    assert (verdict.wrong, verdict.left_out) == (set(), {"b", "c", "d"})
    assert judge([tells(model_a=1, b=1), tells(model_a=2, c=1), tells(model_a=1, d=1)], 1).wrong == {1}
    assert judge([tells(model_a=1), tells(model_a=1), tells(model_b=1)], 1).wrong == {2}


def test_a_replica_of_several_processes_tells_what_each_has_by_its_place() -> None:
    right, wrong = tells(a=1, b=2), tells(a=1, b=3)
    assert judge([Told.of_places([right, wrong]), Told.of_places([right, wrong])], 1).wrong == set()
    verdict = judge(
        [Told.of_places([right, right]), Told.of_places([right, right]), Told.of_places([right, wrong])], 7, "replica"
    )
    assert verdict.wrong == {2}
    assert verdict.sentence == "after 7 steps replica 2 differs from the others in b of place 1"
    copied = Told.of_places([right, tells(a=1, b=3, is_copy=True)])
    assert judge([copied, Told.of_places([right, right])], 7, "replica").wrong == {0}


def test_what_is_left_out_is_so_in_the_place_that_has_it() -> None:
    own, other = tells(caches=("c",), own=("c",), a=1, c=2), tells(caches=("c",), own=("c",), a=1, c=1)
    verdict = judge([Told.of_places([own, own]), Told.of_places([own, other])], 1, "replica")
    assert [in_place(verdict.left_out, place) for place in (0, 1)] == [frozenset(), {"c"}]
    assert verdict.sentence == "replicas differ in c of place 1, a cache as it seems, which is not compared any more"


def test_all_places_of_a_replica_have_one_digest_and_none_that_is_computed_later() -> None:
    (_, _, one), (model, _, other) = replica(), replica()
    places: list[str] = []

    def share(own: str) -> list[str]:
        places[1:] = [own]
        return places

    found = []
    for step in range(2):
        one.begin(step, is_last=False)
        places[:] = [str(one._own_digest())]
        other.begin(step, is_last=False)
        other.share_digest(share)
        found.append(other.digest())
        with torch.no_grad():
            next(model.parameters())[0] += 1
        assert other.digest() == found[-1]
    assert found[0] != found[1]
    other.end(is_compared=True)
    other.begin(7, is_last=False)
    other.share_digest(share)
    other.meet()  # whose newcomers are compared in the next step
    assert other.digest() is None


def test_a_copy_has_no_voice() -> None:
    bad, copied = tells(a=2), tells(a=2, is_copy=True)
    assert judge([tells(a=1), bad, copied], 1).wrong == {0, 1, 2}
    assert judge([tells(a=1), tells(a=1), bad, copied, copied], 1).wrong == {2, 3, 4}
    assert judge([tells(a=1), copied], 1).wrong == {1}
    assert judge([copied, copied, tells(a=1, is_copy=True)], 1).wrong == {2}


def test_ranks_that_do_not_compute_alike_may_differ_by_rounding() -> None:
    verdict = judge([tells(a=1), tells(a=2), tells(kind="b", a=1)], 3)
    assert (verdict.wrong, verdict.is_last) == (set(), True)
    assert "rank 2: b" in verdict.sentence


# -- what is compared -------------------------------------------------------------------------------------------------


def replica(*, reverse: bool = False, every: int = 10) -> tuple[nn.Module, torch.optim.Optimizer, Replicas]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if reverse:  # the order in which states were made, as after a state was taken over
        for parameter in reversed(list(optimizer.state)):
            optimizer.state[parameter] = dict(reversed(list(optimizer.state.pop(parameter).items())))
    replicas = Replicas(model, {"model": model, "optimizer": optimizer}, every)
    replicas.buffers = Buffers(model, 1, is_reproducible=False)
    return model, optimizer, replicas


def digest(replicas: Replicas, step: int = 0, *, is_last: bool = False) -> int | None:
    replicas.begin(step, is_last=is_last)
    return replicas.digest()


def test_the_same_state_has_the_same_digest() -> None:
    (_, _, one), (_, _, other) = replica(), replica(reverse=True)
    assert digest(one) == digest(other)
    assert {"model.0.weight", "model.1.running_mean", "optimizer.state[0].exp_avg", "optimizer.state[3].step"} <= {
        *one.told().tensors
    }


@pytest.mark.parametrize("what", ["parameter", "buffer", "moment", "step"])
def test_anything_that_is_else_shows(what: str) -> None:
    (model, optimizer, other), (_, _, one) = replica(), replica()
    first = next(model.parameters())
    changed = {
        "parameter": first.data,
        "buffer": model[1].running_var,
        "moment": optimizer.state[first]["exp_avg_sq"],
        "step": optimizer.state[first]["step"],
    }[what]
    changed.add_(1e-3)
    assert digest(one) != digest(other)


def compared(replicas: Replicas, steps: Iterable[int], last: Collection[int] = ()) -> list[int]:
    """In which of these steps all ranks are compared."""
    found = []
    for step in steps:
        if digest(replicas, step, is_last=step in last) is not None:
            found.append(step)
            replicas.end(is_compared=True)
    return found


def test_they_are_compared_every_so_many_steps_and_often_in_the_first() -> None:
    _, _, replicas = replica(every=100)
    assert compared(replicas, range(350)) == [0, 1, 2, 4, 8, 16, 32, 64, 100, 200, 300]


def test_they_are_compared_often_after_newcomers() -> None:
    _, _, replicas = replica(every=100)
    assert compared(replicas, range(210, 230)) == [210, 211, 212, 214, 218, 226]  # the first of all, as after a restart
    replicas.meet()
    assert digest(replicas, 230) is not None
    replicas.end(is_compared=False)  # they have been lost again
    assert compared(replicas, range(231, 250)) == [231, 232, 233, 235, 239, 247]


def test_they_are_compared_in_the_last_step_but_not_in_that_of_each_short_call() -> None:
    _, _, replicas = replica(every=100)
    assert compared(replicas, range(12), last=[11]) == [0, 1, 2, 4, 8, 11]
    short = compared(replicas, range(12, 100), last=range(15, 100, 4))
    assert short == [15, 16, 19, 23, 27, 31, 32, 39, 47, 55, 63, 64, 75, 87, 99]
    assert compared(replicas, range(1000, 1100), last=range(1000, 1100)) == list(range(1000, 1100, 10))


def test_they_are_never_compared_if_the_script_says_so() -> None:
    _, _, replicas = replica(every=0)
    assert compared(replicas, range(20), last=[19]) == []


def test_the_optimizer_of_a_scheduler_is_the_one_that_is_registered() -> None:
    model, optimizer, one = replica()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    both = Replicas(model, {"model": model, "scheduler": scheduler, "optimizer": optimizer}, 10)
    names = {name for name in both.told().tensors if not name.startswith(MODEL)}
    names.remove("scheduler.state")
    assert names == {name.replace("optimizer.", "scheduler.") for name in one.told().tensors if MODEL not in name}


def test_what_has_been_found_to_differ_and_may_is_left_out() -> None:
    (_, _, one), (model, _, other) = replica(), replica()
    model[1].running_mean.add_(1.0)
    assert digest(one) != digest(other)
    for each in (one, other):
        each.accept(ComparisonVerdict(left_out=frozenset({"model.1.running_mean"})), is_silent=False)
    assert digest(one) == digest(other)


def test_who_has_copied_says_so_until_it_was_compared() -> None:
    _, _, replicas = replica()
    replicas.copy()
    assert replicas.told().is_copy
    replicas.end(is_compared=False)
    replicas.begin(1, is_last=False)
    assert replicas.told().is_copy
    replicas.end(is_compared=True)
    replicas.begin(2, is_last=False)
    assert not replicas.told().is_copy


def test_an_optimizer_of_what_is_not_registered_is_not_compared() -> None:
    model, optimizer, one = replica()
    own = torch.optim.SGD(nn.Linear(1, 1).parameters())
    other = Replicas(model, {"model": model, "optimizer": optimizer, "own": own}, 10)
    other.buffers = one.buffers
    assert digest(one) == digest(other)


class Hours:
    """Registered: the time that has passed."""

    def __init__(self) -> None:
        self.hours = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"hours": self.hours}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.hours = state["hours"]


def rich_replica() -> tuple[dict[str, Any], Replicas]:
    model, optimizer, _ = replica()
    ema = torch.optim.swa_utils.AveragedModel(model)
    ema.module.register_buffer("hidden", torch.zeros(2), persistent=False)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    registered = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": ema, "hours": Hours()}
    return registered, Replicas(model, registered, 10)


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("optimizer.param_groups", lambda of: of["optimizer"].param_groups[0].update(lr=0.1)),
        ("optimizer.param_groups", lambda of: of["optimizer"].param_groups[0].update(betas=(0.8, 0.9))),
        ("scheduler.state", lambda of: of["scheduler"].step(1.0)),
        ("ema.module.0.weight", lambda of: of["ema"].module[0].weight.data.add_(1e-6)),
        ("ema.n_averaged", lambda of: of["ema"].n_averaged.add_(1)),
        ("ema.module.hidden", lambda of: of["ema"].module.hidden.add_(1)),
        ("hours.state", lambda of: setattr(of["hours"], "hours", 1.5)),
    ],
)
def test_all_that_is_registered_is_compared(place: str, change: Callable[[dict[str, Any]], None]) -> None:
    (_, one), (registered, other) = rich_replica(), rich_replica()
    assert digest(one) == digest(other)
    assert one.by_name() == other.by_name()
    change(registered)
    assert digest(one) != digest(other, 10)
    verdict = judge([one.told(), other.told(), one.told()], 10)
    assert place in verdict.sentence
    assert {key for key, each in one.by_name().items() if other.by_name()[key] != each} == {place.partition(".")[0]}
    may_differ = place in {"hours.state", "ema.n_averaged", "ema.module.hidden"}  # a forward pass, the clock
    assert verdict.wrong == (set() if may_differ else {1})


def test_a_comparison_that_fails_is_said_once_and_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, _, one), (_, _, other) = replica(), replica()
    right = digest(one)
    with monkeypatch.context() as patched:
        patched.setattr(replicas_module, "digests", _fail)
        failed = digest(other)
        assert failed not in (None, right)  # so that all ranks hear of it
        verdict = judge([one.told(), other.told(), one.told()], 0)
        assert digest(other, 10) not in (None, right)  # until they have heard
        other.accept(verdict, is_silent=True)
        assert digest(other, 20) is None
    assert capsys.readouterr().err.count("cannot compare") == 1
    assert not verdict.wrong
    assert verdict.is_last
    assert "no kernel for that" in verdict.sentence


def test_what_a_script_raises_while_ranks_are_compared_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class AlarmError(Exception):
        """Of a script's signal handler."""

    _, _, one = replica()
    monkeypatch.setattr(replicas_module, "digests", lambda _: _raise(AlarmError()))
    with pytest.raises(AlarmError):
        digest(one)


def _fail(_: object) -> None:
    _raise(RuntimeError("no kernel for that"))


def _raise(error: Exception) -> None:
    raise error
