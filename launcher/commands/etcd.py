"""``unicron etcd``: an etcd server for one machine, in the foreground."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_elastic.launcher.config.answers import fail

if TYPE_CHECKING:
    from unicron_elastic.rendezvous.store.address import TlsFiles
    from unicron_elastic.rendezvous.store.server import EmbeddedEtcd


ENDED, BAD_USAGE = 1, 2


def etcd(
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Where to serve; 0: a free port.")] = 2379,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the data here; by default it goes when the server ends.")
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to serve on.")] = "127.0.0.1",
    *,
    ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Serve by TLS, and let in who shows a certificate of this CA.")
    ] = None,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's own certificate.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
) -> None:
    """Run an etcd server on this machine until Ctrl-C or SIGTERM.

    For one machine and for trying things out: without --ca it lets in whoever reaches it. A cluster should have an etcd
    of its own.
    """
    from unicron_elastic.rendezvous.store.server import EmbeddedEtcd, EmbeddedEtcdError

    tls = _tls(ca, cert, key)
    stopping, stop = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: _wake(stop))
    os.set_blocking(stop, False)
    server = EmbeddedEtcd(data_dir=data_dir, host=host, port=port, tls=tls)
    try:
        server.start()
    except EmbeddedEtcdError as error:
        fail(BAD_USAGE, f"{error}.")
    try:
        kept = f"keeps its data in {server.data_dir}" if data_dir is not None else "keeps nothing when it ends"
        typer.echo(f"etcd {server.version} serves {server.endpoint} and {kept}; it logs to {server.log_path}.")
        has_ended = _wait(server, stopping)
    finally:
        server.stop()
    if has_ended:
        fail(ENDED, "etcd ended by itself.")


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> TlsFiles | None:
    """All three or none: who else is let in would not have to prove anything."""
    from unicron_elastic.rendezvous.store.address import TlsFiles

    if ca is None and cert is None and key is None:
        return None
    if ca is None or cert is None or key is None:
        fail(BAD_USAGE, "TLS needs --ca, --cert and --key; give all three, or none of them.")
    tls = TlsFiles(ca=ca.absolute(), cert=cert.absolute(), key=key.absolute())
    try:
        tls.check()
    except ValueError as error:
        fail(BAD_USAGE, f"{error}.")
    return tls


def _wait(server: EmbeddedEtcd, stopping: int) -> bool:
    """Waits for a signal or the server's end, and says whether it was the end."""
    try:
        pidfd = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([stopping, pidfd], [], [])
    finally:
        os.close(pidfd)
    return stopping not in ready


def _wake(stop: int) -> None:
    try:
        os.write(stop, b"x")
    except BlockingIOError:  # woken often enough
        pass
