"""Lets Megatron-Core train on the CPU over gloo, for tests and examples; does nothing where CUDA is available.

Megatron-Core takes a GPU for granted: it spells the device "cuda", asks tensors whether their type is a CUDA type, and
keeps random states of the GPU. This module stands in for that placement and for nothing else: no computation, schedule,
collective or optimizer is replaced. There are four kinds of places, each seen in megatron-core 0.16.1:

* ``torch.cuda.current_device`` is the CPU and ``torch.cuda.synchronize`` returns at once, in the whole process. Without
  CUDA both could only raise.
* ``CUDA_SPELLED``: functions that make tensors on "cuda", and that run all the time or are imported by name elsewhere.
  Their modules get a ``torch`` that makes these tensors on the CPU.
* ``CUDA_ASKED``: functions that take only tensors of CUDA types, or move tensors to the GPU. While one of them runs,
  tensors on the CPU say that their type is a CUDA type, moving them leaves them where they are, and "cuda" is the CPU.
* ``RANDOM``: the tracker of random states and the two functions under it use torch's generator of the CPU. It is the
  only one: what is the default state of the GPU elsewhere is the state that ``torch.manual_seed`` sets.

Not covered: fp16 with its loss scaling, expert and context parallelism, several instances of the distributed optimizer,
CUDA graphs, Megatron's FSDP. Sequence parallelism needs Transformer Engine or Apex anyway.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, reduce, wraps
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from megatron.core import __version__ as installed_version
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, initialize_rng_tracker
from torch import Tensor
from torch.overrides import TorchFunctionMode

KNOWN_VERSION = "0.16.1"

# Of a TransformerConfig, over whatever a GPU gets: no kernels of Apex or Transformer Engine, and no fusions, since each
# would first spend seconds in torch.compile.
CPU_CONFIG: Mapping[str, Any] = MappingProxyType(
    {
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cross_entropy_loss_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
)


class CpuStatesTracker(CudaRNGStatesTracker):  # type: ignore[misc]
    """Named states of the CPU's generator, such as the one that differs between tensor-parallel ranks."""

    _current_state_name: str

    def add(self, name: str, seed: int) -> None:
        """Begin a state; neither the name nor the seed may have been used."""
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(f"there is a random state {name}, or one of seed {seed}")
        self.seeds_.add(seed)
        self.set_states(self.states_ | {name: torch.Generator().manual_seed(seed).get_state()})

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from a named state, then go on with the state that was there before."""
        outer_name, outer_state = self._current_state_name, torch.get_rng_state()
        if outer_name in self.states_:
            self.states_[outer_name] = outer_state
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(self.states_.get(outer_name, outer_state))
            self._current_state_name = outer_name


def _get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Tensor:  # noqa: ARG001
    """Return the state of the CPU's generator; the arguments choose among the states of GPUs."""
    return torch.get_rng_state()


def _set_state(new_state: Tensor, device: object = None, graph_safe: bool = False) -> None:  # noqa: ARG001
    """Set the state of the CPU's generator."""
    torch.set_rng_state(new_state)


CUDA_SPELLED = (
    "optimizer.clip_grads:count_zeros_fp32",
    "optimizer.clip_grads:get_grad_norm_fp32",
    "pipeline_parallel.schedules:forward_backward_no_pipelining",
    "pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    "pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "transformer.utils:get_default_causal_mask",
    "transformer.utils:get_sliding_window_causal_mask",
    "utils:local_multi_tensor_l2_norm",
)
CUDA_ASKED = (
    "dist_checkpointing.exchange_utils:exchange_loaded_tensors_broadcast",
    "dist_checkpointing.exchange_utils:exchange_loaded_tensors_gather_rounds",
    "dist_checkpointing.strategies.state_dict_saver:verify_global_md_reuse",
    "models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer",
    "optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    "optimizer.distrib_optimizer:DistributedOptimizer.__init__",
    "optimizer.distrib_optimizer:DistributedOptimizer.get_parameter_state_dp_zero",
    "optimizer.optimizer:FP32Optimizer.__init__",
    "optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    "optimizer.optimizer:clip_grad_by_total_norm_fp32",  # the name under which the optimizers call it
    "rerun_state_machine:RerunStateMachine._reduce_any",
)
RANDOM: Mapping[str, Any] = MappingProxyType(
    {
        "tensor_parallel.random:CudaRNGStatesTracker": CpuStatesTracker,
        "tensor_parallel.random:_get_cuda_rng_state": _get_state,
        "tensor_parallel.random:_set_cuda_rng_state": _set_state,
    }
)


@cache
def stand_in() -> bool:
    """Place Megatron-Core on the CPU if there is no GPU; call it before the model is made.

    Returns:
        Whether it did: False where CUDA is available. Calling it again changes nothing.

    Raises:
        RuntimeError: this version of megatron-core lacks one of the places; then nothing is replaced.
    """
    if torch.cuda.is_available():
        return False
    spelled = [_find(place) for place in CUDA_SPELLED]
    asked = [_find(place) for place in CUDA_ASKED]
    random = [(*_find(place), own) for place, own in RANDOM.items()]
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None  # noqa: ARG005
    for module, _ in spelled:
        module.torch = _TorchOnCpu()
    for owner, name in asked:
        setattr(owner, name, _with_cuda_types(getattr(owner, name)))
    for module, name, own in random:
        setattr(module, name, own)
    initialize_rng_tracker(force_reset=True)
    return True


def _find(place: str) -> tuple[Any, str]:
    """Return the module or class that holds a place, and the place's name in it."""
    module, _, path = place.partition(":")
    *parents, name = path.split(".")
    try:
        owner = reduce(getattr, parents, importlib.import_module(f"megatron.core.{module}"))
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"megatron-core {installed_version} has no {place}, which the CPU stand-in knows from {KNOWN_VERSION}"
        ) from error
    return owner, name


class _TorchOnCpu(ModuleType):
    """``torch`` for one module: it makes on the CPU what the module asks for on "cuda"."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("ones", "tensor", "zeros"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(make)
    def made(*args: Any, **options: Any) -> Tensor:
        return make(*args, **_placed(options))

    return made


def _placed(options: dict[str, Any]) -> dict[str, Any]:
    """Replace the device "cuda" among keyword arguments."""
    return options | {"device": "cpu"} if options.get("device") == "cuda" else options


class _CudaTypes(TorchFunctionMode):  # type: ignore[misc]
    """Within it, tensors on the CPU say that their type is one of CUDA, and nothing is moved."""

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.cuda:
            return args[0]
        result = function(*args, **_placed(kwargs or {}))
        if function is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _with_cuda_types(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with _CudaTypes():
            return function(*args, **options)

    return run
