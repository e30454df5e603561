"""Histories of faults by chance: Poisson on every node, with kinds, repairs and racks that fail as one.

Everything follows from the seed: chance is taken from a counter of raw 64-bit numbers (PCG64), whose stream NumPy
promises to keep, and moments are whole milliseconds, so a seed means the same history on every machine and with every
version of NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unicron_elastic.faults import Severity, Status
from unicron_elastic.simulation.history.events import KINDS, FaultStruck, History
from unicron_elastic.simulation.history.presets import DAY_S, PRESETS, Preset, Repair

_NEVER = 1e-12  # faults expected in the whole history, below which there are none


@dataclass(frozen=True, slots=True)
class Racks:
    """``share`` of the faults of severity 1 take a whole rack of ``nodes`` nodes at once, all others one node.

    The share is of nodes: the same number of them is lost in the mean as without racks, but together.
    """

    nodes: int
    share: float

    def __post_init__(self) -> None:
        if self.nodes < 2 or not 0 <= self.share <= 1:
            raise ValueError(
                f"racks of {self.nodes} nodes with a share of {self.share:g}: a rack has at least 2 nodes, "
                "and the share is from 0 to 1"
            )


class _Struck(NamedTuple):
    """Before it is known whether the node is there: sorts by moment, then by its place in its stream."""

    at_ms: int
    stream: int
    place: int
    first_node: int
    nodes: int
    kind: Status
    repair_s: float | None


def generate(
    preset: Preset | str,
    seed: int,
    *,
    nodes: int | None = None,
    duration_s: float | None = None,
    fault_factor: float = 1.0,
    repair: Repair | None = None,
    racks: Racks | None = None,
) -> History:
    """The history of a preset, or of one by its name, for a seed.

    ``nodes``, ``duration_s`` and ``repair`` replace the preset's own; ``fault_factor`` multiplies its rates. A node
    under repair has no faults. Raises ``ValueError`` for an unknown name, and for values out of range.
    """
    chosen = _named(preset) if isinstance(preset, str) else preset
    chosen = replace(
        chosen,
        nodes=chosen.nodes if nodes is None else nodes,
        duration_s=chosen.duration_s if duration_s is None else duration_s,
        repair=repair or chosen.repair,
    )
    if not (chosen.nodes >= 1 and chosen.duration_s > 0 and math.isfinite(chosen.duration_s)):
        raise ValueError(f"{chosen.nodes} nodes for {chosen.duration_s:g} s: both must be positive")
    if not (fault_factor >= 0 and math.isfinite(fault_factor)):
        raise ValueError(f"the faults are to be multiplied by {fault_factor:g}: it must be 0 or more")
    if seed < 0:
        raise ValueError(f"the seed is {seed}: it must be 0 or more")
    if racks is not None and racks.nodes > chosen.nodes:
        raise ValueError(
            f"racks of {racks.nodes} nodes in a cluster of {chosen.nodes}: a rack must fit into the cluster"
        )
    return History.of(
        _faults(chosen, seed, fault_factor, racks),
        name=chosen.name,
        duration_s=chosen.duration_s,
        nodes=chosen.nodes,
        source=_source(chosen, seed, fault_factor, racks),
    )


def _named(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}: known are {', '.join(PRESETS)}")
    return PRESETS[name]


def _source(preset: Preset, seed: int, fault_factor: float, racks: Racks | None) -> str:
    said = [preset.source, f"seed {seed}"]
    if fault_factor != 1:
        said.append(f"all faults {fault_factor:g} times as often")
    if preset.name in PRESETS and preset.repair != PRESETS[preset.name].repair:
        said.append(f"but repairs here of {preset.repair.least_s:g} s to {preset.repair.most_s:g} s")
    if racks is not None:
        said.append(f"{racks.share:.0%} of lost nodes are lost with their rack of {racks.nodes}, an assumption")
    return "; ".join(said)


def _faults(preset: Preset, seed: int, factor: float, racks: Racks | None) -> Iterator[FaultStruck]:
    away_until_s = [-1.0] * preset.nodes
    for struck in sorted(_struck(preset, seed, factor, racks)):
        at_s = struck.at_ms / 1000
        for node in range(struck.first_node, struck.first_node + struck.nodes):
            if at_s < away_until_s[node]:
                continue
            if struck.repair_s is not None:
                away_until_s[node] = at_s + struck.repair_s
            yield FaultStruck(at_s=at_s, node=node, kind=struck.kind, repair_s=struck.repair_s)


def _struck(preset: Preset, seed: int, factor: float, racks: Racks | None) -> list[_Struck]:
    per_s = preset.nodes / (1000 * DAY_S) * factor
    sev1_per_s = preset.sev1_per_1000_node_days * per_s
    others_per_s = preset.others_per_1000_node_days * per_s
    with_rack = racks.share if racks else 0.0
    found = _stream(preset, (seed, 0), sev1_per_s * (1 - with_rack), _of(preset.mix, worst=True))
    found += _stream(preset, (seed, 1), others_per_s, _of(preset.mix, worst=False))
    if racks:
        whole = preset.nodes // racks.nodes  # nodes beyond the last whole rack fail alone only
        rack_per_s = sev1_per_s * with_rack / racks.nodes
        fallen = _stream(preset, (seed, 2), rack_per_s, {Status.LOST_CONNECTION: 1.0})
        found += [
            struck._replace(first_node=struck.first_node % whole * racks.nodes, nodes=racks.nodes) for struck in fallen
        ]
    return found


def _of(mix: Mapping[Status, float], *, worst: bool) -> dict[Status, float]:
    return {kind: weight for kind, weight in mix.items() if (KINDS[kind].severity == Severity.SEV1) == worst}


def _stream(preset: Preset, of: tuple[int, int], per_s: float, mix: Mapping[Status, float]) -> list[_Struck]:
    """One Poisson process over all nodes. ``of``: the seed and the stream's number."""
    if per_s * preset.duration_s < _NEVER or not mix:
        return []
    at_ms = _moments_ms(of, per_s, preset.duration_s)
    count = len(at_ms)
    node = (_uniform(*of, 1, count) * preset.nodes).astype(np.int64)
    kinds = tuple(mix)
    bounds = np.cumsum(np.array([mix[kind] for kind in kinds]))
    kind = np.searchsorted(bounds, _uniform(*of, 2, count) * bounds[-1], side="right")
    spread_s = preset.repair.most_s - preset.repair.least_s
    repair_s = np.round(preset.repair.least_s + _uniform(*of, 3, count) * spread_s, 3)
    is_repaired = [KINDS[kind].severity == Severity.SEV1 for kind in kinds]
    return [
        _Struck(int(at), of[1], place, int(where), 1, kinds[what], float(away) if is_repaired[what] else None)
        for place, (at, where, what, away) in enumerate(zip(at_ms, node, kind, repair_s, strict=True))
    ]


def _moments_ms(of: tuple[int, int], per_s: float, duration_s: float) -> NDArray[np.int64]:
    """Ascending moments of a Poisson process, in whole milliseconds, before the end."""
    expected = per_s * duration_s
    count = int(expected + 6 * math.sqrt(expected) + 16)
    while True:
        # No gap needs to be longer than the history; in milliseconds it has to fit into 64 bits.
        gaps_s = np.minimum(-np.log1p(-_uniform(*of, 0, count)) / per_s, duration_s + 1)
        moments = np.cumsum(np.round(gaps_s * 1000).astype(np.int64))
        if moments[-1] >= duration_s * 1000:
            return moments[moments < duration_s * 1000]
        count *= 2


def _uniform(seed: int, stream: int, attribute: int, count: int) -> NDArray[np.float64]:
    """So many numbers from 0 up to, but without, 1; the first of them do not depend on how many are asked for."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, stream, attribute])).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
