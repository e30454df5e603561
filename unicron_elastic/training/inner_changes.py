"""Whether a script changes what it has registered while it computes micro-batches, of which a loss gives a rank more.

What is counted there is another number then than in an undisturbed run, and goes to those who come later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from unicron_elastic.compat.tensors import changes_of, local_of
from unicron_elastic.state.digest import digest_of

_STEPS = 2  # the first ones of a process: what a script does there it does in each


class InnerChanges:
    """`InnerChanges` looks at ``objects`` before the micro-batches of a step and behind them.

    At dicts, at schedulers, and at how often the parameters of modules were changed in place or replaced by ``.data``.
    """

    def __init__(self, objects: Mapping[str, Any], dicts: type) -> None:
        """``dicts``: the class of what stands for a dict of the script's."""
        self._objects: dict[str, Any] = {
            name: each for name, each in objects.items() if isinstance(each, (dicts, LRScheduler))
        }
        self._modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
        self._left = _STEPS
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        """Look at them: the script is about to compute."""
        self._before = self._digests() if self._left else {}

    def end(self) -> str:
        """Return what to tell people of one that has changed since; "" if none has, or it was told."""
        if not self._before:
            return ""
        before, self._before = self._before, {}
        self._left -= 1
        now = self._digests()
        changed = next((name for name, digest in now.items() if digest != before.get(name)), None)
        if changed is None:
            return ""
        self._left = 0
        return (
            f"{changed} is registered, and the script changes it within 'for index in step': a rank computes more "
            "micro-batches there when another is lost, so it becomes another than in an undisturbed run. Change it "
            "between two steps, by step.number or what all micro-batches have together, as step.losses"
        )

    def _digests(self) -> dict[str, int]:
        try:
            found = {name: digest_of(each.state_dict()) for name, each in self._objects.items()}
            return found | {f"{name} (its parameters)": _moved(each) for name, each in self._modules.items()}
        except Exception:  # what cannot be sent is told elsewhere, by name
            self._left = 0
            return {}


def _moved(module: nn.Module) -> int:
    """Return another number when its parameters have been changed; 0 of one that is sharded, which moves them."""
    parameters = [each for each in module.parameters() if not is_lazy(each)]
    if any(local_of(each) is not each for each in parameters):
        return 0
    return hash(tuple((each.data_ptr(), changes_of(each)) for each in parameters))
