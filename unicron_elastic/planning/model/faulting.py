"""How long until the next fault: D_running(n'), from the faults seen so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unicron_elastic.base.require import require, require_count

DAY_S = 86_400.0
# 6.50 faults in 1,000 node-days: RSC-1, 16,000 GPUs in nodes of 8, eleven months ("Revisiting Reliability in
# Large-Scale Machine Learning Research Clusters", arXiv 2410.21680). Others report from 2 to 50.
PRIOR_NODE_S = 1000.0 / 6.5 * DAY_S
# The prior weighs as much as one fault: after ten real ones it is a tenth of what is believed.
PRIOR_FAULTS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRate:
    """Faults per node, believed to follow a Gamma distribution.

    Faults come as a Poisson process whose unknown rate has the prior Gamma(``prior_faults``, ``prior_node_s``). After
    ``faults`` in ``node_s`` of healthy running (nodes times seconds) it is Gamma(prior_faults + faults, prior_node_s +
    node_s). Raises ``ValueError`` if a number is negative or not finite, or prior_faults is not above 1: with less,
    the mean time to a fault is infinite until one is seen.
    """

    faults: int = 0
    node_s: float = 0.0
    prior_faults: float = PRIOR_FAULTS
    prior_node_s: float = PRIOR_NODE_S

    def __post_init__(self) -> None:
        require_count("faults", self.faults)
        require(
            math.isfinite(self.node_s) and self.node_s >= 0.0, f"node_s is {self.node_s}: it must be 0 or more seconds"
        )
        require(
            math.isfinite(self.prior_faults) and self.prior_faults > 1.0,
            f"prior_faults is {self.prior_faults}: it must be more than 1",
        )
        require(
            math.isfinite(self.prior_node_s) and self.prior_node_s > 0.0,
            f"prior_node_s is {self.prior_node_s}: it must be more than 0 seconds",
        )

    def observed(self, faults: int, node_s: float) -> FaultRate:
        """What is believed after ``faults`` more in ``node_s`` more. Raises ``ValueError`` for negative numbers."""
        require_count("faults", faults)
        return FaultRate(
            faults=self.faults + faults,
            node_s=self.node_s + node_s,
            prior_faults=self.prior_faults,
            prior_node_s=self.prior_node_s,
        )

    def running_s(self, nodes: int) -> float:
        """D_running: the mean seconds until one of ``nodes`` has a fault.

        Given the rate the time is exponential; over the Gamma distribution of the rate its mean is
        (prior_node_s + node_s) / (prior_faults + faults - 1) / nodes. Without nodes nothing runs: then as for one.
        """
        require_count("nodes", nodes)
        return (self.prior_node_s + self.node_s) / (self.prior_faults + self.faults - 1.0) / max(nodes, 1)
