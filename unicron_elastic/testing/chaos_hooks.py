"""Finds the phases of one step in a script that knows nothing of us.

Hooks are in place only during the step that is watched. What each phase hangs on:

- forward: torch's global forward hooks, at the outermost module and with gradients on, so no evaluation is meant.
- backward: ``torch.autograd.backward``, which ``Tensor.backward`` calls, and a hook on the loss.
- reduction: ``torch.distributed.all_reduce`` and ``reduce_scatter_tensor``, once a backward pass of the step has begun.
  DistributedDataParallel reduces in C++; for the watched step it gets torch's own ``allreduce_hook``, which does the
  same through the function. One that has a hook of the script's own keeps it, and is seen if that calls the function.
- optimizer: torch's global hook before ``Optimizer.step``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from unicron_elastic.compat.loaded import C10D
from unicron_elastic.testing.chaos_plan import ChaosPhase
from unicron_elastic.testing.traffic import wait_until_moving

REDUCTIONS = frozenset({ChaosPhase.BEFORE_REDUCE, ChaosPhase.DURING_REDUCE, ChaosPhase.AFTER_REDUCE})
_FUNCTIONS = ("all_reduce", "reduce_scatter_tensor")


class PhaseWatch:
    """Counts the phases of one step, and tells each time one comes."""

    def __init__(
        self,
        expects: Callable[[ChaosPhase, int], bool],
        arrive: Callable[[ChaosPhase, int, str], None],
        skips_next: Callable[[], bool],
    ) -> None:
        """``expects`` says whether the nth coming of a phase matters, ``arrive`` is told of it with details in words.

        ``skips_next`` is asked when a reduction is to begin; true leaves it out.
        """
        self._expects = expects
        self._arrive = arrive
        self._skips_next = skips_next
        self._counts: Counter[ChaosPhase] = Counter()
        self._depth = 0
        self._in_backward = False
        self._unsynced: Any = None  # a DistributedDataParallel whose reduction is being left out
        self._undo: list[Callable[[], object]] = []

    def install(self, *, with_reductions: bool) -> None:
        """Puts the hooks in."""
        modules, optimizers = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
        forward = functools.partial(self._before_forward, with_reductions)
        self._undo = [
            modules.register_module_forward_pre_hook(forward).remove,
            modules.register_module_forward_hook(self._after_forward, always_call=True).remove,
            optimizers.register_optimizer_step_pre_hook(self._before_optimizer).remove,
            self._watch_backward(),
        ]

    def remove(self) -> None:
        """Takes the hooks out."""
        self._sync_again()
        for undo in self._undo:
            undo()
        self._undo = []

    def reduce(self, original: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        """Does the reduction ``original`` with the arguments ``call``, or leaves it out."""
        if not (self._in_backward or self._counts[ChaosPhase.BACKWARD]):
            return original(*call.args, **call.kwargs)  # of a loss for the log, say; no gradients are there yet
        tensor = next(iter(call.arguments.values()))
        is_async = bool(call.arguments.get("async_op", False))
        if self._skips_next():
            return _Skipped(tensor) if is_async else None
        self._comes(ChaosPhase.BEFORE_REDUCE)
        if self._is_awaited(ChaosPhase.DURING_REDUCE):
            call.arguments["async_op"] = True
            work, moved = wait_until_moving(lambda: original(*call.args, **call.kwargs), tensor)
            self._comes(ChaosPhase.DURING_REDUCE, f" after {moved:,} bytes" if moved else "")
        else:
            self._counts[ChaosPhase.DURING_REDUCE] += 1
            work = original(*call.args, **call.kwargs)
        if work is not None and (not is_async or self._is_awaited(ChaosPhase.AFTER_REDUCE)):
            work.wait()
        self._comes(ChaosPhase.AFTER_REDUCE)
        return work if is_async else None

    def _is_awaited(self, phase: ChaosPhase) -> bool:
        return self._expects(phase, self._counts[phase] + 1)

    def _comes(self, phase: ChaosPhase, details: str = "") -> None:
        self._counts[phase] += 1
        if self._expects(phase, self._counts[phase]):
            self._arrive(phase, self._counts[phase], details)

    def _before_forward(self, with_reductions: bool, module: Any, _args: Any) -> None:
        is_training = sys.modules["torch"].is_grad_enabled()
        if with_reductions and is_training:
            distributed = sys.modules.get("torch.nn.parallel.distributed")
            if distributed is not None and isinstance(module, distributed.DistributedDataParallel):
                self._before_ddp(module)
        if self._depth == 0 and is_training and not self._in_backward:  # a checkpoint's second forward does not count
            self._comes(ChaosPhase.FORWARD)
        self._depth += 1

    def _after_forward(self, _module: Any, _args: Any, _output: Any) -> None:
        self._depth = max(0, self._depth - 1)  # a module may have been on its way when the hooks went in

    def _before_ddp(self, module: Any) -> None:
        if module is self._unsynced:
            self._sync_again()
        if module.require_backward_grad_sync and self._skips_next():
            module.require_backward_grad_sync = False  # what its no_sync() does
            self._unsynced = module
        elif hasattr(module, "reducer"):
            _reduce_in_python(module)

    def _sync_again(self) -> None:
        if self._unsynced is not None:
            # Without the second one, this rank alone would leave out the next broadcast of buffers as well.
            self._unsynced.require_backward_grad_sync = self._unsynced.require_forward_param_sync = True
            self._unsynced = None

    def _before_optimizer(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._comes(ChaosPhase.OPTIMIZER)

    def _watch_backward(self) -> Callable[[], None]:
        autograd: Any = sys.modules["torch.autograd"]
        original = autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._in_backward = True
            # Inside of the pass where that is possible: torch itself is then what is interrupted.
            root: Any = tensors if not isinstance(tensors, (list, tuple)) else next(iter(tensors), None)
            is_tensor = isinstance(root, sys.modules["torch"].Tensor)
            hook = (
                root.register_hook(lambda _: self._comes(ChaosPhase.BACKWARD))
                if is_tensor and root.requires_grad
                else None
            )
            try:
                if hook is None:
                    self._comes(ChaosPhase.BACKWARD)
                return original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
                if hook is not None:
                    hook.remove()

        def undo() -> None:
            if autograd.backward is backward:
                autograd.backward = original

        autograd.backward = backward
        return undo


class Reductions:
    """Stands in for torch's functions from the start, for scripts that import them by name; idle without a watch."""

    def __init__(self) -> None:
        self.watch: PhaseWatch | None = None

    def install(self) -> None:
        """Puts wrappers in place of the functions, if this torch has them."""
        public, private = sys.modules.get("torch.distributed"), sys.modules.get(C10D)
        for name in _FUNCTIONS:
            original = getattr(private, name, None)
            if original is not None:
                wrapper = self._wrap(original)
                setattr(private, name, wrapper)
                setattr(public, name, wrapper)

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def reduce(*args: Any, **kwargs: Any) -> Any:
            if self.watch is None:
                return original(*args, **kwargs)
            return self.watch.reduce(original, signature.bind(*args, **kwargs))

        return reduce


def _reduce_in_python(module: Any) -> None:
    """Gives a DistributedDataParallel that reduces in C++ torch's hook that does the same in Python."""
    from unicron_elastic.compat.groups import reduce_in_python

    try:
        reduce_in_python(module)
    except RuntimeError:
        pass  # it has one: ours, or the script's own


class _Skipped:
    """Stands for the work of a reduction that was left out."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def get_future(self) -> Any:
        """Done, with the tensor as it was."""
        from torch.futures import Future

        future: Any = Future()
        future.set_result([self._tensor])
        return future
