"""Published rates and mixes of faults, as named presets: how often what happens, on how many nodes, for how long.

Rates are faults per 1,000 node-days of nodes that are there. Each preset says where it is from and how sure that is;
none is tuned to a result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from unicron_elastic.faults import Severity, Status
from unicron_elastic.simulation.history.events import KINDS

DAY_S = 86400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}

# The Unicron paper's figure 1 (arXiv 2401.00134; as told by a summary of others): percent of all large tasks that
# ended so; 56.6 finished. Connection refused (2.1) and reset (1.0) are one status here. "Others" (3.3) are not broken
# down there: they are taken as other software errors, which is an assumption.
PAPER_MIX: Mapping[Status, float] = MappingProxyType(
    {
        Status.COLLECTIVE_TIMEOUT: 10.1,
        Status.ECC_ERROR: 5.0,
        Status.NVLINK_ERROR: 4.5,
        Status.OTHER_NETWORK_ERROR: 4.0,
        Status.LINK_FLAPPING: 3.9,
        Status.OTHER_SOFTWARE_ERROR: 3.3,
        Status.TASK_HANG: 3.1,
        Status.CONNECTION_REFUSED_OR_RESET: 3.1,
        Status.ILLEGAL_MEMORY_ACCESS: 2.1,
        Status.INVALID_DMA_MAPPING: 2.1,
        Status.CUDA_ERROR: 1.6,
        Status.GPU_DRIVER_ERROR: 0.6,
    }
)

# "The Llama 3 Herd of Models" (arXiv 2407.21783), the 419 unexpected interruptions of 54 days. Their words are put
# into ours: GPU, its system processor, sensors and silent corruption are driver errors, HBM3 and SRAM are ECC errors,
# what takes the host away (maintenance, NIC, SSD, power, chassis, board, CPU, memory) is a lost connection.
LLAMA_3: Mapping[Status, float] = MappingProxyType(
    {
        Status.GPU_DRIVER_ERROR: 148 + 17 + 6 + 6,
        Status.ECC_ERROR: 72 + 19,
        Status.OTHER_SOFTWARE_ERROR: 54 + 2,
        Status.LOST_CONNECTION: 32 + 7 + 3 + 3 + 2 + 2 + 2 + 2,
        Status.OTHER_NETWORK_ERROR: 35,
        Status.COLLECTIVE_TIMEOUT: 7,
    }
)
_GPUS_FAIL: Mapping[Status, float] = MappingProxyType({Status.ECC_ERROR: 1.0})
_MACHINES_FAIL: Mapping[Status, float] = MappingProxyType({Status.LOST_CONNECTION: 1.0})


@dataclass(frozen=True, slots=True)
class Repair:
    """An isolated node is away for a time between ``least_s`` and ``most_s``, all equally likely."""

    least_s: float
    most_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.least_s <= self.most_s:
            raise ValueError(
                f"a repair of {self.least_s:g} s to {self.most_s:g} s: give the shorter first, not below 0"
            )

    @property
    def mean_s(self) -> float:
        return (self.least_s + self.most_s) / 2

    @classmethod
    def parse(cls, text: str) -> Repair:
        """Read "1d-7d", "90m" or "3600s". Raises ``ValueError``."""
        number = r"(\d+(?:\.\d+)?)([smhd])"
        found = re.fullmatch(f"{number}(?:-{number})?", text.strip())
        if not found:
            raise ValueError(
                f'repair is {text!r}: write a time such as "12h", or two such as "1d-7d"; units are s, m, h, d'
            )
        least_s = float(found[1]) * _UNITS_S[found[2]]
        return cls(least_s, float(found[3]) * _UNITS_S[found[4]] if found[3] else least_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Faults that take a node away (severity 1) and others, per 1,000 node-days, each of the kinds of ``mix``.

    ``mix``: weights of kinds; only their proportions within severity 1, and within the others, matter.
    """

    name: str
    nodes: int
    duration_s: float
    sev1_per_1000_node_days: float
    others_per_1000_node_days: float
    mix: Mapping[Status, float]
    repair: Repair
    source: str


# From memory, with little confidence, and told of the Unicron paper's traces only. Used for all, as there is no other.
_REPAIR = Repair(1 * DAY_S, 7 * DAY_S)
_REPAIR_SOURCE = "repairs of 1 to 7 days are an assumption (remembered of the Unicron paper, with little confidence)"


def _sev1_share(mix: Mapping[Status, float]) -> float:
    bad = sum(weight for kind, weight in mix.items() if KINDS[kind].severity == Severity.SEV1)
    return bad / sum(mix.values())


def _of_counts(name: str, *, days: float, sev1: float, others: float, repair: Repair, source: str) -> Preset:
    """A preset of 16 nodes in which so many faults are expected.

    A node under repair has no faults, so the rate of those that are there is higher by what is missing: with ``c``
    faults per node-day and repairs of ``r`` days, in the long run a share of ``c * r`` is away.
    """
    node_days = 16 * days
    here = 1 - sev1 / node_days * repair.mean_s / DAY_S
    return Preset(
        name=name,
        nodes=16,
        duration_s=days * DAY_S,
        sev1_per_1000_node_days=1000 * sev1 / (node_days * here),
        others_per_1000_node_days=1000 * others / (node_days * here),
        mix=PAPER_MIX,
        repair=repair,
        source=f"{source}; 16 nodes; {_MIX_SOURCE}",
    )


def _of_rate(
    name: str, *, nodes: int, days: float, per_1000_node_days: float, mix: Mapping[Status, float], source: str
) -> Preset:
    share = _sev1_share(mix)
    return Preset(
        name=name,
        nodes=nodes,
        duration_s=days * DAY_S,
        sev1_per_1000_node_days=per_1000_node_days * share,
        others_per_1000_node_days=per_1000_node_days * (1 - share),
        mix=mix,
        repair=_REPAIR,
        source=f"{source}; {_REPAIR_SOURCE}",
    )


_MIX_SOURCE = "kinds as in the Unicron paper's figure 1, told by a summary"

_ALL = (
    _of_counts(
        "trace-a",
        days=56,
        sev1=10,
        others=33,
        repair=_REPAIR,
        source="like the Unicron paper's trace-a: 8 weeks, 10 node faults and 33 others expected (remembered, not read)"
        f"; {_REPAIR_SOURCE}",
    ),
    _of_counts(
        "trace-b",
        days=7,
        sev1=26,
        others=80,
        repair=Repair(_REPAIR.least_s / 20, _REPAIR.most_s / 20),
        source="like the Unicron paper's trace-b: 7 days, 26 node faults and 80 others expected (remembered, not read)"
        ", about 20 times trace-a's rates; repairs of 1.2 to 8.4 hours, trace-a's divided by 20 like its times between "
        "faults, are an assumption: with 1 to 7 days hardly a node would be left",
    ),
    _of_rate(
        "rsc-1",
        nodes=2000,
        days=28,
        per_1000_node_days=6.50,
        mix=PAPER_MIX,
        source="Meta's RSC-1 (arXiv 2410.21680): 6.50 failures per 1,000 node-days on 16,000 A100, but "
        f"{_MIX_SOURCE}; 4 weeks",
    ),
    _of_rate(
        "llama3",
        nodes=2048,
        days=54,
        per_1000_node_days=1000 * 419 / (54 * 2048),
        mix=LLAMA_3,
        source="Llama 3 405B (arXiv 2407.21783): 419 unexpected interruptions in 54 days on 16,384 H100, its kinds",
    ),
    _of_rate(
        "opt-175b",
        nodes=128,
        days=56,
        per_1000_node_days=15.6,
        mix=_MACHINES_FAIL,
        source="OPT-175B's logbook: about 2 of 128 machines go down every day; faults of software are not counted; "
        "8 weeks are an assumption",
    ),
    _of_rate(
        "bloom",
        nodes=48,
        days=105,
        per_1000_node_days=3.0,
        mix=_GPUS_FAIL,
        source="BLOOM 176B: about one GPU failure a week on 48 nodes; faults of software are not counted; "
        "15 weeks are an assumption",
    ),
    _of_rate(
        "ant",
        nodes=192,
        days=28,
        per_1000_node_days=21.6,
        mix=_GPUS_FAIL,
        source="Ant Group (DLRover): 8 % of A100 cards fail in a month, which is 21.6 per 1,000 nodes of 8 cards and "
        "day; 192 nodes and 4 weeks are an assumption",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})
