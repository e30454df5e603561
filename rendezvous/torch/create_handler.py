"""The rendezvous on etcd as a command line asks for it: for unicron-run and, by `torchrun.handlers`, for torchrun."""

from __future__ import annotations

import os
import uuid

from unicron_elastic.base.node_name import node_label, node_name
from unicron_elastic.compat.rendezvous import (
    RendezvousParameters,
)
from unicron_elastic.membership.rounds import BLIND_MARGIN_S, WAITS_S, JobMember, Settings
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.job.agent_process import own_process
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.cluster import NodeRecord
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.records.plan_keys import check_run_id, run_of_start
from unicron_elastic.rendezvous.store.open import store_opener
from unicron_elastic.rendezvous.store.options import address_from_options
from unicron_elastic.rendezvous.store.own_address import own_address
from unicron_elastic.rendezvous.torch.handler import ClusterRendezvous

_LONGEST_S = 86_400.0  # of all that may be waited for; a lease cannot be longer


def create_handler(parameters: RendezvousParameters) -> ClusterRendezvous:
    """Make a handler for torch's registry. Raises ValueError for what cannot be right, with what would be."""
    given = {name: str(value) for name, value in parameters.config.items()}
    address = address_from_options(parameters.endpoint, given, spell=lambda name: f"--rdzv-conf {name}")
    opener = store_opener(address)
    # A planned job may start several times under its name: each start has keys of its own.
    start = _number(parameters, "start")
    if start is None:
        check_run_id(parameters.run_id)
    run = parameters.run_id if start is None else run_of_start(parameters.run_id, start)
    keys = JobKeys(run)
    min_nodes, max_nodes = nodes_of(parameters)
    settings = Settings(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        last_call_s=_seconds(parameters, "last_call_timeout"),
        target_nodes=_number(parameters, "target_nodes"),
        expected_nodes=_number(parameters, "expected_nodes"),
        blind_patience_s=_seconds(parameters, "blind_patience", 10.0),
    )
    host = node_name()
    node_id = f"{host}/{uuid.uuid4().hex[:12]}"
    label = node_label(str(parameters.get("label", "")), "--rdzv-conf label")
    record = NodeRecord(node_id=node_id, host=host, job=run, label=label, pid=os.getpid())
    lease_ttl_s = _seconds(parameters, "lease_ttl", 1.0)
    bind, here = parameters.local_addr or "", parameters.local_addr or own_address(address)
    return ClusterRendezvous(
        JobPresence(
            opener, keys, lease_ttl_s, blind_for_s=settings.blind_patience_s + BLIND_MARGIN_S, nodes=settings.most
        ),
        ClusterNode(
            opener,
            lease_ttl_s,
            record,
            bind=bind,
            address=here,
            may_lead=start is None,  # the agent that started this one does, and outlives it
        ),
        JobMember(node_id=node_id, host=host, label=label, waits_for=0, process=str(own_process(here) or "")),
        keys,
        run_id=parameters.run_id,
        settings=settings,
        address=here,
        join_timeout_s=_seconds(parameters, "join_timeout"),
        connect_timeout_s=_seconds(parameters, "connect_timeout"),
        is_shared=start is not None,  # a planned job, whose nodes speak where it was submitted
    )


def nodes_of(parameters: RendezvousParameters) -> tuple[int, int]:
    """Return how many nodes the job needs and may have; some launchers can give one number, and ``nodes`` is for them.

    Raises ValueError for what is no such range.
    """
    text = str(parameters.get("nodes", f"{parameters.min_nodes}:{parameters.max_nodes}"))
    least, colon, most = text.partition(":")
    numbers = [int(each) for each in (least, most if colon else least) if each.isascii() and each.isdecimal()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ValueError(f"--rdzv-conf nodes must be MIN:MAX, as in 2:4, not {text!r}")
    return numbers[0], numbers[1]


def _number(parameters: RendezvousParameters, name: str) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    if not str(value).isascii() or not str(value).isdecimal():
        raise ValueError(f"--rdzv-conf {name} must be a whole number, not {value!r}")
    return int(value)


def _seconds(parameters: RendezvousParameters, name: str, least: float = 0.0) -> float:
    value = parameters.get(name, WAITS_S[name])
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not least <= seconds <= _LONGEST_S:
        raise ValueError(f"--rdzv-conf {name} must be {least:g} to {_LONGEST_S:g} seconds, not {value!r}")
    return seconds
