"""The configuration with which the cluster's plan has this job start."""

from __future__ import annotations

import os

from unicron_elastic.megatron.alone import takes_place
from unicron_elastic.planning.configurations import Configuration
from unicron_elastic.planning.configured import CONFIGURATION, parse_configuration


def configuration() -> Configuration | None:
    """DP, TP, PP and the micro-batch that are best on the nodes that the job has; None if nobody has said it.

    It is in the environment variable ``UNICRON_CONFIGURATION``. Raises ValueError if that is no configuration, or not
    one for as many ranks as there are.
    """
    text = os.environ.get(CONFIGURATION)
    if not text:
        return None
    found = parse_configuration(text)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if found.gpus != ranks and not takes_place():  # who takes a lost one's place finds as many as are left
        raise ValueError(f"{CONFIGURATION} is {found}, for {found.gpus} ranks: there are {ranks}")
    return found
