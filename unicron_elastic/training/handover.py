"""What a newcomer gets from a member: the state of the run, and what its own script will not have done to the model.

Scripts unfreeze layers and add them to their optimizer in one step alone, which is past when the newcomer begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from unicron_elastic.training.joining import HasState
from unicron_elastic.training.trainable import Trainable

Groups = list[list[int]]  # of one optimizer: in each group the positions of its parameters in the model


class Handover:
    """Of one process, to others of its job alone: what is saved has the state of the run and no more."""

    def __init__(
        self, run: HasState, trainable: Trainable, optimizers: Sequence[Optimizer], until: Callable[[], int]
    ) -> None:
        """``until``: the total of the steps that this process is in."""
        self._run = run
        self._until = until
        self.taken_until = 0  # the same, of the member whose state was taken
        self._trainable = trainable
        self._optimizers = optimizers
        self._taken: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, what is trained, and which parameters each optimizer has in which group."""
        return {
            "run": self._run.state_dict(),
            "model": self._trainable.state_dict(),
            "optimizers": [self._groups(optimizer) for optimizer in self._optimizers],
            "until": self._until(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes all of it over. Raises what the run raises, and ValueError for a model of another make."""
        self._taken, self.taken_until = state, int(state["until"])
        for optimizer, groups in zip(self._optimizers, state["optimizers"], strict=True):
            if groups is not None and groups != self._groups(optimizer):
                self._regroup(optimizer, groups)
        self._run.load_state_dict(state["run"])
        self._trainable.load_state_dict(state["model"])

    def load(self) -> None:
        """Takes over once more what was taken last, if that is not forgotten: the script may have changed it."""
        if self._taken is not None:
            self.load_state_dict(self._taken)

    def load_again(self) -> None:
        """Takes over once more what was taken last, if that was not done, and forgets it.

        It is that of a member in its step. What scripts do before a step is in it, and a newcomer's does it again.
        """
        self.load()
        self._taken = None

    def _groups(self, optimizer: Optimizer) -> Groups | None:
        """None if it has a parameter that the model has not."""
        place = {id(parameter): position for position, parameter in enumerate(self._trainable.parameters)}
        groups = [[place.get(id(each), -1) for each in group["params"]] for group in optimizer.param_groups]
        return None if any(-1 in group for group in groups) else groups

    def _regroup(self, optimizer: Optimizer, groups: Groups) -> None:
        """Has the optimizer as many groups, of these parameters; all else of a group comes with its state."""
        parameters = self._trainable.parameters
        if any(position >= len(parameters) for group in groups for position in group):
            return  # it is another model, and will say so
        del optimizer.param_groups[len(groups) :]
        for group in optimizer.param_groups:
            group["params"] = []
        for number, positions in enumerate(groups):
            params = [parameters[position] for position in positions]
            if number < len(optimizer.param_groups):
                optimizer.param_groups[number]["params"] = params
            else:
                optimizer.add_param_group({"params": params})
