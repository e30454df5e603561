"""A decoder as Megatron-Core builds it: what it holds, computes and keeps, and in how many parts it can be divided.

Parameters, FLOPs and rules are those of megatron-core 0.16.1: ``GPTModel`` of layers of ``SelfAttention`` and ``MLP``.
Places in comments are within ``megatron/core``.
"""

from __future__ import annotations

from dataclasses import dataclass

from unicron_elastic.base.require import require, require_count
from unicron_elastic.planning.model.shape import Transformer, require_counts

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Transformer):
    """A decoder with the choices of Megatron's ``TransformerConfig``, so its parameters and FLOPs are exact.

    What is not given is as in GPT-3. ``learned_positions`` is how many there are: None stands for one per token of a
    sample, 0 for rotary embeddings or others without parameters. ``vocabulary_multiple`` times TP divides the padded
    vocabulary (Megatron-LM's ``--make-vocab-size-divisible-by``); 1 if ``vocabulary`` is padded already.

    Raises ``ValueError`` if a size is no whole number of at least 1, or if two of them contradict each other.
    """

    ffn_hidden: int | None = None  # of a gated one, of each half; None: 4 * hidden
    query_groups: int | None = None  # None: as many as heads
    kv_channels: int | None = None  # of a head; None: hidden / heads
    gated: bool = False  # SwiGLU or GeGLU
    linear_bias: bool = True
    qkv_bias: bool = False  # also without linear_bias
    normalization: str = "LayerNorm"
    qk_norm: bool = False  # queries and keys are normalized, head by head
    tied: bool = True  # the output has the weights of the embedding
    learned_positions: int | None = None
    dropout: bool = True  # of hidden states, whose masks are kept
    vocabulary_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "vocabulary_multiple"):
            require_counts(**{name: getattr(self, name)})
        for name in ("ffn_hidden", "query_groups", "kv_channels"):
            if getattr(self, name) is not None:
                require_counts(**{name: getattr(self, name)})
        for name in ("gated", "linear_bias", "qkv_bias", "qk_norm", "tied", "dropout"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} is {value!r}: it must be true or false")
        require(
            self.normalization in NORMALIZATIONS,
            f"normalization is {self.normalization!r}: it must be one of {', '.join(NORMALIZATIONS)}",
        )
        require(
            self.kv_channels is not None or self.hidden % self.heads == 0,
            f"heads is {self.heads}, which does not divide hidden, {self.hidden}: it must, or give kv_channels",
        )
        # SelfAttention.get_query_key_value_tensors: heads / groups queries for each group.
        require(
            self.heads % self._groups == 0,
            f"query_groups is {self._groups}, which does not divide heads, {self.heads}: it must",
        )
        if self.learned_positions is not None:
            require_count("learned_positions", self.learned_positions)
            require(
                self.learned_positions == 0 or self.learned_positions >= self.sequence,
                f"learned_positions is {self.learned_positions}, less than sequence, {self.sequence}: "
                "it must be at least that, or 0",
            )

    # -- what it holds ---------------------------------------------------------------------------------------------

    @property
    def block_parameters(self) -> int:
        """Parameters of all layers."""
        divided, replicated = self._layer_parameters
        return self.layers * (divided + replicated)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding, of an output of its own, and of learned positions."""
        return (self.padded_vocabulary(1) * (1 if self.tied else 2) + self._positions) * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, on one GPU: ``sum(p.numel() for p in GPTModel(...).parameters())``."""
        return self.block_parameters + self.embedding_parameters + self._norm

    @property
    def flops_per_sample(self) -> float:
        """Model FLOPs of forward and backward over one sample: those of the matrix products, backward twice forward.

        Attention is counted in full, though half of its scores are masked, as in the formula of GPT-3. The vocabulary
        is the one padded for TP 1, so that the FLOPs of a step do not depend on where it runs.
        """
        projections = 2 * self.hidden * (2 * self._query + 2 * self._key)
        scores = 4 * self.sequence * self._query
        feed_forward = 2 * self.hidden * self._ffn * (3 if self.gated else 2)
        logits = 2 * self.hidden * self.padded_vocabulary(1)
        return 3.0 * self.sequence * (self.layers * (projections + scores + feed_forward) + logits)

    def padded_vocabulary(self, tensor: int) -> int:
        """The words that there are weights for: a multiple of ``vocabulary_multiple * tensor`` if that is padded to.

        As Megatron-LM's ``vocab_size_with_padding`` does; Megatron-Core takes the result as ``vocab_size``.
        """
        if self.vocabulary_multiple == 1:
            return self.vocabulary
        multiple = self.vocabulary_multiple * tensor
        return -(-self.vocabulary // multiple) * multiple

    def stage_parameters(self, tensor: int, pipeline: int, stage: int) -> float:
        """Parameters on a GPU of a stage. A tied output has a copy of the embedding in the last of several stages."""
        divided, replicated = self._layer_parameters
        held = self.layers / pipeline * (divided / tensor + replicated)
        words = self.padded_vocabulary(tensor) * self.hidden / tensor
        if stage == 0:  # models/gpt/gpt_model.py, GPTModel: pre_process
            held += words + self._positions * self.hidden
        if stage == pipeline - 1:  # post_process
            held += self._norm + (0 if self.tied and pipeline == 1 else words)
        return held

    def loaded_stages(self, pipeline: int) -> tuple[int, ...]:
        """The first has positions and the most micro-batches in flight, the last the logits."""
        return (0,) if pipeline == 1 else (0, pipeline - 1)

    def kept_bytes(self, tokens: int, tensor: int, *, is_sequence_divided: bool) -> float:
        """Activations that a layer keeps for backward in 16 bits, with an attention that keeps no scores.

        arXiv 2205.05198, section 4, by the sizes of this decoder: queries, keys, values and what attention gives; both
        sides of the feed-forward part's function; the inputs of two norms and of what follows them, and two masks.
        """
        keys = max(self._key / tensor, self._key // self._groups)  # a rank has one group at least
        divided = 4 * self._query / tensor + 4 * keys
        divided += self._ffn * (6 if self.gated else 4) / tensor
        divided += 2 * (self._query / tensor + keys) if self.qk_norm else 0
        replicated = self.hidden * (10 if self.dropout else 8)
        return tokens * (divided + replicated / (tensor if is_sequence_divided else 1))

    # -- in how many parts -----------------------------------------------------------------------------------------

    def allows_tensor(self, size: int, *, is_sequence_divided: bool = False) -> bool:
        """Whether Megatron can run with this TP."""
        groups = self._groups
        return (
            # transformer/transformer_config.py, TransformerConfig.__post_init__
            self.heads % size == 0
            and (groups % size == 0 or size % groups == 0)
            # tensor_parallel/layers.py, ColumnParallelLinear.__init__: linear_qkv of SelfAttention
            and (self._query + 2 * self._key) % size == 0
            # tensor_parallel/layers.py, RowParallelLinear.__init__: linear_fc2 of transformer/mlp.py, MLP
            and self._ffn % size == 0
            # tensor_parallel/utils.py, VocabUtility.vocab_range_from_global_vocab_size: VocabParallelEmbedding
            and self.padded_vocabulary(size) % size == 0
            # tensor_parallel/mappings.py, _split_along_first_dim
            and (not is_sequence_divided or self.sequence % size == 0)
        )

    # -- sizes -----------------------------------------------------------------------------------------------------

    @property
    def _ffn(self) -> int:
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def _groups(self) -> int:
        return self.heads if self.query_groups is None else self.query_groups

    @property
    def _channels(self) -> int:
        return self.hidden // self.heads if self.kv_channels is None else self.kv_channels

    @property
    def _query(self) -> int:
        """Return the width of the queries of all heads together."""
        return self.heads * self._channels

    @property
    def _key(self) -> int:
        """Return the width of the keys of all groups together; values are as wide."""
        return self._groups * self._channels

    @property
    def _positions(self) -> int:
        return self.sequence if self.learned_positions is None else self.learned_positions

    @property
    def _norm(self) -> int:
        """Parameters of a norm of hidden states."""
        return self.hidden * self._per_normalized

    @property
    def _per_normalized(self) -> int:
        return 2 if self.normalization == "LayerNorm" else 1

    @property
    def _layer_parameters(self) -> tuple[int, int]:
        """Those of a layer that a tensor group divides, and those that each of its ranks has.

        transformer/attention.py, SelfAttention: linear_qkv and linear_proj; transformer/mlp.py, MLP: linear_fc1 and
        linear_fc2. The bias of a ``RowParallelLinear`` is not divided, nor is a norm.
        """
        qkv, fc1 = self._query + 2 * self._key, self._ffn * (2 if self.gated else 1)
        divided = self.hidden * (qkv + self._query + fc1 + self._ffn)
        divided += qkv if self.linear_bias or self.qkv_bias else 0
        divided += fc1 if self.linear_bias else 0
        replicated = 2 * self._norm + (2 * self.hidden if self.linear_bias else 0)
        replicated += 2 * self._channels * self._per_normalized if self.qk_norm else 0
        return divided, replicated
