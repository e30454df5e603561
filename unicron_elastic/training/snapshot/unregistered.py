"""What is in no snapshot though the script trains by it, of which one line tells.

That is an optimizer that steps over what is registered, and is not registered itself: a script that makes another one
on its way has it begin anew after a restart, or goes on with the one before. And what PowerSGD's hook has not sent yet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from unicron_elastic.compat.groups import hook_states
from unicron_elastic.compat.watching.optimizers import watch_after_steps
from unicron_elastic.state.snapshot.gather import own_rank
from unicron_elastic.training.step.guard import holds

_POWER_SGD = "PowerSGDState"


class UnregisteredOptimizers:
    """`UnregisteredOptimizers` tells once of such a one, while snapshots are made of what is ``registered``."""

    def __init__(self, registered: Iterable[Any]) -> None:
        self._registered = list(registered)
        self._known: WeakSet[Optimizer] = WeakSet()
        self.is_kept = False  # what is registered, by now; not in steps, in which others look
        watch_after_steps(self)

    def begin(self) -> None:
        """What is registered is kept from now on: look at DDP's communication hooks, which are there by now."""
        if self.is_kept:
            return
        self.is_kept = True
        if own_rank()[0] == 0 and any(
            type(state).__name__ == _POWER_SGD for each in self._registered for state in hook_states(each)
        ):
            sys.stderr.write(
                "unicron: what PowerSGD has not sent yet is in no snapshot: behind a restart numbers are not those of "
                "an undisturbed run, as behind a checkpoint of torch's own.\n"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Looks at an optimizer that steps for the first time."""
        if not self.is_kept or optimizer in self._known:
            return
        self._known.add(optimizer)
        if any(holds(each, optimizer) for each in self._registered):
            return
        modules = [each for each in self._registered if isinstance(each, nn.Module)]
        of_ours = {id(parameter) for module in modules for parameter in module.parameters()}
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if of_ours & stepped and own_rank()[0] == 0:
            sys.stderr.write(
                f"unicron: {type(optimizer).__name__}, an optimizer that is not registered, has stepped over "
                "parameters of what is: no snapshot has its state, and it begins anew after a restart. Make it before "
                "Run, and give it to Run as well, by a name of its own.\n"
            )
