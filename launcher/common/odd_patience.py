"""Whether what a launcher is to wait for can happen in the time that it is given: each wait must outlast others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unicron_elastic.membership.rounds import WAITS_S

NCCL_TIMEOUT_S = 600.0  # torch's default for a process group over NCCL
SEEN_AGAIN_S = 5.0  # so long after its return etcd is seen again by all


def odd_patience(
    backend: str, nnodes: str, conf: Mapping[str, str], *, hang_patience_s: float, acts_on_hangs: bool
) -> Iterator[str]:
    """Say which of these waits is shorter than what it must outlast, one sentence each, and what comes of it."""
    if backend == "unicron":
        seconds = {name: _seconds(conf, name, default) for name, default in WAITS_S.items()}
        if None not in seconds.values():
            yield from _odd_in_etcd(nnodes, {name: each for name, each in seconds.items() if each is not None})
    if acts_on_hangs and hang_patience_s >= NCCL_TIMEOUT_S:
        yield (
            f"--unicron-hang-patience {hang_patience_s:g} is no less than the {NCCL_TIMEOUT_S:g} s after which torch "
            "by default ends workers that hang over NCCL: that comes first, unless the script gives its groups longer"
        )


def _odd_in_etcd(nnodes: str, seconds: Mapping[str, float]) -> Iterator[str]:
    least, _, most = nnodes.partition(":")
    join_s, last_call_s = seconds["join_timeout"], seconds["last_call_timeout"]
    if most and least != most and join_s <= last_call_s:
        yield (
            f"--rdzv-conf join_timeout {join_s:g} is no longer than last_call_timeout {last_call_s:g}: a first round "
            f"with fewer than {most} nodes never begins, as all give up before"
        )
    lease_s, blind_s = seconds["lease_ttl"], seconds["blind_patience"]
    if blind_s <= lease_s + SEEN_AGAIN_S:
        yield (
            f"--rdzv-conf blind_patience {blind_s:g} does not outlast lease_ttl {lease_s:g} and the {SEEN_AGAIN_S:g} s "
            "in which etcd is seen again: workers end although nobody has taken their node for lost"
        )
    if join_s <= lease_s:
        yield (
            f"--rdzv-conf join_timeout {join_s:g} is no longer than lease_ttl {lease_s:g}: after the loss of a node "
            "the others give up before it counts as lost"
        )


def _seconds(conf: Mapping[str, str], name: str, default: float) -> float | None:
    """Return what is given; None for what is no number, which is refused elsewhere."""
    try:
        return float(conf.get(name, default))
    except ValueError:
        return None
