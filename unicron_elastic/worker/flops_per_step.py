"""The script's word on how much a step computes: ``unicron_elastic.flops_per_step(...)``."""

from __future__ import annotations

import math
from typing import SupportsFloat

from unicron_elastic.worker.link import AGENT
from unicron_elastic.worker.notices import FlopsPerStep


def flops_per_step(value: SupportsFloat) -> None:
    """Tells the agent the model FLOPs of one optimizer step of the whole job, of all ranks together.

    Once is enough, on any rank; again when the global batch has changed. Forward and backward count, what is computed
    a second time to save memory does not (docs/throughput.md). Under another launcher it does nothing. Raises
    ValueError for what is no positive number.
    """
    AGENT.say(FlopsPerStep(flops=_positive(value)))


def _positive(value: SupportsFloat) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except Exception:  # whatever an object of the script's does when it is asked for a number
        number = math.nan
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"flops_per_step must be a positive number, such as 6 * parameters * tokens, got {value!r}")
    return number
