"""The line that a Megatron-Core training script adds: what it calls in the place of Megatron's forward-backward.

Nothing of Megatron-Core is changed but these, on the script's own objects: ``config.finalize_model_grads_func``,
``start_grad_sync`` and ``finish_grad_sync`` of each bucket group, and ``optimizer.step`` (seen in 0.16.1).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from unicron_elastic.megatron.buckets import Buckets
from unicron_elastic.megatron.checkpoint import Ranks, save
from unicron_elastic.megatron.groups import Groups, Unsupported
from unicron_elastic.megatron.members import Members, device_of
from unicron_elastic.megatron.random_states import RANDOM_STATES, RandomStates
from unicron_elastic.megatron.run import MegatronRun
from unicron_elastic.megatron.sharded import OptimizerSettings, Sharded
from unicron_elastic.megatron.state import State
from unicron_elastic.training.group.membership import membership
from unicron_elastic.training.registered import with_state
from unicron_elastic.worker.worlds import link

SEEN = "0.16"  # of megatron-core: where all places that are used here were seen


class ForwardBackward:
    """Called as Megatron-Core's own: it trains one step, with the micro-batches that fall to this rank."""

    def __init__(
        self,
        chunks: list[Any],
        optimizer: Any,
        state: dict[str, Any],
        run: MegatronRun,
        micro_batch: Callable[[int, int], Any],
        *,
        random_states: RandomStates,
    ) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._state = state
        self._run = run
        self._micro_batch = micro_batch
        self._passes = get_forward_backward_func()
        self._random_states = random_states
        self._tokens = 0

    @property
    def step(self) -> int:
        """How many optimizer steps the parameters have behind them: a newcomer begins where the others are."""
        return self._run.step

    @property
    def is_over(self) -> bool:
        """Whether all steps are made: a newcomer needs fewer rounds than the others for that."""
        return self._run.is_over

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that train now, for reports between steps: all of them must ask for it.

        If a rank is lost meanwhile it is what this rank has itself, and ``is_partial``.
        """
        return self._run.total(tensor)

    @property
    def is_partial(self) -> bool:
        """Whether the latest ``sum`` is what this rank has itself, as a rank was lost before all had the sum."""
        return self._run.is_partial

    def save(self, directory: str | os.PathLike[str], *, keep: int = 2) -> bool:
        """Writes a sharded checkpoint between two steps; all who train must ask for it. ``load`` reads it.

        ``directory``: a folder that all ranks see; its newest ``keep`` checkpoints stay. False if it could not be
        written, or if a rank was lost or came meanwhile: that is said in a sentence, and the training goes on.
        """
        written: list[bool] = []

        def part(members: Members) -> None:
            ranks = Ranks(members.sum, members.waiter.wait)
            written.append(
                save(directory, self.step, self._chunks, self._optimizer, keep=keep, ranks=ranks, **self._state)
            )

        is_done = self._run.together(part)
        if not is_done and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                f"unicron: the checkpoint of step {self.step} was given up, as ranks were lost or joined meanwhile. "
                "The training goes on.\n"
            )
        return is_done and written[0]

    def __call__(self, *, forward_only: bool = False, **arguments: Any) -> list[Any]:
        """Do what ``get_forward_backward_func()``'s does. ``data_iterator``, ``num_microbatches``: for evaluation only.

        Returns what the passes of this rank gave; nothing when all steps of the run are made, or for an evaluation in
        which another rank of this replica was lost.
        """
        if forward_only:
            return self._run.evaluate(lambda: list(self._passes(forward_only=True, **arguments)))
        given = self._run.train(partial(self._pass, arguments))
        if not self._run.is_over:
            self._run.scale([buffer for chunk in self._chunks for buffer in chunk.buffers])
        return given

    def _pass(self, arguments: dict[str, Any], indices: list[int]) -> tuple[list[Any], int]:
        step = self._run.step
        iterators = [map(partial(self._micro_batch, step), indices) for _ in self._chunks]
        own = {"num_microbatches": len(indices), "data_iterator": iterators if len(iterators) > 1 else iterators[0]}
        self._tokens = 0
        with self._random_states.seeding(arguments["forward_step_func"], step, indices) as forward_step:
            return list(self._passes(**{**arguments, **own, "forward_step_func": forward_step})), self._tokens

    def note_tokens(self, _chunks: Any, tokens: Any = None, **_arguments: Any) -> None:
        """Count tokens in the place of ``finalize_model_grads``, right after the passes."""
        self._tokens = int(tokens)


def attach(
    model: Any,
    optimizer: Any,
    *,
    steps: int,
    micro_batches: int,
    micro_batch: Callable[[int, int], Any],
    step: int = 0,
    timeout_s: float = 600.0,
    reproducible: bool = False,
    **state: Any,
) -> ForwardBackward:
    """Lets the script survive the loss of ranks; returns what to call instead of Megatron-Core's function.

    ``model``: the chunks of this rank, in Megatron-Core's DistributedDataParallel. ``steps``: how many the whole run
    makes, of ``micro_batches`` each, over all replicas together; ``step``: how many are made already, if the script has
    loaded a checkpoint. ``micro_batch(step, index)`` gives what a forward step takes from the data iterator, the same
    on each rank that asks. ``state``: what else a newcomer needs, by name, with ``state_dict`` and ``load_state_dict``,
    such as the scheduler, or a dict. ``timeout_s`` is that of collectives. ``reproducible``: gradients are summed up
    and reduced in fp64 and rounded once, so that whoever is lost, parameters are those of an undisturbed run, bit by
    bit, where Megatron-Core's own are the same from run to run; that takes 12 bytes more per parameter, and twice the
    bytes in reductions.

    Raises Unsupported, a ValueError, for what cannot go on from a failed step, and TypeError for a state that has none.
    """
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    config = get_model_config(chunks[0])
    _check(chunks, config, optimizer, steps, micro_batches)
    others = {name: with_state(name, each) for name, each in state.items()}
    if reproducible and config.gradient_accumulation_fusion:
        raise Unsupported("reproducible sums are made in fp64, and gradient_accumulation_fusion adds in fp32")
    backend = "nccl" if device_of(chunks).type == "cuda" else "gloo"
    groups = Groups([*chunks, optimizer, *state.values()], backend, timeout_s)
    if micro_batches % groups.unit:
        raise ValueError(f"micro_batches must be a multiple of {groups.unit}, the stages of an interleaved pipeline")
    members = Members(membership(lambda _key: {}, backend), groups, micro_batches)
    to_agent = link()
    if to_agent is not None:
        to_agent.on_serve = None
        to_agent.joins_end, to_agent.must_break = True, members.must_break
    finalize = config.finalize_model_grads_func or finalize_model_grads
    random_states = RandomStates(chunks, device_of(chunks))
    random_states.agree()
    kept = {**others, RANDOM_STATES: random_states}
    sharded = Sharded(chunks, distributed, members) if (distributed := _distributed(optimizer)) is not None else None
    run = MegatronRun(
        members=members,
        buckets=Buckets(chunks, members.waiter, groups.keep, is_wide=reproducible),
        state=State(chunks, optimizer if sharded is None else OptimizerSettings(sharded), kept),
        finish=lambda: finalize(chunks, None),
        counts_tokens=parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0,
        step=step,
        steps=steps,
        device=device_of(chunks),
        sharded=sharded,
        is_reproducible=reproducible,
    )
    forward_backward = ForwardBackward(chunks, optimizer, others, run, micro_batch, random_states=random_states)
    config.finalize_model_grads_func = forward_backward.note_tokens
    optimizer.step = partial(_step, run, optimizer.step)
    optimizer.get_grad_norm = partial(run.norm, optimizer.get_grad_norm)
    return forward_backward


def _step(run: MegatronRun, make: Callable[[], Any]) -> Any:
    """Step in the place of the optimizer's. As there: whether it was made, the gradients' norm, how many are zero."""
    made = run.make_step(make)
    return (True, run.known_norm, None) if made is None else made


def _distributed(optimizer: ChainedOptimizer) -> DistributedOptimizer | None:
    """The distributed optimizer, if it is one. Raises Unsupported if there are several."""
    found = [each for each in optimizer.chained_optimizers if isinstance(each, DistributedOptimizer)]
    if not found:
        return None
    if len(optimizer.chained_optimizers) > 1:
        raise Unsupported("several distributed optimizers in one cannot go on from a failed step")
    return found[0]


def _check(chunks: Sequence[Any], config: Any, optimizer: Any, steps: int, micro_batches: int) -> None:
    found = version("megatron-core")
    if not found.startswith(SEEN + "."):
        raise Unsupported(f"megatron-core {found} is not known here: {SEEN} is")
    if steps < 1 or micro_batches < 1:
        raise ValueError(f"steps and micro_batches must be 1 or more, got {steps} and {micro_batches}")
    if not all(hasattr(chunk, "bucket_groups") for chunk in chunks):
        raise Unsupported("the model must be in megatron.core.distributed.DistributedDataParallel")
    if any(chunk.expert_parallel_bucket_groups for chunk in chunks):
        raise Unsupported("mixtures of experts cannot go on from a failed step")
    if not config.calculate_per_token_loss:
        raise Unsupported(
            "set calculate_per_token_loss=True, and have the loss function return (sum of losses, tokens, report): "
            "gradients divided by anything but the tokens of the whole step depend on how many ranks there are"
        )
    if not isinstance(optimizer, ChainedOptimizer):
        raise Unsupported(f"the optimizer must be what get_megatron_optimizer makes, got {type(optimizer).__name__}")
    ddp_config = chunks[0].ddp_config
    if ddp_config.overlap_param_gather:
        raise Unsupported("overlap_param_gather cannot go on from a failed step: set it to False")
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise Unsupported("num_distributed_optimizer_instances must be 1: copies of its parts are made here")
    if optimizer.config.log_num_zeros_in_grad or optimizer.config.fp16:
        raise Unsupported("log_num_zeros_in_grad and fp16 cannot go on from a failed step: set them to False")
