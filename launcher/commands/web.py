"""``unicron web``: where the cluster's web page is, and the password that opens it."""

from __future__ import annotations

from typing import Annotated

import typer

from unicron_elastic.launcher.commands.cluster import AsJson, OpenCluster, open_cluster, print_json
from unicron_elastic.launcher.config.answers import (
    NOTHING_FOUND,
    fail,
    show,
)
from unicron_elastic.launcher.config.cluster_options import ClusterOptions, cluster_options
from unicron_elastic.launcher.export.listen_address import ListenAddress
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.sign_in import password
from unicron_elastic.rendezvous.records.cluster import LEADER, SECRET, parse_leader, web_key


@cluster_options
def web(
    *,
    at: ClusterOptions,
    only_password: Annotated[bool, typer.Option("--only-password", help="Print the password alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say where the cluster's web page is, and its password.

    The password shows the page and does nothing else. Whoever may read the cluster's secret in etcd can have it.
    """
    with open_cluster(at) as cluster:
        secret = cluster.store.read(SECRET, timeout_s=cluster.left_s()).entry
        found = _whereabouts(cluster)
    if secret is None:
        fail(NOTHING_FOUND, f"No agent has been in the cluster at {cluster.where} yet.")
    word = password(secret.value.decode(errors="replace"))
    if as_json:
        print_json({"coordinator": found.host or None, "url": found.url or None, "password": word})
    else:
        show(word if only_password else f"{found.sentence}\nPassword: {word}")


def _whereabouts(cluster: OpenCluster) -> CoordinatorPlace:
    """Raises StoreError."""
    entry = cluster.store.read(LEADER, timeout_s=cluster.left_s()).entry
    try:
        leader = None if entry is None else parse_leader(entry)
    except ValueError as error:
        cluster.tell_odd([str(error)])
        leader = None
    if leader is None:
        return CoordinatorPlace(leads=False)
    told = cluster.store.read(web_key(leader.node_id), timeout_s=cluster.left_s()).entry
    try:
        place = None if told is None else ListenAddress.parse(told.value.decode(errors="replace"))
    except ValueError as error:
        cluster.tell_odd([str(error)])
        place = None
    return CoordinatorPlace(leads=False, host=leader.host, place=place)
