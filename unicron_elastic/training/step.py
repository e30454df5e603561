"""One optimizer step of a run: its micro-batches, those of lost ranks included, and its reduced gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from unicron_elastic.training.engine import Engine

__all__ = ["Step"]


class Step:
    """Iterate over it for the micro-batches that this rank is to compute; when that ends, ``p.grad`` is reduced."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number: int | None = None
        self._index: int | None = None
        self._losses: Tensor | None = None

    def __iter__(self) -> Iterator[int]:
        """Yields indices of the global batch, more of them when a peer is lost, each once.

        Every one must be followed by ``backward``. Raises RuntimeError otherwise.
        """
        engine = self._engine
        queue = deque(engine.begin_step())
        while True:
            while queue:
                self._index = queue.popleft()
                engine.begin_micro_batch(self._index)
                yield self._index
                if self._index is not None:
                    raise RuntimeError(f"step.backward(loss) was not called for micro-batch {self._index}")
            more = engine.reduce()
            if more is None:
                break
            queue.extend(more)
        self._number = engine.state
        self._losses = engine.end_step()

    @property
    def number(self) -> int:
        """0 for the first. It grows while a rank that has missed some steps takes the state of others."""
        return self._engine.state if self._number is None else self._number

    @property
    def is_over(self) -> bool:
        """Whether its gradients are reduced."""
        return self._losses is not None

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of the micro-batch that was yielded last.

        ``loss`` is its mean, a scalar; the gradients of the step are those of the mean over all micro-batches. With a
        GradScaler it is scaled. Raises RuntimeError without a micro-batch, or for the second time.
        """
        if self._index is None:
            raise RuntimeError("step.backward(loss) belongs once into each round of 'for index in step'")
        index, self._index = self._index, None
        self._engine.backward(index, loss)

    @property
    def losses(self) -> Tensor:
        """The loss of each micro-batch of the global batch, (micro_batches,), fp32, when the loop has ended."""
        if self._losses is None:
            raise RuntimeError("the losses of a step are known when 'for index in step' has ended")
        return self._losses

    @property
    def loss(self) -> float:
        """The mean loss of the global batch, the same on all ranks, when the loop has ended."""
        return float(torch.mean(self.losses.double()))
