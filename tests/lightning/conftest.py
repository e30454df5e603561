"""What tests of Lightning in place share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only


@pytest.fixture(autouse=True)
def nobody_launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process is alone, and leaves no process group and no rank behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PL_GLOBAL_SEED"):
        monkeypatch.delenv(name, raising=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank = rank_zero_only.rank
    yield
    rank_zero_only.rank = rank
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
