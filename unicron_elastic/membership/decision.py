"""What a node decides while it cannot see the cluster's store. docs/assumptions.md says why, decision by decision."""

from __future__ import annotations

import math
from enum import Enum


class Decision(Enum):
    """What a node may want to do; the value is in words that follow "it does not"."""

    TRAIN = "train"
    HEED_FAULT = "stop workers for a fault of its own or one that another agent has told"
    MEET = "begin another round"
    TAKE_FOR_LOST = "take another node for lost"
    REMOVE_NODE = "remove a node"
    COORDINATE = "become the coordinator"
    LEAVE = "take one of the places that the job can spare"


def why_not(decision: Decision, blind: str, blind_for_s: float = 0.0, patience_s: float = math.inf) -> str:
    """Why a node that is ``blind``, for this reason, does not do it, as a sentence; "": it does. "" sees.

    A fault is its teller's own word. To train is what went on before: it goes on for ``patience_s`` seconds, after
    which nodes that do see may begin a round without those of whom they hear nothing. All else needs sight.
    """
    if not blind or decision is Decision.HEED_FAULT:
        return ""
    if decision is Decision.TRAIN and blind_for_s < patience_s:
        return ""
    return f"The cluster's store cannot be seen ({blind}): until it can, this node does not {decision.value}."
