"""The options of ``unicron``'s commands that say where etcd is and how to be let in."""

from __future__ import annotations

from typing import Annotated

import typer

Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="ENDPOINT",
        help="Where etcd is: HOST:PORT, several with commas; else localhost:2379 "
        "[env: UNICRON_ETCD_ENDPOINT, PET_RDZV_ENDPOINT].",
    ),
]
Ca = Annotated[str | None, typer.Option(metavar="FILE", help="CA of etcd's certificates [env: UNICRON_ETCD_CA].")]
Cert = Annotated[str | None, typer.Option(metavar="FILE", help="Own certificate [env: UNICRON_ETCD_CERT].")]
Key = Annotated[str | None, typer.Option(metavar="FILE", help="Its key [env: UNICRON_ETCD_KEY].")]
User = Annotated[str | None, typer.Option(metavar="NAME", help="Who to be for etcd [env: UNICRON_ETCD_USER].")]
PasswordFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The user's password, as the only line "
        "[env: UNICRON_ETCD_PASSWORD_FILE, or UNICRON_ETCD_PASSWORD itself].",
    ),
]


def given(ca: str | None, cert: str | None, key: str | None, user: str | None, file: str | None) -> dict[str, str]:
    """The options by name, those that were given."""
    told = {"etcd_ca": ca, "etcd_cert": cert, "etcd_key": key, "etcd_user": user, "etcd_password_file": file}
    return {name: text for name, text in told.items() if text is not None}


def spelled(name: str) -> str:
    """An option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"
