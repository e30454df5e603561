"""``unicron coordinator`` and ``unicron agent``: what belongs to a cluster and to no job, in the foreground."""

from __future__ import annotations

import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable
from typing import Annotated

import typer

from unicron_elastic.base.node_name import node_label, node_name
from unicron_elastic.launcher.common.output import StampedFormatter, stamped
from unicron_elastic.launcher.config.answers import fail
from unicron_elastic.launcher.config.cluster_options import ClusterOptions, cluster_options, spelled
from unicron_elastic.launcher.export.metrics.serve_metrics import MetricsAddress, MetricsPort, serve_metrics
from unicron_elastic.launcher.export.web.serve_web import WebAddress, WebPort, serve_web, web_place
from unicron_elastic.rendezvous.records.cluster import NodeRecord, web_key
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import Store, StoreError
from unicron_elastic.rendezvous.store.open import store_opener
from unicron_elastic.rendezvous.store.options import address_from_options
from unicron_elastic.rendezvous.store.own_address import own_address

FAILED, BAD_USAGE = 1, 2
LEASE_TTL_S = 3.0
CONNECT_TIMEOUT_S = 30.0

_Address = Annotated[
    str, typer.Option("--address", metavar="HOST", help="Where other nodes find this one; else its host name.")
]
_Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Its name [env: UNICRON_NODE_NAME].")]
_Label = Annotated[
    str,
    typer.Option("--label", metavar="TEXT", help="Its place in the network, such as a rack: neighbours share jobs."),
]


@cluster_options
def coordinator(
    *,
    at: ClusterOptions,
    address: _Address = "",
    name: _Name = "",
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = None,
    web_port: WebPort = None,
    web_address: WebAddress = None,
) -> None:
    """Coordinate the cluster from a process without a node, until Ctrl-C or SIGTERM.

    Without one, some agent does it beside its work. While several run, one coordinates and the others stand by.
    """
    from unicron_elastic.launcher.export.metrics.cluster import CoordinatorMetrics
    from unicron_elastic.rendezvous.cluster.cluster_answers import ClusterAnswers
    from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello
    from unicron_elastic.rendezvous.cluster.heartbeats import NodeHeartbeats
    from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
    from unicron_elastic.rendezvous.plan.planner import Planner

    page = web_place(web_port, web_address)
    stopped = _until_signal()
    open_store, where = _opener(at)
    host = _host(name)
    try:
        hello = Hello(f"{host}/{uuid.uuid4().hex[:12]}", host, "")
        own = address or own_address(where)
        heartbeats = NodeHeartbeats(hello, address, own, is_dedicated=True, say=_say)
        presence = ClusterPresence(open_store, LEASE_TTL_S, None)
        presence.tells_sight = True
        presence.enter(CONNECT_TIMEOUT_S)
        planner = Planner(open_store, _say)
        heartbeats.on_lead = planner.lead
        heartbeats.start(presence)
        answers = CoordinatorMetrics(lambda: ClusterAnswers(heartbeats, planner))
    except (StoreError, OSError) as error:
        fail(FAILED, f"the cluster cannot be joined: {error}.")
    server = serve_metrics(metrics_port, metrics_address, answers, _say)
    web = None
    if page is not None:
        web = serve_web(
            page,
            own,
            _say,
            lambda told: presence.say(web_key(hello.node_id), told),
            open_store=open_store,
            presence=lambda: presence,
            leads=lambda: heartbeats.leads,
            figures=lambda: planner.figures,
            where=where,
        )
    _say(f"{host} stands by to coordinate the cluster, at {heartbeats.address}.")
    stopped.wait()
    if web is not None:
        web.close()
    planner.close()
    presence.leave()
    heartbeats.close()
    if server is not None:
        server.close()


@cluster_options
def agent(
    *,
    at: ClusterOptions,
    address: _Address = "",
    name: _Name = "",
    label: _Label = "",
    metrics_port: MetricsPort = None,
    metrics_address: MetricsAddress = None,
    web_port: WebPort = None,
    web_address: WebAddress = None,
) -> None:
    """Join this node to the cluster, until Ctrl-C or SIGTERM: the plan says which job it works for.

    While the plan has no use for it, it helps a job that nobody plans and that has fewer nodes than it wants.
    """
    from unicron_elastic.launcher.node.agent import ClusterAgent
    from unicron_elastic.planning.coordinate.node_status import NodeStatus
    from unicron_elastic.rendezvous.cluster.node import ClusterNode

    page = web_place(web_port, web_address)
    open_store, where = _opener(at)
    host, own = _host(name, label), address or own_address(where)
    node_id = f"{host}/{uuid.uuid4().hex[:12]}"
    record = NodeRecord(node_id=node_id, host=host, job="", label=label, pid=os.getpid(), is_spare=True)
    node = ClusterNode(open_store, LEASE_TTL_S, record, bind=address, address=own)
    found = ClusterAgent(
        node,
        open_store,
        NodeStatus(node_id=node_id, host=host, label=label),
        endpoint=",".join(map(str, where.endpoints)),
        etcd={f"UNICRON_{option.upper()}": text for option, text in at.others.items()},
        address=address,
        say=_say,
    )
    server = serve_metrics(metrics_port, metrics_address, found.answers(), _say)
    found.tells_metrics = server is not None
    web = None
    if page is not None:
        web = serve_web(
            page,
            own,
            _say,
            lambda told: node.say(web_key(node_id), told),
            open_store=open_store,
            presence=lambda: node.presence,
            leads=lambda: node.leads,
            figures=lambda: node.answers().plan(),
            where=where,
        )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: found.stop())
    try:
        node.enter(CONNECT_TIMEOUT_S)
        if why := node.why_kept_out():
            _say(f"{why} It waits until that is over.")
        _say(f"{host} is a spare of the cluster.")
        found.run()
    except (StoreError, OSError) as error:
        fail(FAILED, f"the cluster cannot be joined: {error}.")
    finally:
        if web is not None:
            web.close()
        node.leave()
        if server is not None:
            server.close()


def _opener(at: ClusterOptions) -> tuple[Callable[[], Store], StoreAddress]:
    try:
        address = address_from_options(at.endpoint, at.others, spell=spelled)
    except ValueError as error:
        fail(BAD_USAGE, f"{error}.")
    handler = logging.StreamHandler()
    handler.setFormatter(StampedFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return store_opener(address), address


def _host(name: str, label: str = "") -> str:
    try:
        node_label(label, "--label")
        return node_name(name)
    except ValueError as error:
        fail(BAD_USAGE, f"{error}.")


def _until_signal() -> threading.Event:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stopped.set())
    return stopped


def _say(sentence: str) -> None:
    typer.echo(stamped(sentence), nl=False, err=True)
