"""What a transformer of a given shape computes and holds: the standard formulas."""

from __future__ import annotations

from dataclasses import dataclass, fields

from unicron_elastic.base.require import require, require_count

# Activations of a layer, bytes per token and hidden unit (kept_bytes).
REPLICATED_BYTES = 10.0  # on every rank of the tensor group
DIVIDED_BYTES = 24.0  # shared by the tensor group


def require_counts(**values: object) -> None:
    """Raises ``ValueError`` unless every value is a whole number of at least 1."""
    for name, value in values.items():
        require_count(name, value, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder as in GPT-3: attention with ``heads`` heads, and a feed-forward part four times as wide as ``hidden``.

    One with grouped queries or a gated feed-forward part is a ``Decoder``. Other models (experts) give their own
    numbers of parameters and of FLOPs to the workload, which then takes only the number of layers and the sizes of
    activations from here.

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

    def stage_parameters(self, tensor: int, pipeline: int, stage: int) -> float:  # noqa: ARG002 - all are alike
        """Parameters on a GPU of a stage: its part of the layers, and the embedding or the output."""
        return (self.block_parameters / pipeline + self.embedding_parameters) / tensor

    def padded_vocabulary(self, tensor: int) -> int:  # noqa: ARG002 - this one is given as it is
        """The words that there are weights for."""
        return self.vocabulary

    def loaded_stages(self, pipeline: int) -> tuple[int, ...]:  # noqa: ARG002
        """The pipeline stages of which one needs most memory."""
        return (0,)

    def kept_bytes(self, tokens: int, tensor: int, *, is_sequence_divided: bool) -> float:
        """Activations that a layer keeps for backward in 16 bits, with an attention that does not write out its scores.

        Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
        section 4. With sequence parallelism a tensor group divides all of them.
        """
        replicated = REPLICATED_BYTES / (tensor if is_sequence_divided else 1)
        return tokens * self.hidden * (replicated + DIVIDED_BYTES / tensor)

    def allows_tensor(self, size: int, *, is_sequence_divided: bool = False) -> bool:
        """Whether tensor parallelism of that size can divide it."""
        return self.heads % size == 0 and (not is_sequence_divided or self.sequence % size == 0)

    def allows_pipeline(self, size: int, virtual_stages: int = 1) -> bool:
        """Whether that many stages can have as many layers each; of several, each GPU has ``virtual_stages``.

        Megatron's rule: transformer/transformer_block.py, get_num_layers_to_build (megatron-core 0.16.1).
        """
        return self.layers % (size * (virtual_stages if size > 1 else 1)) == 0
