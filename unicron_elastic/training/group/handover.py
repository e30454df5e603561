"""What a newcomer gets from a member: the state of the run, and what its own script will not have done to the model.

Scripts unfreeze layers and add them to their optimizer in one step alone, which is past when the newcomer begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unicron_elastic.base.text import counted, one_line
from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.training.group.misfits import unfit
from unicron_elastic.training.group.script_text import how_else, script_text
from unicron_elastic.training.group.sendable import Stateful
from unicron_elastic.training.step.module_values import ModuleValues
from unicron_elastic.training.step.randomness import Randomness
from unicron_elastic.training.step.trainable import Trainable, positions_of

_WHY_CHARACTERS = 500
_MAY_PASS = (OSError, MemoryError, torch.OutOfMemoryError)  # another try may do better
_OF_TORCH = (RuntimeError, ValueError)  # which load_state_dict raises for what does not fit: its words say all


class NotTakenError(RuntimeError):
    """This process has not what the state of the others is for: it cannot train with them."""


def _said(error: Exception) -> str:
    """Return what it says, without torch's heading."""
    said = str(error) if isinstance(error, _OF_TORCH) else f"{type(error).__name__}: {error}"
    return re.sub(r"Error\(s\) in loading state_dict for \w+:\s*", "", said).rstrip(".")


Groups = list[list[int]]  # of one optimizer: in each group the positions of its parameters in the model


class Handover:
    """`Handover` is what one process gives to others of its job; what is saved has the state of the run and no more."""

    def __init__(
        self,
        run: Stateful,
        trainable: Trainable,
        values: ModuleValues,
        optimizers: Sequence[Optimizer],
        until: Callable[[], int],
        *,
        randomness: Randomness,
        schedulers: Sequence[LRScheduler] = (),
        others: Mapping[str, Trainable] | None = None,
    ) -> None:
        """``until``: the total of the steps that this process is in; ``others``: of modules that are not the model."""
        self._schedulers = schedulers
        self._others = others or {}
        self._run = run
        self._randomness = randomness
        self._until = until
        self.taken_until = 0  # the same, of the member whose state was taken
        self._trainable = trainable
        self._values = values
        self._optimizers = optimizers
        self._taken: Mapping[str, Any] | None = None
        self._yielded_groups = self._group_counts()

    @cached_property
    def _script(self) -> dict[str, str]:
        """The text of the script, as it was at the first call of ``steps()``."""
        return script_text()

    def note_yield(self) -> None:
        """Notes what the script of a newcomer in this step is to find: what this one does before it, that does, too."""
        self._randomness.note_yield()
        self._yielded_groups = self._group_counts()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, what is trained and how, and which parameters each optimizer has in which group."""
        run = self._run.state_dict()
        run.pop("way", None)  # it is here, as it was at the last look
        return {
            "run": run,
            "script": self._script,
            "model": self._trainable.state_dict(),
            "others": {name: each.present() for name, each in self._others.items()},
            **self._values_and_groups(),
            "until": self._until(),
            "yielded": self._randomness.yielded,
            "yielded_groups": self._yielded_groups,
        }

    def is_whole(self) -> bool:
        """Whether no module has other parameters than it had, as within ``torch.func.functional_call``."""
        return self._trainable.is_as_seen() and all(each.is_as_seen() for each in self._others.values())

    def way(self, *, is_in_steps: bool) -> dict[str, Any]:
        """Return what a script does on its way, for one that begins again behind it: it does not do that once more.

        In a loop of its own it may be anywhere. In an evaluation, where the whole model is, modes are left to it: where
        it begins again it has that behind it, and may change them back nowhere.
        """
        is_evaluating = not is_in_steps and not self._trainable.is_in_training

        def trained(of: Trainable) -> dict[str, Any]:
            present = of.present()
            if is_evaluating or not (is_in_steps or of.is_in_training):
                del present["in_training"]
            return present

        return {
            "model": trained(self._trainable),
            "others": {name: trained(each) for name, each in self._others.items()},
            "is_in_steps": is_in_steps,
            **self._values_and_groups(),
        }

    def _parts(self, way: Mapping[str, Any]) -> Iterator[tuple[Trainable, Mapping[str, Any]]]:
        """Yield the model and the other modules, with what is trained of them on this way.

        Before ``steps()`` this look at the model is nobody else's.
        """
        self._trainable.look()
        model = way.get("model", way)
        if all(end <= len(self._trainable.parameters) for _, end in model["trained"]):
            yield self._trainable, model  # else it is another model, and will say so
        yield from self._parts_of_others(way)

    def _parts_of_others(self, way: Mapping[str, Any]) -> Iterator[tuple[Trainable, Mapping[str, Any]]]:
        """Yield those of the modules that are not the model, if they have as many parameters and modules here."""
        for name, part in way.get("others", {}).items():
            if (other := self._others.get(name)) is not None:
                other.look()
                ends = {"trained": len(other.parameters), "in_training": len(other.modules)}
                if all(end <= count for what, count in ends.items() for _, end in part.get(what, ())):
                    yield other, part

    def take_groups(self, way: Mapping[str, Any]) -> None:
        """Adds the groups that optimizers were given on the way, if they have all that were there before."""
        if len(way["optimizers"]) != len(self._optimizers):
            return
        for optimizer, groups in zip(self._optimizers, way["optimizers"], strict=True):
            own = self._groups(optimizer)
            if groups is not None and own is not None and len(own) < len(groups) and groups[: len(own)] == own:
                self._regroup(optimizer, groups)

    def take_way(self, way: Mapping[str, Any]) -> str:
        """Takes over the rest of it, if that is there: what was saved may be read by another script, and has no more.

        Returns what people should hear of what is trained otherwise than here, if anything is.
        """
        model = way.get("model", way)
        if way.get("is_in_steps", "in_training" in model):  # older ones have modes in steps alone, and do not say so
            self._take_trained(way)
            return ""
        told = []
        for trainable, part in self._parts(way):
            told.append(trainable.tell_apart(positions_of(part["trained"], len(trainable.parameters), "parameters")))
            if model is not way and "in_training" in part:
                in_training = positions_of(part["in_training"], len(trainable.modules), "modules")
                told.append(trainable.tell_modes_apart(in_training))
        otherwise = " and ".join(each for each in told if each)
        if model is way:
            whose = "run.restore() leaves it to the script which parameters are trained, and the one that saved"
            return otherwise and f"{whose} {otherwise}"
        self._take_trained(way)
        return otherwise and f"the script whose state run.restore() has taken over {otherwise}: so does this one now"

    def why_not(self, way: Mapping[str, Any]) -> str:
        """Return why what is trained on this way cannot be taken over here; "" if it can, or is left to the script.

        In ``steps()`` gradients are reduced by the run.
        """
        model = way.get("model", way)
        if model is way or way.get("is_in_steps", "in_training" in model):
            return ""
        return next((why for each in self._parts(way) if (why := self._why_not_reduced(*each))), "")

    def _why_not_reduced(self, trainable: Trainable, part: Mapping[str, Any]) -> str:
        """Return why a DistributedDataParallel would not reduce what is trained of this; "" if it does, or is none."""
        parameters, own = trainable.parameters, trainable.positions
        trained = positions_of(part["trained"], len(parameters), "parameters")
        if trained == own:
            return ""
        wrong = unfit(parameters, trained - own, own - trained)
        if not any(wrong):
            return ""
        otherwise = trainable.tell_apart(own ^ (wrong.trained | wrong.frozen))
        right = "build it behind run.restore(), for which Run takes the model itself"
        or_else = "" if wrong.trained else ", or with find_unused_parameters=True"
        why = f"there the script {otherwise}, and DistributedDataParallel was built for what this rank trains"
        return f"{why}: {right}{or_else}"

    @property
    def taken_step(self) -> int:
        """Return how many steps the state has behind it that was taken last."""
        assert self._taken is not None
        return int(self._taken["run"]["steps"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes all of it over. Raises NotTakenError if it does not fit."""
        if otherwise := how_else(self._script, state.get("script", {})):
            raise NotTakenError(f"{otherwise}: this process would not do in a step what they do")
        self._taken, self.taken_until = state, int(state["until"])
        try:
            for optimizer, groups in zip(self._optimizers, state["optimizers"], strict=True):
                if groups is not None and groups != self._groups(optimizer):
                    self._regroup(optimizer, groups)
            self._run.load_state_dict(state["run"])
            self._take_trained(state)
            self._check_schedulers(state["yielded_groups"])
        except Exception as error:
            if is_of_script(error) or isinstance(error, _MAY_PASS):
                raise
            raise NotTakenError(
                f"the others' state does not fit: {one_line(_said(error), _WHY_CHARACTERS)}. The script has changed "
                "what it registered: a layer, a parameter or a group that comes on the way has to be there before "
                "run.steps(), frozen until its time (docs/going-on.md)"
            ) from (None if isinstance(error, _OF_TORCH) else error)

    def _take_trained(self, state: Mapping[str, Any]) -> None:
        self._trainable.load_state_dict(state["model"])
        for other, part in self._parts_of_others(state):
            other.load_state_dict(part)
        self._values.load_state_dict(state["values"])

    def _values_and_groups(self) -> dict[str, Any]:
        groups = [self._groups(optimizer) for optimizer in self._optimizers]
        return {"values": self._values.state_dict(), "optimizers": groups}

    def _check_schedulers(self, yielded_groups: Sequence[int]) -> None:
        """Raises ValueError for one that would fail in its next step: functions are in no state.

        The script may be about to add a group and its function, as the others did in this step: ``yielded_groups``.
        """
        yielded = {id(one): count for one, count in zip(self._optimizers, yielded_groups, strict=True)}
        for each in self._schedulers:
            functions, groups = getattr(each, "lr_lambdas", None), len(each.optimizer.param_groups)
            if functions is not None and len(functions) not in {groups, yielded.get(id(each.optimizer))}:
                has = counted(len(functions), "function", "functions")
                raise ValueError(f"{type(each).__name__} has {has} for {groups} groups of its optimizer")

    def rewind(self) -> None:
        """Let the script of a newcomer do what the others did in their step before its first micro-batch.

        It draws what they drew, and adds to its optimizers the groups that they added, which are refused twice.
        """
        if self._taken is not None:
            self._randomness.rewind(self._taken["yielded"])
            for optimizer, count in zip(self._optimizers, self._taken["yielded_groups"], strict=True):
                del optimizer.param_groups[count:]

    def load(self) -> None:
        """Takes over once more what was taken last, if that is not forgotten: the script may have changed it."""
        if self._taken is not None:
            self.load_state_dict(self._taken)

    def load_again(self) -> None:
        """Takes over once more what was taken last, if that was not done, and forgets it.

        It is that of a member in its step. What scripts do before a step is in it, and a newcomer's does it again.
        """
        self.load()
        self.forget()

    def forget(self) -> None:
        """Takes over nothing once more: this script has not done what is in the state, and will."""
        self._taken = None

    def _group_counts(self) -> list[int]:
        return [len(optimizer.param_groups) for optimizer in self._optimizers]

    def _groups(self, optimizer: Optimizer) -> Groups | None:
        """None if it has a parameter that the model has not."""
        place = {id(parameter): position for position, parameter in enumerate(self._trainable.parameters)}
        groups = [[place.get(id(each), -1) for each in group["params"]] for group in optimizer.param_groups]
        return None if any(-1 in group for group in groups) else groups

    def _regroup(self, optimizer: Optimizer, groups: Groups) -> None:
        """Give the optimizer as many groups, of these parameters; all else of a group comes with its state."""
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
            elif "param_names" in optimizer.param_groups[0]:  # it takes none without names
                optimizer.add_param_group({"params": [(self._trainable.name(each), each) for each in params]})
            else:
                optimizer.add_param_group({"params": params})
