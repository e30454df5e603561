"""What the whole cluster keeps in the store: keys and their texts, read with bounds. Never imports torch or gRPC.

Nodes and the leader are bound to leases of theirs, so that they go when their processes do. The quarantine and the
roster are bound to none: a host that belongs to the cluster is missed until it returns or is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote

from unicron_elastic.base.quarantine import TOO_LATE_UNIX_S, Quarantined, add
from unicron_elastic.rendezvous.records.job import NAME_CHARACTERS, REASON_CHARACTERS
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.rendezvous.store.records import number_in, object_in, odd, text_in

CLUSTER = "cluster/"
LEADER = f"{CLUSTER}leader"
SECRET = f"{CLUSTER}secret"
NODES = "nodes/"  # apart, as every agent watches the rest of the cluster
ROSTER = f"{NODES}roster/"  # by host; no agent's key has a slash there
QUARANTINE = f"{CLUSTER}quarantine/"
UNREACHABLE = f"{CLUSTER}unreachable/"  # by agent: the coordinator that it cannot reach
WEB = f"{CLUSTER}web/"  # by agent: where its web page is
JOBS = "jobs/"
CANCELLED_FOR_S = 600.0  # so long at least it is known that a job was cancelled
STOPS_FOR_S = 300.0  # so long its agents may be at it, and keep its other keys: these must not outlive that word
SPEC_MAX_BYTES = 256 * 1024  # of a job's arguments and environment, in UTF-8
_NODES_MAX = 1_000_000
_RECORD_MAX_BYTES = 64 * 1024  # of any other record, as JSON
_NUMBERS = ("min_nodes", "max_nodes", "target_nodes", "nproc_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """An agent that is alive, by its lease, and the job that it is in; a spare has none.

    At ``address``, IP:PORT, it can be asked whether it lives; "": nowhere.
    """

    node_id: str
    host: str
    job: str
    label: str
    pid: int
    is_spare: bool = False
    address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterRecord:
    """A host that belongs to the cluster, and which agent says so; that one takes it back when it ends in order.

    ``reason``: why it is lost, as the coordinator has seen it at ``lost_unix_s``; "": nobody has seen that it is.
    """

    host: str
    node_id: str
    reason: str = ""
    lost_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRecord:
    """The elected coordinator, by its lease. ``address`` is IP:PORT. Raises ValueError for another one.

    ``is_dedicated``: it has no node, and goes before agents that have one. ``since_unix_s``: 0.0 if it does not say.
    """

    node_id: str
    host: str
    address: str
    is_dedicated: bool = False
    since_unix_s: float = 0.0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        is_number = port.isascii() and port.isdecimal() and len(port) <= 5
        if not host or not is_number or not 0 < int(port) < 65536:
            raise ValueError(f"address must be IP:PORT, not {self.address[:80]!a}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplannedJobSpec:
    """What a job runs, and on how many nodes. Raises ValueError naming the field that cannot be right.

    Whoever may read the store may read it: ``env`` must hold no password.
    """

    min_nodes: int
    max_nodes: int
    target_nodes: int
    nproc_per_node: int
    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            number = getattr(self, name)
            if not 1 <= number <= _NODES_MAX:
                raise ValueError(f"{name} must be 1 to {_NODES_MAX}, not {str(number)[:20]}")
        if not self.min_nodes <= self.target_nodes <= self.max_nodes:
            raise ValueError(
                f"target_nodes must be {self.min_nodes} to {self.max_nodes}, which the job may have, "
                f"not {self.target_nodes}"
            )
        if not self.argv:
            raise ValueError("argv is empty")
        words = [*self.argv, *self.env, *self.env.values()]
        if any("\0" in word for word in (*words, self.cwd)):
            raise ValueError("argv, cwd and env must hold no NUL, which no process can be given")
        size = sum(len(word.encode(errors="surrogatepass")) for word in words)
        if size > SPEC_MAX_BYTES:
            raise ValueError(f"argv and env have at most {SPEC_MAX_BYTES} bytes together, not {size}")


def node_key(node_id: str) -> str:
    """Return the key of an agent."""
    return f"{NODES}{quote(node_id, safe='')}"


def node_text(record: NodeRecord) -> bytes:
    """What an agent's key holds."""
    return json.dumps(asdict(record)).encode()


def parse_node(entry: Entry) -> NodeRecord:
    """Raises ValueError for what is no record of the agent that the key names."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        record = NodeRecord(
            **{name: text_in(told, name)[:NAME_CHARACTERS] for name in ("node_id", "host", "job", "label")},
            pid=number_in(told, "pid", -(2**31), 31),
            is_spare=_flag(told, "is_spare"),
            address=text_in(told, "address")[:NAME_CHARACTERS],
        )
        if node_key(record.node_id) != entry.key:
            raise ValueError("node_id must be the one that the key names")
    except ValueError as error:
        raise odd(entry, "agent", error) from None
    return record


def roster_key(host: str) -> str:
    """Return the key of a host that belongs to the cluster."""
    return f"{ROSTER}{quote(host, safe='')}"


def roster_text(record: RosterRecord) -> bytes:
    """What such a key holds."""
    return json.dumps(asdict(record)).encode()


def parse_roster(entry: Entry) -> RosterRecord:
    """Raises ValueError for what does not say that the host of the key belongs to the cluster."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        texts = {name: text_in(told, name)[:NAME_CHARACTERS] for name in ("host", "node_id")}
        reason = text_in(told, "reason")[:REASON_CHARACTERS]
        record = RosterRecord(**texts, reason=reason, lost_unix_s=_moment(told, "lost_unix_s"))
        if roster_key(record.host) != entry.key:
            raise ValueError("host must be the one that the key names")
    except ValueError as error:
        raise odd(entry, "host of the cluster", error) from None
    return record


def unreachable_key(node_id: str) -> str:
    """Return the key of an agent that cannot reach the coordinator."""
    return f"{UNREACHABLE}{quote(node_id, safe='')}"


def web_key(node_id: str) -> str:
    """Return the key of an agent that serves a web page, if it coordinates."""
    return f"{WEB}{quote(node_id, safe='')}"


def leader_text(record: LeaderRecord) -> bytes:
    """What the leader's key holds."""
    return json.dumps(asdict(record)).encode()


def parse_leader(entry: Entry) -> LeaderRecord:
    """Raises ValueError for what is no leader."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        texts = {name: text_in(told, name)[:NAME_CHARACTERS] for name in ("node_id", "host", "address")}
        since_unix_s = _moment(told, "since_unix_s")
        return LeaderRecord(**texts, is_dedicated=_flag(told, "is_dedicated"), since_unix_s=since_unix_s)
    except ValueError as error:
        raise odd(entry, "leader", error) from None


def quarantine_key(host: str) -> str:
    """Return the key of a node that is kept out of all jobs of the cluster."""
    return f"{QUARANTINE}{quote(host, safe='')}"


def quarantine_text(quarantined: Quarantined) -> bytes:
    """What such a key holds."""
    return json.dumps(quarantined.to_json()).encode()


def parse_quarantined(entry: Entry) -> Quarantined:
    """Raises ValueError for what does not keep out the node that the key names."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        quarantined = Quarantined.from_json(told)
        if quarantine_key(quarantined.node) != entry.key:
            raise ValueError("node must be the one that the key names")
    except ValueError as error:
        raise odd(entry, "node in quarantine", error) from None
    return quarantined


def add_quarantined(found: Entry | None, new: Quarantined) -> Quarantined:
    """Return ``new`` together with what is there; what cannot be read gives way to it."""
    if found is not None:
        with suppress(ValueError):
            return add([parse_quarantined(found)], new)[-1]
    return new


def spec_text(spec: UnplannedJobSpec) -> bytes:
    """What the key of a job's spec holds."""
    fields = {name: getattr(spec, name) for name in _NUMBERS}
    return json.dumps({**fields, "argv": list(spec.argv), "cwd": spec.cwd, "env": dict(spec.env)}).encode()


def parse_spec(entry: Entry) -> UnplannedJobSpec:
    """Raises ValueError for what no job can run."""
    told = object_in(entry, 8 * SPEC_MAX_BYTES)  # JSON may take six bytes for one
    try:
        argv, env = told.get("argv"), told.get("env")
        if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
            raise ValueError("argv must be a list of texts")
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ValueError("env must be an object of texts")
        numbers = {name: number_in(told, name, -(2**31), 31) for name in _NUMBERS}
        return UnplannedJobSpec(**numbers, argv=tuple(argv), cwd=text_in(told, "cwd"), env=env)
    except ValueError as error:
        raise odd(entry, "job's spec", error) from None


def _moment(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name, 0.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < TOO_LATE_UNIX_S:
        raise ValueError(f"{name} must be unix seconds")
    return float(value)


def _flag(told: Mapping[str, Any], name: str) -> bool:
    value = told.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false")
    return value
