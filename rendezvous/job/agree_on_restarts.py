"""The job's count of restarts, agreed upon by its agents."""

from __future__ import annotations

import os

from torch.distributed import PrefixStore, Store


def agree_on_restarts(store: Store, group_rank: int, group_size: int, restarts_used: int) -> int:
    """The greatest count any agent of this round knows; every agent must call it once per round.

    torch counts per agent: only the one that saw a failure counts it, so ranks disagree on RESTART_COUNT
    (pytorch#108158). An agent that saw the failure has counted one more than before, several that saw the same one
    agree, and one that joins knows nothing: the greatest is the job's.
    """
    if group_size <= 1 or os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL", "0") == "1":
        return restarts_used
    shared = PrefixStore("unicron/restarts", store)
    shared.set(str(group_rank), str(restarts_used))
    return max(int(count) for count in shared.multi_get([str(rank) for rank in range(group_size)]))
