"""What tests of runs in this process share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process is alone, as a script that nobody launched, and leaves no process group behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # the runs of a test that has ended watch the loaders and optimizers of all others else
