"""A small ResNet, and pictures that every machine has: 1,024 bytes of a file are a grey one of 32 x 32.

Of what kind is the file? Who looks for malware, or for deleted files on a disk, asks networks that. Here the files are
those of Python and torch, so there is nothing to download.
"""

from __future__ import annotations

import marshal
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

KINDS = ("Python", "bytecode of Python", "C++", "machine code", "compressed")
SIZE = 32
HELD_OUT = 5  # one picture in five


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """`Pictures` gives (picture, label) by number: (1, SIZE, SIZE) float32 between -1 and 1, and the place in KINDS."""

    def __init__(self, of_each_kind: int, *, is_held_out: bool) -> None:
        texts = [_some_bytes(files, of_each_kind * SIZE**2) for files in _files()]
        whole = torch.stack([torch.frombuffer(text, dtype=torch.uint8) for text in texts]).view(-1, 1, SIZE, SIZE)
        labels = torch.arange(len(KINDS)).repeat_interleave(of_each_kind)
        chosen = (torch.arange(len(labels)) % HELD_OUT == 0) == is_held_out
        self._bytes, self._labels = whole[chosen], labels[chosen]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._labels)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return one."""
        return self._bytes[number].float() / 127.5 - 1, self._labels[number]


def _files() -> tuple[Iterator[bytes], ...]:
    """What is in the files of each kind."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    package = Path(torch.__file__).parent
    return (
        (path.read_bytes() for path in sources),
        (marshal.dumps(compile(path.read_bytes(), "", "exec")) for path in sources),
        (path.read_bytes() for path in sorted(package.glob("include/ATen/**/*.h"))),
        (_middle(path) for path in sorted(package.glob("lib/libtorch*"))),
        (zlib.compress(path.read_bytes()) for path in sources),
    )


def _middle(path: Path) -> bytes:
    """Return a MiB of a file, behind its tables."""
    with path.open("rb") as file:
        file.seek(path.stat().st_size // 2)
        return file.read(2**20)


def _some_bytes(files: Iterator[bytes], count: int) -> bytearray:
    """Return the first of all these files."""
    text = bytearray()
    for each in files:
        text += each
        if len(text) >= count:
            return text[:count]
    raise SystemExit(f"there are not {count:,} bytes of each kind of file: ask for fewer pictures")


class Block(nn.Module):
    """Two convolutions, each normalized, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to half of height and width if the stride is 2."""
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """Return a network from pictures to (batch, kinds)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, len(KINDS)),
    )
