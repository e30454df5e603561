"""What a script does to its BatchNorm layers between two steps: it adds, replaces, removes or untracks one."""

from __future__ import annotations

from torch import nn

from differential.case import Case
from differential.features import WIDTH, Net, Simple

__all__ = ["CHURNS", "churn"]

CHURNS = ("add", "replace", "remove", "untrack")


def churn(case: Case, model: Net, number: int) -> None:
    """Done once, before step ``number`` begins. New layers have no parameters, as the optimizer would not know them."""
    if not case.churn or number != case.change_at:
        return
    if case.churn == "add":
        model.blocks["added"] = _new()
        return
    names = [name for name in model.blocks if name.endswith("-batchnorm")]
    if not names:
        return
    if case.churn == "replace":
        model.blocks[names[0]] = _new()
    elif case.churn == "remove":
        model.blocks[names[0]] = Simple(nn.Identity())
    else:
        _untrack(model.blocks[names[0]].layer)


def _new() -> Simple:
    return Simple(nn.BatchNorm1d(WIDTH, affine=False))


def _untrack(norm: nn.BatchNorm1d) -> None:
    norm.track_running_stats = False
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
