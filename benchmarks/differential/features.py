"""What models are made of here: one small layer for each thing that has a state or a gradient of its own.

All is in float64 but what a layer makes otherwise, so that another order of a sum is not taken for a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS", "HOWS", "WIDTH", "Net", "batch"]

WIDTH = 8
SAMPLES = 6
HOWS = ("channels-last", "compiled", "freeze", "unfreeze", "groups", "frozen-statistics")


class Simple(nn.Module):
    """A layer that looks at its input alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, _index: int) -> Tensor:
        result: Tensor = self.layer(x)
        return result


class Shaped(Simple):
    """A layer for (samples, channels, ...)."""

    def __init__(self, layer: nn.Module, *shape: int) -> None:
        super().__init__(layer)
        self.shape = shape

    def forward(self, x: Tensor, index: int) -> Tensor:
        return super().forward(x.view(x.shape[0], *self.shape), index).reshape(x.shape)


class Convolution(nn.Module):
    """A convolution and BatchNorm2d; its weight may be in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, (2, 2), padding="same", bias=False)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor, _index: int) -> Tensor:
        image = x.view(x.shape[0], 2, 2, 2)
        result: Tensor = self.norm(self.convolution(image)).reshape(x.shape)
        return result


class Counter(nn.Module):
    """Counts its forward passes in a buffer of whole numbers, and computes with it."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=persistent)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, _index: int) -> Tensor:
        if self.training:
            self.count += 1
        return x * self.weight * (1.0 + 0.01 * self.count)


class Moving(nn.Module):
    """A moving mean of its inputs in a buffer of its own, changed in place or replaced."""

    def __init__(self, *, persistent: bool, replaced: bool) -> None:
        super().__init__()
        self.register_buffer("moving", torch.zeros(WIDTH), persistent=persistent)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.replaced = replaced

    def forward(self, x: Tensor, _index: int) -> Tensor:
        if self.training:
            mean = x.detach().mean(0)
            if self.replaced:
                self.moving = 0.9 * self.moving + 0.1 * mean
            else:
                self.moving.mul_(0.9).add_(mean, alpha=0.1)
        return x * self.weight + self.moving.clone()


class Constant(nn.Module):
    """A buffer that differs from rank to rank before the first world, and that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(WIDTH), persistent=False)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, _index: int) -> Tensor:
        return x * self.weight + self.table


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor, _index: int) -> Tensor:
        result: Tensor = self.other(torch.tanh(self.one(x)))
        return result


class Sometimes(nn.Module):
    """Used by some micro-batches only; in some steps by none (``by`` index), or by the first alone."""

    def __init__(self, of: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.of = of

    def forward(self, x: Tensor, index: int) -> Tensor:
        result: Tensor = self.norm(torch.tanh(self.layer(x))) if index % self.of == 1 % self.of else x
        return result


class Unused(nn.Module):
    """Never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, _index: int) -> Tensor:
        return x


class Embedding(nn.Module):
    """Rows by the sign of the inputs."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=sparse)

    def forward(self, x: Tensor, _index: int) -> Tensor:
        result: Tensor = self.table((x[:, :3].detach() > 0).sum(1)) * x
        return result


class Complex(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor, _index: int) -> Tensor:
        return torch.view_as_real(x * self.weight).sum(-1)


class Narrow(nn.Module):
    """A layer of another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: Tensor, _index: int) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Parameters of odd shapes: of no dimension, with no elements, and one whose memory runs the other way."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(WIDTH, 4).t())

    def forward(self, x: Tensor, _index: int) -> Tensor:
        return self.scalar * (x @ self.turned.t()) @ self.turned + self.empty.sum()


class Checkpointed(nn.Module):
    """Computed a second time in the backward pass, with the same dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: Tensor, _index: int) -> Tensor:
        result: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return result


class Shared(nn.Module):
    """One normalization layer in two places. A bias before it would get no gradient but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(WIDTH)
        self.one, self.other = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), norm), nn.Sequential(nn.Tanh(), norm)

    def forward(self, x: Tensor, _index: int) -> Tensor:
        result: Tensor = self.other(self.one(x))
        return result


class Late(nn.Module):
    """What is frozen or unfrozen on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _index: int) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Simple(_linear()),
    "batchnorm": lambda: Simple(nn.BatchNorm1d(WIDTH)),
    "batchnorm-cumulative": lambda: Simple(nn.BatchNorm1d(WIDTH, momentum=None)),
    "batchnorm-untracked": lambda: Simple(nn.BatchNorm1d(WIDTH, track_running_stats=False)),
    "groupnorm": lambda: Simple(nn.GroupNorm(2, WIDTH)),
    "layernorm": lambda: Simple(nn.LayerNorm(WIDTH)),
    "instancenorm": lambda: Shaped(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), 2, WIDTH // 2),
    "convolution": Convolution,
    "spectral": lambda: Simple(parametrizations.spectral_norm(_linear())),
    "spectral-old": lambda: Simple(spectral_norm(_linear())),
    "weightnorm": lambda: Simple(parametrizations.weight_norm(_linear())),
    "counter": Counter,
    "counter-hidden": lambda: Counter(persistent=False),
    "moving": lambda: Moving(persistent=True, replaced=False),
    "moving-hidden": lambda: Moving(persistent=False, replaced=False),
    "moving-replaced": lambda: Moving(persistent=True, replaced=True),
    "constant-hidden": Constant,
    "tied": Tied,
    "frozen": lambda: Simple(_linear().requires_grad_(False)),
    "sometimes": lambda: Sometimes(3),
    "unused": Unused,
    "embedding": lambda: Embedding(sparse=False),
    "sparse": lambda: Embedding(sparse=True),
    "complex": Complex,
    "bf16": lambda: Narrow(torch.bfloat16),
    "fp32": lambda: Narrow(torch.float32),
    "odd": Odd,
    "dropout": lambda: Simple(nn.Sequential(_linear(), nn.Dropout(0.2))),
    "checkpointed": Checkpointed,
    "shared-norm": Shared,
}


class Net(nn.Module):
    """A linear layer, the blocks with a way around each, and a linear layer."""

    def __init__(self, blocks: tuple[str, ...], hows: tuple[str, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        named = {f"{number}-{name}": BLOCKS[name]() for number, name in enumerate(blocks)}
        if "freeze" in hows or "unfreeze" in hows:
            named["late"] = Late()
        self.blocks = nn.ModuleDict(named)
        self.last = nn.Linear(WIDTH, 1)
        self._hows = hows
        if "channels-last" in hows:
            self.to(memory_format=torch.channels_last)
        self.train()

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        if "frozen-statistics" in self._hows:
            for layer in self.modules():
                if isinstance(layer, nn.modules.batchnorm._NormBase):
                    layer.eval()
        return self

    def late(self) -> Iterator[nn.Parameter]:
        """What is frozen or unfrozen on the way."""
        for name, block in self.blocks.items():
            if name == "late":
                yield from block.parameters()

    def forward(self, x: Tensor, index: int, through: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x = torch.tanh(self.first(x))
        if through is not None:
            x = through(x)
        for block in self.blocks.values():
            x = x + torch.tanh(block(x, index))
        result: Tensor = self.last(x)
        return result


def batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    """(samples, WIDTH) and (samples, 1), of the step and index alone; step -1 has held-out data."""
    generator = torch.Generator().manual_seed(1_000_003 * (step + 1) + index)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()
