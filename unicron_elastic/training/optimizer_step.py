"""One optimizer step of a run: its micro-batches, those of lost ranks included, and its reduced gradients."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from unicron_elastic.training.engine import Engine
from unicron_elastic.training.step.wrong_use import WrongUseError

_NOT_OVER = "the losses of a step are known when 'for index in step' has ended"


class Step:
    """Iterate over it for the micro-batches that this rank is to compute; when that ends, ``p.grad`` is reduced."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = engine.state
        self._index: int | None = None
        self._has_begun = False
        self._has_failed = False  # a backward pass
        self._losses: Tensor | None = None
        self._weight: float | None = None  # of all micro-batches

    def __iter__(self) -> Iterator[int]:
        """Yields indices of the global batch, more of them when a peer is lost, each once.

        Every one must be followed by ``backward``. Raises RuntimeError otherwise, or for the second time.
        """
        if self._has_begun:
            raise WrongUseError("a step is iterated over once: take the next one from run.steps()")
        self._has_begun = True
        engine = self._engine
        taken = 0
        try:
            queue = deque(engine.begin_step())
            while True:
                while queue:
                    self._index = queue.popleft()
                    engine.begin_micro_batch(self._index)
                    taken += 1
                    yield self._index
                    self._check_computed()
                more = engine.reduce()
                if more is None:
                    break
                queue.extend(more)
            self._check_number()
            self._losses, self._weight = engine.end_step()
        except GeneratorExit:  # nothing can be raised here: what the script does next is refused
            engine.guard.leave(self._number, taken)
            raise
        finally:
            engine.guard.end()

    def _check_number(self) -> None:
        if self._engine.state != self._number:
            raise RuntimeError(f"this rank began with step {self._number}, and the others with {self._engine.state}")

    def _check_computed(self) -> None:
        if self._has_failed:
            raise WrongUseError(
                f"the backward pass of micro-batch {self._index} failed and its exception was caught: its gradient is "
                "not whole, and cannot be taken out of the sum; let the exception end this process, which is replaced"
            )
        if self._index is not None:
            raise WrongUseError(f"step.backward(loss) was not called for micro-batch {self._index}")

    @property
    def number(self) -> int:
        """0 for the first. A newcomer's first is the one that the others are in."""
        return self._number

    @property
    def is_over(self) -> bool:
        """Whether its gradients are reduced."""
        return self._losses is not None

    def backward(self, loss: Tensor, *, weight: Tensor | float | None = None) -> None:
        """Computes the gradients of the micro-batch that was yielded last.

        ``loss`` is its mean, a scalar; the gradients of the step are those of the mean over all micro-batches. With a
        ``weight``, as how many tokens it has, ``loss`` is its sum, and the gradients of the step are those of the sum
        of all losses, divided by the sum of all weights. All micro-batches of a step have one, or none has. With a
        GradScaler the loss is scaled here.

        Raises TypeError for what is no scalar, ValueError for a weight that is negative or not finite, and RuntimeError
        without a micro-batch, for the second time, for a loss without a graph, or if gradients were changed since the
        one before.
        """
        if self._index is None:
            raise WrongUseError("step.backward(loss) belongs once into each round of 'for index in step'")
        if self._has_failed:
            self._check_computed()
        scalar, of = _scalar(loss), None if weight is None else _weight(weight)
        self._has_failed = True  # until it is known to be well
        self._engine.backward(self._index, scalar, of)
        self._index, self._has_failed = None, False

    @property
    def losses(self) -> Tensor:
        """The loss of each micro-batch of the global batch, (micro_batches,), fp32, when the loop has ended."""
        if self._losses is None:
            self._engine.guard.check_outside(_NOT_OVER)
            raise WrongUseError(_NOT_OVER)
        return self._losses

    @property
    def loss(self) -> float:
        """The mean loss of the global batch, the same on all ranks, when the loop has ended.

        With weights it is the sum of the losses, divided by the sum of the weights.
        """
        losses = self.losses.double()
        return float(torch.mean(losses) if self._weight is None else torch.sum(losses) / self._weight)

    @property
    def weight(self) -> float | None:
        """The sum of the weights of the global batch, when the loop has ended; None if it has none."""
        _ = self.losses
        return self._weight


def _weight(weight: Tensor | float) -> float:
    """Return a weight as a number. Raises TypeError for what is none, and ValueError for one that no mean can have."""
    try:
        if isinstance(weight, str | bytes):  # which Python would read as a number
            raise TypeError
        number = float(weight.detach() if isinstance(weight, Tensor) else weight)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"step.backward(loss, weight=...) takes one number, as how many tokens the loss is of, and got "
            f"{type(weight).__name__}"
        ) from None
    if not 0 <= number < math.inf:
        raise ValueError(f"step.backward(loss, weight=...) takes a finite weight of 0 or more, and got {number}")
    return number


def _scalar(loss: Tensor) -> Tensor:
    """The loss, without dimensions. Raises TypeError and RuntimeError for what has no gradients."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"step.backward(loss) takes the loss as a tensor, and not as {type(loss).__name__}")
    if loss.numel() != 1 or not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        raise TypeError(
            f"step.backward(loss) takes the mean loss of a micro-batch, one real number, and got {kind} of shape "
            f"{list(loss.shape)}"
        )
    if not loss.requires_grad:
        raise WrongUseError(
            "step.backward(loss) got a loss that depends on no parameter that is trained: it was detached, or computed "
            "under torch.no_grad()"
        )
    return loss.reshape(())
