"""Gradients whose sum is bitwise the same whoever computed what: added by a fixed tree over the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unicron_elastic.engine.protocol.tree import TreeNode, maximal
from unicron_elastic.engine.transport.completion import UnderWay
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.step.gradients import Gradients
from unicron_elastic.training.step.tree_sum import Summing, TreeSum
from unicron_elastic.training.step.wrong_use import WrongUseError

EARLY_MAX = 4  # buckets


class TreeGradients(Gradients):
    """What this rank has summed up are sums of whole subtrees; the flat buffers are for the reduced gradients alone."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        micro_batches: int,
        transport: Transport,
        *,
        others: Sequence[Tensor] = (),
        bucket_bytes: int | None = None,
    ) -> None:
        self._computed: set[int] = set()  # in this step
        super().__init__(parameters, micro_batches, transport, others=others, bucket_bytes=bucket_bytes)
        self._holdings: list[frozenset[int]] = []
        self._nodes: dict[int, tuple[TreeNode, ...]] = {}

    def lay_out(
        self, parameters: Sequence[Tensor], frozen: Sequence[Tensor] = (), others: Sequence[Tensor] = ()
    ) -> None:
        """Lay out what ``Gradients`` does; the partial sums are gone, too."""
        super().lay_out(parameters, frozen, others)
        self._early = len(self._reduced_early())
        self._sum = TreeSum(self.parameters, self.micro_batches)

    def take_count(self, micro_batches: int) -> None:
        """The same, before anything of the step is summed up."""
        super().take_count(micro_batches)
        self._sum.micro_batches = micro_batches
        self._holdings = []

    def _reduced_early(self) -> list[list[Tensor]]:
        """Return those of the first buckets: each that is under way takes memory.

        Where steps differ in how many micro-batches they have, that is compared before anything is exchanged.
        """
        return [] if self.compare_counts is not None else super()._reduced_early()[:EARLY_MAX]

    def begin(self, stamp: bytes = bytes(4)) -> None:
        """Begin with no gradients at all: autograd then leaves those of each micro-batch as they are."""
        super().begin(stamp)
        self._sum.drop()
        self._computed.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, index: int, loss: Tensor, weight: float | None = None) -> None:
        """Takes the gradients of a micro-batch."""
        super().add(index, loss, weight)
        self._sum.add(index)
        self._computed.add(index)

    def check(self) -> None:
        """Raises RuntimeError if gradients came from elsewhere."""
        if any(parameter.grad is not None for parameter in self.parameters):
            raise WrongUseError(
                "gradients came from elsewhere than step.backward(loss): within 'for index in step' there must be no "
                "other backward pass"
            )

    def check_places(self) -> None:
        """The same of all parameters, also of those that are frozen."""
        self.check()
        self._check_frozen()

    def settle(self) -> None:
        """Nobody needs the partial sums any more."""
        super().settle()
        self._sum.drop()

    def reduce(self, bucket: int, holdings: Sequence[frozenset[int]], *, is_awaited: bool) -> UnderWay | None:
        """Each rank adds one segment in the tree's order, and the sums are gathered.

        What may begin in a backward pass is under way when it returns, and the rest is done: so all ranks exchange in
        one order, however much each has begun early.
        """
        if bucket in self.rounds[1]:
            return super().reduce(bucket, holdings, is_awaited=is_awaited)
        if bucket == 0 and self.compare_counts is not None:
            self.compare_counts()  # by it each rank knows how much the others give it
        if bucket < self._early:
            return self._begin(bucket, holdings)
        each = self.buckets[bucket]
        elements = each.local.numel()
        notes = self.stage(bucket, is_awaited=is_awaited, notes_alone=True)
        each = self.buckets[bucket]
        if elements:
            of = [self.parameters[position] for position in each.parameters]
            held = self._nodes_of(holdings)
            self._sum.reduce(of, self._transport, held, self._transport.rank, out=each.reduced[:elements])
        return self._transport.reduce(notes) if each.notes else None

    def _begin(self, bucket: int, holdings: Sequence[frozenset[int]]) -> Summing:
        each = self.buckets[bucket]
        of = [self.parameters[position] for position in each.parameters]
        held = self._nodes_of(holdings)
        rank = self._transport.rank
        index = next(iter(holdings[rank] - self._computed), None)  # the one of the pass that goes on, if one does
        return self._sum.begin(of, self._transport, held, rank, each.reduced, index=index)

    def _nodes_of(self, holdings: Sequence[frozenset[int]]) -> dict[int, tuple[TreeNode, ...]]:
        """Return nodes by rank; the buckets of a step ask for the same, and mostly those of the next one, too."""
        if holdings != self._holdings:
            self._holdings = list(holdings)
            self._nodes = {rank: maximal(indices, self.micro_batches) for rank, indices in enumerate(holdings)}
        return self._nodes
