"""What a transformer of a given shape computes and holds: the standard formulas."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unicron_elastic.planning.checks import require, require_count

__all__ = ["Transformer", "require_counts"]


def require_counts(**values: object) -> None:
    """Raises ``ValueError`` unless every value is a whole number of at least 1."""
    for name, value in values.items():
        require_count(name, value, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder as in GPT-3: attention with ``heads`` heads, and a feed-forward part four times as wide as ``hidden``.

    Models that differ (grouped queries, gated feed-forward parts, experts) give their own numbers of parameters and of
    FLOPs to the workload, which then takes only the number of layers and the sizes of activations from here.

    Raises ``ValueError`` if a size is no whole number of at least 1, or if the heads do not divide ``hidden``.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int  # tokens of a sample
    vocabulary: int

    def __post_init__(self) -> None:
        require_counts(**{field.name: getattr(self, field.name) for field in fields(self)})
        require(
            self.hidden % self.heads == 0,
            f"heads is {self.heads}, which does not divide hidden, {self.hidden}: every head takes an equal part of it",
        )

    @property
    def block_parameters(self) -> int:
        """Parameters of all layers, without the embeddings."""
        return self.layers * (12 * self.hidden**2 + 13 * self.hidden)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding, which the output shares, and of learned positions."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def parameters(self) -> int:
        """``12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h))``: Narayanan et al., "Efficient Large-Scale Language Model
        Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 5.1.
        """
        return self.block_parameters + self.embedding_parameters

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of forward and backward over one sample: ``72 s l h^2 (1 + s/(6h) + V/(12 l h))``.

        What is computed a second time to save memory is not counted: it takes time and brings the training no further.
        With it, arXiv 2104.04473 (section 5.1) has ``96 s l h^2 (1 + s/(6h) + V/(16 l h))``.
        """
        attention = self.sequence / (6 * self.hidden)
        logits = self.vocabulary / (12 * self.layers * self.hidden)
        return 72.0 * self.sequence * self.layers * self.hidden**2 * (1.0 + attention + logits)
