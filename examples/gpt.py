"""A small byte-level GPT, and what it learns: the source code of Python's own standard library, which is everywhere.

So there is nothing to download. The scripts beside this file train it: train_gpt.py in the ordinary way.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # the tokens are bytes
CORPUS_BYTES = 2_000_000
HELD_OUT_BYTES = 100_000


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        projected = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """A decoder-only language model over bytes; 0.8 million parameters as it stands."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus() -> tuple[Tensor, Tensor]:
    """Return the training text and the held-out text, one byte per element."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if len(text) < 2 * HELD_OUT_BYTES:
        raise SystemExit("this Python has no source files of its standard library to learn from")
    tokens = torch.frombuffer(text, dtype=torch.uint8)
    return tokens[:-HELD_OUT_BYTES], tokens[-HELD_OUT_BYTES:]


def windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut one window at each start; the targets are the same windows, one byte later."""
    cut = text[starts[:, None] + torch.arange(context + 1)].to(device, torch.long)
    return cut[:, :-1], cut[:, 1:]
