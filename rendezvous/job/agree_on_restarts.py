"""The job's count of restarts, agreed upon by its agents, and what else they must know before workers start."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

_TRAINS_ON = "trains"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """`Agreed` is what an agent knows of its round: the job's count, and whether other agents' workers train on."""

    restarts_used: int
    do_others_train: bool = False


def agree_on_restarts(
    store: Store, group_rank: int, group_size: int, restarts_used: int, *, trains_on: bool = False
) -> Agreed:
    """The greatest count any agent of this round knows; every agent must call it once per round.

    torch counts per agent: only the one that saw a failure counts it, so ranks disagree on RESTART_COUNT
    (pytorch#108158). An agent that saw the failure has counted one more than before, several that saw the same one
    agree, and one that joins knows nothing: the greatest is the job's. ``trains_on``: this agent's workers do, in
    place. One that joins has to know that of the others at once: what its own workers raise concerns nobody then.
    """
    if group_size <= 1 or os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
        return Agreed(restarts_used=restarts_used)
    shared = PrefixStore("unicron/restarts", store)
    shared.set(str(group_rank), f"{restarts_used} {_TRAINS_ON}" if trains_on else str(restarts_used))
    said = [bytes(each).decode().split() for each in shared.multi_get([str(rank) for rank in range(group_size)])]
    trains = [_TRAINS_ON in words[1:] for words in said]
    trains[group_rank] = False
    return Agreed(restarts_used=max(int(words[0]) for words in said), do_others_train=any(trains))
