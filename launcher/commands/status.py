"""``unicron status``: the whole cluster on one screen, with an exit code for scripts. No torch here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.commands.cluster import TIMEOUT_S, AsJson, OpenCluster, open_cluster, print_json
from unicron_elastic.launcher.config.answers import (
    BAD_USAGE,
    UNREADABLE,
    say,
)
from unicron_elastic.launcher.config.cluster_options import ClusterOptions, cluster_options
from unicron_elastic.rendezvous.store.interface import StoreError

if TYPE_CHECKING:
    from unicron_elastic.launcher.view.cluster.overview import Overview


_ELSEWHERE = (
    "A job whose nodes meet without etcd, as torchrun's do, is seen on its own nodes only: by what unicron-run shows "
    "there, its --metrics-port, and unicron incidents."
)


class StatusCommand(TyperCommand):
    """Of ``status``: a mistake on its command line is no verdict, and does not exit with the code of one."""

    no_answer = UNREADABLE

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Raises what typer's own does."""
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            if getattr(error, "exit_code", None) == BAD_USAGE:
                error.exit_code = UNREADABLE  # type: ignore[attr-defined]
            raise


@cluster_options
def status(
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C; in a log, tell only what changes.")
    ] = False,
    interval: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds between two looks.")] = 2.0,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """Show the whole cluster: whether it is well, its jobs, nodes, last incidents and plan.

    What is worst comes first, and what does not fit on the terminal is counted. The exit code is 0 if all is well, 1 if
    something is degraded, 2 if something is critical, and 3 if the cluster cannot be read; with --watch as of the last
    look. With --json --watch each change is one line.
    """
    try:
        with open_cluster(at) as cluster:
            code = _watch(cluster, interval, as_json=as_json) if watch else _once(cluster, as_json=as_json)
    except typer.Exit:  # which has been said
        say(_ELSEWHERE)
        raise typer.Exit(UNREADABLE) from None
    raise typer.Exit(code)


def _once(cluster: OpenCluster, *, as_json: bool) -> int:
    """The exit code. Raises StoreError."""
    from unicron_elastic.launcher.commands import show as status_show

    overview = _look(cluster)
    if as_json:
        print_json(overview.to_json())
    else:
        status_show.show_once(overview)
        if not overview.jobs:
            say(_ELSEWHERE)
    return status_show.exit_code(overview)


def _watch(cluster: OpenCluster, interval_s: float, *, as_json: bool) -> int:
    """The exit code of the last look. Raises StoreError if the first one is not possible."""
    from unicron_elastic.launcher.commands import show as status_show

    console = None if as_json else status_show.terminal()
    overview = _look(cluster)
    with status_show.Log(as_json=as_json) if console is None else status_show.Screen(console) as follower:
        code = follower.see(overview)
        try:
            while True:
                time.sleep(interval_s)
                try:
                    code = follower.see(_look(cluster))
                except StoreError as error:
                    cluster.reopen()
                    code = follower.cannot_see(f"The cluster cannot be read: {one_line(str(error)).rstrip('.')}.")
        except KeyboardInterrupt:
            return code


def _look(cluster: OpenCluster) -> Overview:
    """Raises StoreError."""
    from unicron_elastic.launcher.view.cluster.reading import overview_of  # it calculates

    seen = cluster.store.read_prefix("", timeout_s=TIMEOUT_S)  # each time anew, however long one follows it
    return overview_of(seen, time.time(), where=cluster.where)
