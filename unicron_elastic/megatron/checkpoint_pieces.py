"""What of a Megatron-Core model and its optimizer stands in a sharded checkpoint, in terms that no layout changes.

Megatron describes each parameter as a piece of a tensor of the whole model (``sharded_state_dict``). What the
optimizer has of it, its fp32 main parameter and Adam's moments, is described as the same piece of further tensors,
under the names that Megatron's ``fully_reshardable`` format has for them; the same for the distributed optimizer
and for others, so that each can read what the other wrote. Megatron's own descriptions of the optimizer are not
used (0.16.1): plain ones name main parameters otherwise, and what is loaded shares one count of steps between all
parameters, which torch's Adam then advances once for each.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, param_group_identifier_keys
from torch import Tensor

from unicron_elastic.megatron.members import device_of
from unicron_elastic.megatron.state_part import begin_state

Wait = Callable[[Any], None]  # for a collective that is under way
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Held:
    """What this rank's optimizer has of a parameter: ``main``, flat or not, is elements [begin, end) of it."""

    begin: int
    end: int
    main: Tensor
    inner: Any

    def rows(self, kinds: Sequence[str]) -> list[Tensor]:
        """Flat, and in place."""
        state = begin_state(self.inner, self.main)
        return [(self.main if kind == "param" else state[kind]).detach().view(-1) for kind in kinds]


def given(chunks: list[Any], optimizer: Any, wait: Wait) -> dict[str, Any]:
    """What this rank writes; together with all others. Raises what a collective raises.

    Every replica writes its share of the parameters: whole ones, put together from the parts of the distributed
    optimizer.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    is_parted = any(isinstance(each, DistributedOptimizer) for each in _optimizers(optimizer)) and group.size() > 1
    held = _held(optimizer)
    state: dict[str, Any] = {"rows": {}}
    elements = [0] * group.size()  # that each replica writes
    for name, pieces in _pieces(chunks):
        state[name] = {}
        for key, piece in pieces.items():
            if not isinstance(piece.data, torch.nn.Parameter):
                state[name][key] = piece
                continue
            if any(piece.replica_id[:-1]):  # another seat has the same, and writes it
                continue
            owner = elements.index(min(elements))
            elements[owner] += piece.data.numel()
            is_mine = group.rank() == owner
            if is_mine:
                state[name][key] = replace(piece, replica_id=_MAIN, data=piece.data.detach())
            if not piece.data.requires_grad:
                continue
            kinds = _kinds(piece.data)
            rows = _rows(piece.data, held.get(piece.data), kinds)
            if is_parted:
                wait(dist.reduce(rows, group_dst=owner, group=group, async_op=True))
            if is_mine:
                state["rows"] |= {
                    f"{name}.{key}.{kind}": _row(piece, kind, row.cpu(), _MAIN)
                    for kind, row in zip(kinds, rows, strict=True)
                }
    steps = torch.tensor([_steps(held)], dtype=torch.float64, device=device_of(chunks))
    wait(dist.all_reduce(steps, op=dist.ReduceOp.MAX, async_op=True))
    return state | {"optimizer": {"steps": float(steps), "groups": [_settings(each) for each in _groups(optimizer)]}}


def asked(chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """What this rank reads: into new tensors, so that one that cannot be read changes nothing."""
    held = _held(optimizer)
    state: dict[str, Any] = {"rows": {}}
    for name, pieces in _pieces(chunks):
        state[name] = {
            key: replace(piece, data=torch.empty_like(piece.data, device="cpu", requires_grad=False))
            if isinstance(piece, ShardedTensor | ShardedTensorFactory)
            else piece
            for key, piece in pieces.items()
        }
        state["rows"] |= {
            f"{name}.{key}.{kind}": _row(piece, kind, torch.empty(piece.data.numel()), piece.replica_id)
            for key, piece in pieces.items()
            if piece.data is not None and piece.data in held
            for kind in _kinds(piece.data)
        }
    return state


def take(chunks: Sequence[Any], optimizer: Any, state: Mapping[str, Any]) -> None:
    """Takes over what was ``asked``."""
    held = _held(optimizer)
    steps, settings = state["optimizer"]["steps"], {_identity(each): each for each in state["optimizer"]["groups"]}
    for name, pieces in _pieces(chunks):
        for key, piece in pieces.items():
            if piece.data is None or piece.data not in held:
                continue
            own, kinds = held[piece.data], _kinds(piece.data)
            for kind, row in zip(kinds, own.rows(kinds), strict=True):
                row.copy_(state["rows"][f"{name}.{key}.{kind}"].view(-1)[own.begin : own.end])
            # One for each: torch's Adam counts in place.
            own.inner.state[own.main]["step"] = torch.tensor(steps, dtype=torch.float32)
    with torch.no_grad():
        for chunk, name in zip(chunks, _names(chunks), strict=True):
            chunk.module.load_state_dict(state[name])
    for group in _groups(optimizer):
        group.update(settings.get(_identity(group), {}))


_MAIN = (0, 0, 0)


def _names(chunks: Sequence[Any]) -> list[str]:
    """Name tensors as Megatron-LM does."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _pieces(chunks: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each chunk's name, and what Megatron says of its tensors."""
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        yield name, chunk.module.sharded_state_dict()


def _kinds(parameter: Tensor) -> tuple[str, ...]:
    """What the optimizer has of it besides its weights: in fp32 they are the main parameters themselves."""
    return _MOMENTS if parameter.dtype == torch.float32 else ("param", *_MOMENTS)


def _row(piece: Any, kind: str, row: Tensor, replica_id: Any) -> Any:
    data = row.view(piece.data.shape)
    changes: dict[str, Any] = {"key": f"optimizer.state.{kind}.{piece.key}", "data": data, "replica_id": replica_id}
    return replace(piece, **changes, **({"dtype": data.dtype} if isinstance(piece, ShardedTensor) else {}))


def _rows(parameter: Tensor, held: _Held | None, kinds: Sequence[str]) -> Tensor:
    """Return the state, of shape (kinds, elements of the parameter); zero where this rank's optimizer has nothing."""
    rows = torch.zeros(len(kinds), parameter.numel(), device=parameter.device)
    if held is not None:
        for row, own in zip(rows, held.rows(kinds), strict=True):
            row[held.begin : held.end] = own
    return rows


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _held(optimizer: Any) -> dict[Tensor, _Held]:
    """Return what is held, by parameter of the model."""
    found: dict[Tensor, _Held] = {}
    for each in _optimizers(optimizer):
        inner = each.optimizer
        if isinstance(each, DistributedOptimizer):
            for parameter, (group, order) in each.model_param_group_index_map.items():
                own = each._get_model_param_range_map(parameter)["param"]
                found[parameter] = _Held(own.start, own.end, inner.param_groups[group]["params"][order], inner)
            continue
        mains = {}
        if isinstance(each, Float16OptimizerWithFloat16Params):
            groups = zip(each.float16_groups, each.fp32_from_float16_groups, strict=True)
            mains = {main: p for models, own in groups for p, main in zip(models, own, strict=True)}
        for group in inner.param_groups:
            for main in group["params"]:
                found[mains.get(main, main)] = _Held(0, main.numel(), main, inner)
    return found


def _steps(held: Mapping[Tensor, _Held]) -> float:
    return max((float(each.inner.state[each.main].get("step", 0)) for each in held.values()), default=0.0)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for each in _optimizers(optimizer) for group in each.optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return that by which Megatron-Core knows a group again."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", module=r"megatron\.core")
