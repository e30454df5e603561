"""The options of ``unicron``'s commands that say where the cluster's store is and how to be let in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

_PARAMETER = "at"  # of a command: what these options said


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options as they were given: an endpoint, and the others by name."""

    endpoint: str | None
    others: Mapping[str, str]

    def over(self, before: ClusterOptions | None) -> ClusterOptions:
        """Return these on top of those of the command before this one."""
        if before is None:
            return self
        return ClusterOptions(self.endpoint or before.endpoint, {**before.others, **self.others})


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options in the place of its parameter ``at``, which gets what they said."""
    own = get_type_hints(command, include_extras=True)
    parameters: list[Parameter] = []
    for each in inspect.signature(command).parameters.values():
        if each.name == _PARAMETER:
            parameters += [
                Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=hint) for name, hint in HINTS.items()
            ]
        else:
            parameters.append(each.replace(annotation=own[each.name]))

    @functools.wraps(command)
    def called(*arguments: Any, **named: Any) -> None:
        said = {name: named.pop(name, None) for name in HINTS}
        endpoint = said.pop("endpoint")
        at = ClusterOptions(endpoint, {name: text for name, text in said.items() if text is not None})
        command(*arguments, **named, **{_PARAMETER: at})

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def spelled(name: str) -> str:
    """Return an option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def _hint(metavar: str, text: str) -> Any:
    return Annotated[str | None, typer.Option(metavar=metavar, help=text)]


HINTS: dict[str, Any] = {
    "endpoint": _hint(
        "ENDPOINT",
        "Where etcd is: HOST:PORT, several with commas; else localhost:2379 "
        "[env: UNICRON_ETCD_ENDPOINT, PET_RDZV_ENDPOINT].",
    ),
    "etcd_ca": _hint("FILE", "CA of etcd's certificates [env: UNICRON_ETCD_CA]."),
    "etcd_cert": _hint("FILE", "Own certificate [env: UNICRON_ETCD_CERT]."),
    "etcd_key": _hint("FILE", "Its key [env: UNICRON_ETCD_KEY]."),
    "etcd_user": _hint("NAME", "Who to be for etcd [env: UNICRON_ETCD_USER]."),
    "etcd_password_file": _hint(
        "FILE",
        "The user's password, as the only line [env: UNICRON_ETCD_PASSWORD_FILE, or UNICRON_ETCD_PASSWORD itself].",
    ),
}
