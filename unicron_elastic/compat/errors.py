"""What torch's agent raises, and how a failed worker is told to its callers. Imports torch."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

__all__ = ["ChildFailedError", "ProcessFailure", "SignalException", "record"]
