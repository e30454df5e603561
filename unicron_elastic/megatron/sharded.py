"""Megatron-Core's distributed optimizer (ZeRO-1), so that the loss of a replica loses no part of its state.

Each replica has one part of the optimizer's state, and its guardian, the next replica, makes the same steps with a copy
of it: for that it gets the part's gradients, once they are reduced and before the step is committed. So the copy is as
new as the part at any time, and nothing has to be undone or made again. That takes as much memory as the part itself,
and one gradient, 4 bytes per parameter of the part, from neighbour to neighbour each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
from torch import Tensor

from unicron_elastic.engine.protocol.replica_layout import Cut
from unicron_elastic.megatron.members import Members
from unicron_elastic.megatron.part_transfer import PartTransfer, Range, holders, shard, transfers
from unicron_elastic.megatron.rebuilding import find_groups, rebuild, spans_of
from unicron_elastic.megatron.state_part import StatePart, like


class Sharded:
    """Of one process. ``on_rebuilt`` is called when the gradient buffers were made anew."""

    def __init__(self, chunks: Sequence[Any], optimizer: DistributedOptimizer, members: Members) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._members = members
        self.on_rebuilt: Callable[[], None] = lambda: None
        self._parameters = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
        self._numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._buckets = spans_of(chunks, self._numbers)
        self.group_of = find_groups(optimizer, self._parameters)
        self._own = self._part((members.replicas, members.number))
        self._copy: StatePart | None = None  # of the part before
        self._former_own: StatePart | None = None  # how it was cut before, until the next step is committed
        self._former_copy: StatePart | None = None
        self._must_gather = False
        self._holds_parameters = False
        self.has_stepped = False  # since the gradients were exchanged
        self._install()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return those of the optimizer."""
        groups: list[dict[str, Any]] = self._optimizer.optimizer.param_groups
        return groups

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The parts that this one has."""
        return tuple(part.cut for part in (self._own, self._former_own) if part is not None and part.is_good)

    def begin(self) -> None:
        """Gives the guardian a copy, with all others who begin. Raises what a collective raises."""
        parts, number = self._own.cut
        if parts > 1:
            before = self._empty_copy((parts, (number - 1) % parts))
            into = torch.empty(StatePart.length(before.ranges), device=self._device)
            self._swap(self._own.rows(self._own.ranges), into)
            before.take(before.ranges, into)
            self._copy = before

    def begin_anew(self) -> None:
        """Begin as a newcomer, or after a wait: with nothing."""
        self._own.is_good = False
        self._copy = self._former_own = self._former_copy = None

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange_gradients(self) -> None:
        """Gives the guardian the gradients of this part, reduced but not divided. Raises what a collective raises."""
        self._former_own = self._former_copy = None
        self.has_stepped = False
        if self._copy is not None:
            own = self._own_gradients()
            length = sum(end - begin for _, begin, end in self._copy.ranges)
            into = torch.empty(length, dtype=own.dtype, device=self._device)
            self._swap(own, into)
            self._copy.take_gradients(into)

    def scale(self, factor: Tensor) -> None:
        """Divides the gradients of the copy as those of the part are."""
        if self._copy is not None:
            self._copy.scale_gradients(factor)

    def step_copy(self, norm: float) -> None:
        """Makes with the copy the step that was made with the part."""
        if self._copy is None:
            return
        self._copy.follow(self._own)
        self._copy.lay_gradients()
        most = self._optimizer.config.clip_grad
        if most > 0.0 and self._copy.mains:
            optimizers.clip_grad_by_total_norm_fp32(list(self._copy.mains), most, norm)
        self._copy.inner.step()

    @contextmanager
    def parameters_held(self) -> Iterator[None]:
        """Meanwhile an optimizer step does not gather the parameters: that is done when all have met."""
        self._holds_parameters = self._must_gather = True
        try:
            yield
        finally:
            self._holds_parameters = False

    def norm(self, cuts: Sequence[tuple[Cut, ...]] = (), factor: Tensor | None = None) -> float:
        """The norm of all gradients times ``factor``, the same for any number of parts; together with all who train.

        ``cuts``: what each member has; of parts whose replica is lost the copies count.
        """
        mine = self._own.cut
        sources = [self._members.index]
        if cuts:
            parts, sources = holders({member: cuts[member][:1] for member in self._members.in_seat()})
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        for number, source in enumerate(sources):
            if source == self._members.index:
                part = self._find((parts, number) if cuts else mine)
                if part is self._own:
                    part.take_gradients(self._own_gradients())
                part.lay_gradients(factor)
                for gradient in part.gradients_for_norm(self._optimizer):
                    total += gradient.double().square().sum()
        return float(self._members.sum(total).sqrt().float())

    def _own_gradients(self) -> Tensor:
        return torch.cat([self._parameters[n].main_grad.view(-1)[begin:end] for n, begin, end in self._own.ranges])

    # -- another number of parts --------------------------------------------------------------------------------------

    def settle(self, cuts: Sequence[tuple[Cut, ...]]) -> None:
        """Take, in a new world, the part that belongs to this replica now, its copy, and all parameters.

        ``cuts`` are the parts that each member has. Raises what a collective raises, and NoShardLeft.
        """
        column = self._members.in_seat()
        if any((len(column), number) not in cuts[member][:1] for number, member in enumerate(column)):
            self._cut_anew(column, {member: cuts[member] for member in column})
            self._must_gather = True
        if float(self._members.sum(torch.tensor([float(self._must_gather)], device=self._device))):
            self._must_gather = True  # until it is done
            self._optimizer._copy_main_params_to_model_params()
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
            self._must_gather = False

    def _cut_anew(self, column: Sequence[int], have: dict[int, Sequence[Cut]]) -> None:
        count, me = len(column), self._members.index
        wanted = [(member, (count, number)) for number, member in enumerate(column)]
        if count > 1:
            wanted += [(member, (count, (number - 1) % count)) for number, member in enumerate(column)]
        taken: list[tuple[PartTransfer, Tensor]] = []
        for each in transfers(self._buckets, have, wanted):
            if me not in (each.source, each.destination):
                continue
            if each.source == me:
                data = self._find(each.cut).rows(each.ranges)
                if each.destination != me:
                    self._members.send(data, each.destination)
            else:
                data = torch.empty(StatePart.length(each.ranges), device=self._device)
                self._members.receive(data, each.source)
            if each.destination == me:
                taken.append((each, data))
        self._members.sum(torch.zeros(1, device=self._device))  # all have all
        self._become((count, column.index(me)), taken)

    def _become(self, cut: Cut, taken: Sequence[tuple[PartTransfer, Tensor]]) -> None:
        """Makes the gradient buffers and the optimizer anew for part ``cut``, with what was taken."""
        parts, number = cut
        self._former_own, self._former_copy = self._own.detached() if self._own.is_good else None, self._copy
        sums = [parameter.main_grad.clone() for parameter in self._parameters]
        rebuild(self._chunks, self._optimizer, self.group_of, self._parameters)
        self.on_rebuilt()
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.main_grad.copy_(total)
        self._install()
        self._own = self._part(cut)
        self._copy = self._empty_copy((parts, (number - 1) % parts)) if parts > 1 else None
        for each, data in taken:
            target = self._own if each.target == cut else self._copy
            assert target is not None
            target.take(each.ranges, data)

    def _find(self, cut: Cut) -> StatePart:
        for part in (self._own, self._copy, self._former_own, self._former_copy):
            if part is not None and part.cut == cut and part.is_good:
                return part
        raise RuntimeError(f"part {cut[1]} of {cut[0]} of the optimizer's state is not here")

    # -- how it is made -----------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._parameters[0].device
        return device

    def _swap(self, tensor: Tensor, into: Tensor) -> None:
        """Gives something to the guardian, the replica after this one, and takes it from the replica before."""
        column = self._members.in_seat()
        number = column.index(self._members.index)
        self._members.swap(tensor, column[(number + 1) % len(column)], into, column[number - 1])

    def _install(self) -> None:
        def stepped(*_: Any) -> None:
            self.has_stepped = True

        for chunk in self._chunks:
            chunk.start_param_sync = partial(self._gather, chunk.start_param_sync)
        self._optimizer.optimizer.register_step_post_hook(stepped)

    def _gather(self, gather: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Gather in the place of Megatron's ``start_param_sync``, which waits for gloo without a time-out."""

        def gathered() -> None:
            with torch.no_grad():  # which is of a thread
                gather(*arguments, **options)

        if not self._holds_parameters:
            self._members.waiter.call(gathered)

    def _part(self, cut: Cut) -> StatePart:
        """The part that the distributed optimizer has. Raises RuntimeError if it is cut in another way than here."""
        optimizer = self._optimizer
        found: dict[int, tuple[Range, Tensor]] = {}
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            own = optimizer._get_model_param_range_map(parameter)["param"]
            number = self._numbers[parameter]
            found[number] = (number, own.start, own.end), optimizer.optimizer.param_groups[group]["params"][order]
        ranges = shard(self._buckets, cut)
        if sorted(found[number][0] for number in found) != sorted(ranges):
            raise RuntimeError("Megatron-Core cuts the optimizer's state in another way than is known here")
        return StatePart(cut, ranges, [found[each[0]][1] for each in ranges], optimizer.optimizer)

    def _empty_copy(self, cut: Cut) -> StatePart:
        ranges = shard(self._buckets, cut)
        inner = self._optimizer.optimizer
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in inner.param_groups]
        mains = []
        group_of = self.group_of
        for number, begin, end in ranges:
            main = torch.empty(end - begin, device=self._device)
            copy_tensor_model_parallel_attributes(main, self._parameters[number])
            if hasattr(self._parameters[number], "shared"):
                main.shared = self._parameters[number].shared
            mains.append(main)
            groups[group_of[number]]["params"].append(main)
        copy = like(inner)
        copy.param_groups = groups
        return StatePart(cut, ranges, mains, copy)


class OptimizerSettings:
    """What a newcomer needs of the optimizer besides its parts: learning rates, and the group of each parameter."""

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        groups = self._sharded.param_groups
        kept = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        return {"groups": kept, "group_of": list(self._sharded.group_of)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it over."""
        for group, settings in zip(self._sharded.param_groups, state_dict["groups"], strict=True):
            group.update(settings)
        self._sharded.group_of = [int(each) for each in state_dict["group_of"]]
