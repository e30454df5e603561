"""Writes the pages of the reference that are made from the code: options and the keys in etcd.

``python docs/tools/reference.py`` writes them, ``--check`` only says what is out of date. A key, an option or a
variable that the code has and this file does not describe is an error here, so that none is forgotten.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from unicron_elastic.compat.command_line import torchrun_parser
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.config import options
from unicron_elastic.launcher.config import table as config_table
from unicron_elastic.launcher.config.odd_variables import INNER_VARIABLES
from unicron_elastic.launcher.config.settings import SHARED
from unicron_elastic.membership.rounds import WAITS_S
from unicron_elastic.rendezvous.records import cluster as cluster_records
from unicron_elastic.rendezvous.records import news, plan_keys
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store import connection as etcd_connection
from unicron_elastic.rendezvous.store import etcd as etcd_store
from unicron_elastic.rendezvous.store import options as etcd_options

DOCS = Path(__file__).parents[1]
SOURCES = ("launcher", "rendezvous", "unicron_elastic")
MADE = "<!-- Made by docs/tools/reference.py from the code: change it there. -->"


def _wait(name: str) -> str:
    return f"{WAITS_S[name]:g}"


# Of --rdzv-conf with the back end unicron, as create_handler.py and plugin.py read them. Name, default, meaning.
RDZV_CONF = (
    ("last_call_timeout", _wait("last_call_timeout"), "seconds for more than MIN nodes to come to the first round"),
    ("join_timeout", _wait("join_timeout"), "seconds for a round to begin"),
    ("connect_timeout", _wait("connect_timeout"), "seconds for etcd to answer at the start"),
    (
        "lease_ttl",
        _wait("lease_ttl"),
        "seconds after which an agent that hangs is lost; etcd grants no less than its election time",
    ),
    ("target_nodes", "MAX", "how many nodes train; the others are spares"),
    ("expected_nodes", "as many as train at most", "how many come to the first round, if that is known"),
    ("blind_patience", _wait("blind_patience"), "seconds that a node trains without seeing etcd; 10 at the least"),
    ("nodes", "--nnodes", "MIN:MAX, for launchers that can give one number of nodes"),
    ("agent", "unicron", "under torchrun: whose agent runs the job, unicron's or torch's"),
    ("label", "", "place in the network: equal and similar labels get neighbouring ranks"),
    ("start", "", "which start of a planned job this is; the cluster's agent sets it"),
    *((name, "", f"or `UNICRON_{name.upper()}`") for name in etcd_options.OPTIONS),
)

# Options that not every torch has, from which one on: the page is the same with each.
NEWER_TORCH = {"shutdown_timeout": "2.12", "log_line_prefix_template": "2.14"}
# Defaults that not every torch has: the page is the same with each.
DEFAULTS = {"master_port": "a free one; before torch 2.12 `29500`"}

# Settings without an option, in the section of a file that all commands share.
WITHOUT_OPTION = ("etcd_password", "quarantine", "node_name", "in_place", "spec_env")

JOB = "JOB"
LEASE_AGENT = "the agent's lease"
LEASE_JOB = "the job's lease: until its last agent goes if it is over; else for `blind_patience` and 70 s more"
TWO_ROUNDS = "the next round, or the one after it; the job's lease"
TEN_MINUTES, A_DAY, STAYS = "10 minutes", "a day after the job's end", "until it is changed"

# By the code's name of the key: what keeps it, and what it holds.
CLUSTER_KEYS = {
    "LEADER": (LEASE_AGENT, "who coordinates, and its address"),
    "SECRET": (STAYS, "what all agents of the cluster know, 32 random bytes as hex; made by the first of them"),
    "NODES": (LEASE_AGENT, "an agent: host, job, label, process, address"),
    "ROSTER": (
        "until the host's agent ends in order, or it is forgotten",
        "a host that is missed: lost since when, why",
    ),
    "QUARANTINE": ("until it is lifted, or its time is over", "a host that is kept out, why, by whom, until when"),
    "UNREACHABLE": (LEASE_AGENT, "by agent: the coordinator that it cannot reach"),
    "WEB": (LEASE_AGENT, "by agent: where its web page is, ADDRESS:PORT"),
}
JOB_KEYS = {
    "round": (LEASE_JOB, "who trains together, in the order of their ranks"),
    "closed": (TEN_MINUTES, "why the job is over"),
    "failed": (TEN_MINUTES, "why it was closed, if it did not end well"),
    "lease": (LEASE_JOB, "the job's lease, which all its agents keep alive"),
    "restarts": (LEASE_JOB, "how many restarts count, for nodes that take over from all others"),
    "leaving": (LEASE_JOB, "the round, and how many of its nodes leave it"),
    "held": (LEASE_AGENT, "why nodes that wait to join are not let in now"),
    "claims": ("the lease of the spare", "by number: a spare that is on its way"),
    "spec": (LEASE_JOB, "**the command line**, folder and variables, for nodes that are lent to it"),
    "cancelled": ("longer than the job's lease, ten minutes at least", "why, by an operator"),
    "member": (LEASE_AGENT, "an agent that is there: host, label, the round that it waits for"),
    "claim": None,  # of claims
    "lost": (TEN_MINUTES, "why the coordinator has removed an agent, or why it left, and whether in good order"),
    "departing": (TWO_ROUNDS, "why an agent that is well is about to leave, or has left"),
    "recalled": ("the lease of the cluster's agent there", "why a node is wanted elsewhere"),
    "world": (TWO_ROUNDS, "the ranks that train together: the latest eight worlds of a round, one after the other"),
    "latest_world": (TWO_ROUNDS, "the latest place of a round"),
    "store": (
        "the agent that hosts it tells of its two latest; its lease",
        "where the workers of a round find their store, HOST:PORT",
    ),
}
PLAN_KEYS = {
    "CURRENT": (STAYS, "the plan: who gets which nodes, and why"),
    "FAULTS": (STAYS, "how many faults there were in how much node time: the next fault that is to be expected"),
    "NODE_RECORDS": (LEASE_AGENT, "what an agent says that it does: idle, joining, working, leaving"),
    "ORDERS": ("the lease of the node's agent", "what a node is to do, and by which plan"),
}
PLANNED_KEYS = {
    "spec": (A_DAY, "**the command line**, folder, variables, weight, bounds and rates of a job"),
    "phase": (A_DAY, "how far the job is, why, the number of its latest start, and its exit code"),
    "rates": (A_DAY, "T(t, x) from which plans are made"),
    "measured": (A_DAY, "what the job has measured of its own steps"),
    "output": ("the lease of who submitted it", "where its output is wanted, HOST:PORT"),
    "refusals": (A_DAY, "by node: why that one does not work for it"),
}

NEWS_KEYS = {
    "JOB_NEWS": (
        "JOB",
        "a minute after it was last told",
        "how far the job is, as its first node says: steps, seconds of one",
    ),
    "INCIDENTS": ("HOST", "a day after the last", "the last incidents of a node, without stacks and messages"),
}


def options_page() -> str:
    """Of ``unicron-run``, ``--rdzv-conf``, torchrun, ``unicron``, and the environment."""
    run = "unicron-run"
    return _page(
        "Options and variables",
        "Each option can be given on the command line, as an environment variable, or under its key in a file: a flag "
        "goes before the environment, that before the file, that before the default "
        "([configuration](configuration.md)). Names may be written with dashes or underscores.",
        _section(f"{run}: its own options", ("option", "variable", "key", "default", "meaning"), _own_options()),
        _section(f"{run}: jobs of a cluster", ("option", "variable", "key", "default", "meaning"), _cluster_options()),
        _section(
            f"{run}: what `--rdzv-conf` takes with `--rdzv-backend unicron`", ("name", "default", ""), _conf_rows()
        ),
        _section(f"{run}: torchrun's options", ("option", "variable", "key", "default"), _torchrun_options()),
        *_commands(),
        _section("Without an option", ("variable", "key", "meaning"), _without_option()),
        _section("Variables that the parts tell each other", ("variable", "meaning"), _variables(INNER_VARIABLES)),
    )


def keys_page() -> str:
    """Every key that is written to etcd."""
    root = f"{inspect.signature(etcd_store.EtcdStore).parameters['namespace'].default}/"
    return _page(
        "Keys in etcd",
        f"All are below `{root}`, so a user of etcd needs that prefix and nothing else. Values are JSON or plain text, "
        "and are read with bounds; what cannot be read is left out and said. Names in keys are quoted as in a URL. "
        "A key goes with what keeps it: when that lease ends, so does the key.",
        _section("Of the cluster", ("key", "kept by", "holds"), _cluster_rows(root)),
        _section("Of a job that runs", ("key", "kept by", "holds"), _job_rows(root)),
        "`JOB` is the `--rdzv-id`. A planned job may start several times, and each start has keys of its own: "
        f"`{plan_keys.run_of_start('JOB', 1)}`. So no job may be called so.\n",
        _section("Of planning", ("key", "kept by", "holds"), _plan_rows(root)),
        _section("For people to look at", ("key", "kept by", "holds"), _news_rows(root)),
    )


PAGES: dict[str, Callable[[], str]] = {"reference-options.md": options_page, "reference-keys.md": keys_page}


# -- options -------------------------------------------------------------------------------------------------------


def _own_options() -> Iterator[tuple[str, ...]]:
    defaults = options.Options()
    for option in options.OPTIONS:
        value = _value(getattr(defaults, option.name)) or _default_in(option.help)
        key = f"`run.{option.name}`"
        yield f"`{option.flag} {_plain(option.metavar)}`", f"`{option.variable}`", key, value, _meaning(option.help)


def _cluster_options() -> Iterator[tuple[str, ...]]:
    parser = argparse.ArgumentParser(add_help=False)
    options.add_cluster_arguments(parser)
    for action in parser._actions:
        words = f"{action.option_strings[0]} {action.metavar or ''}".strip()
        text = action.help or ""
        yield f"`{words}`", _variables_in(text), f"`run.{action.dest}`", _default_in(text), _meaning(text)


def _torchrun_options() -> Iterator[tuple[str, ...]]:
    of_torch = {action.dest for action in torchrun_parser()._actions}
    for use in config_table.run_uses():
        setting = use.setting
        if setting.section == config_table.RUN and setting.key in of_torch - set(NEWER_TORCH):
            default = f"`{_plain(setting.default)}`" if setting.default else ""
            row = (f"`{use.flags[0]}`", f"`{setting.variables[0]}`", f"`{setting.name}`")
            yield *row, DEFAULTS.get(setting.key, default)
    for key, version in NEWER_TORCH.items():
        yield f"`--{key.replace('_', '-')}` (torch {version} or newer)", f"`PET_{key.upper()}`", f"`run.{key}`", ""


def _conf_rows() -> Iterator[tuple[str, ...]]:
    text = inspect.getsource(sys.modules["unicron_elastic.rendezvous.store.options"])
    for path in ("rendezvous/torch/create_handler.py", "launcher/plugin.py"):
        text += (DOCS.parent / path).read_text(encoding="utf-8")
    for name, default, meaning in RDZV_CONF:
        _require(f'"{name}"' in text, f"--rdzv-conf {name} is not read anywhere")
        yield f"`{name}`", default, meaning
    described = {name for name, _, _ in RDZV_CONF}
    for name in re.findall(r'(?:_seconds|_number)\(parameters, "(\w+)"', text):
        _require(name in described, f"--rdzv-conf {name} is not described")


def _commands() -> Iterator[str]:
    head = ("", "variable", "key", "default", "meaning")
    where = '## unicron: where etcd is\n\nCommands that say "and where etcd is" take these as well.\n'
    known = dict(commands())
    yield where + _section("", head, _etcd_rows(known["unicron nodes"]))
    for words, command in known.items():
        parameters = _rest(command)
        if hasattr(command, "commands") and not parameters:
            continue
        keys = _keys(words)
        rows = [_command_row(parameter, keys) for parameter in parameters if not _is_etcd(parameter)]
        table = _section("", head, rows) if rows else ""
        where = "\nAnd where etcd is.\n" if any(map(_is_etcd, parameters)) else ""
        yield f"## {words}\n\n{_prose(command.help or '')}\n{where}{table}"


def _etcd_rows(command: Any) -> list[tuple[str, ...]]:
    return [_command_row(each, _keys("unicron nodes")) for each in _rest(command) if _is_etcd(each)]


def _keys(words: str) -> dict[str, str]:
    """Where the command's parameters are in a file."""
    path = tuple(words.split()[1:])
    return {use.parameter: use.setting.name for use in config_table.all_uses(path)} if path else {}


def _rest(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.name not in ("help", "config", "version")]


def _is_etcd(parameter: Any) -> bool:
    return parameter.name in ("endpoint", *etcd_options.OPTIONS)


def _prose(text: str) -> str:
    """A command's help; what it has in columns stays so."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join("```text" + part[1:] + "\n```" if part.startswith("\b") else part for part in parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Each command of ``unicron`` with its words."""

    def below(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield words, command
        for name, child in getattr(command, "commands", {}).items():
            yield from below(f"{words} {name}", child)

    yield from below("unicron", typer.main.get_command(app))


def _command_row(parameter: Any, keys: dict[str, str]) -> tuple[str, ...]:
    if parameter.param_type_name == "argument":
        text = parameter.help or ""
        return f"`{_plain(parameter.metavar or parameter.name.upper())}`", _variables_in(text), "", "", _meaning(text)
    words = "`, `".join([*parameter.opts, *parameter.secondary_opts])
    text = parameter.help or ""
    value = None if parameter.default is False else parameter.default
    return f"`{words}`", _variables_in(text), f"`{keys[parameter.name]}`", _value(value), _meaning(text)


def _without_option() -> Iterator[tuple[str, ...]]:
    yield "`UNICRON_CONFIG`", "", "the file with settings, as `--config` of every command"
    shared = config_table.SettingsTable()[SHARED]
    for name in WITHOUT_OPTION:
        yield f"`{shared[name].variables[0]}`", f"`{shared[name].name}`", shared[name].help


def _variables(described: dict[str, str]) -> Iterator[tuple[str, ...]]:
    undescribed = found_variables() - known_variables()
    _require(not undescribed, f"the code has the variables {sorted(undescribed)}, which are not described")
    for name, meaning in described.items():
        _require(name in found_variables(), f"{name} is described, and no code reads it")
        yield f"`{name}`", meaning


@cache
def found_variables() -> set[str]:
    """Every variable of our own that the code names."""
    files = [path for folder in SOURCES for path in (DOCS.parent / folder).rglob("*.py")]
    return {name for path in files for name in re.findall(r"\bUNICRON_[A-Z][A-Z_]*[A-Z]\b", path.read_text("utf-8"))}


def known_variables() -> set[str]:
    """Every one that the page has."""
    settings = [setting for section in config_table.SettingsTable().values() for setting in section.values()]
    return {*INNER_VARIABLES, "UNICRON_CONFIG", *(name for setting in settings for name in setting.variables)}


# -- keys ----------------------------------------------------------------------------------------------------------


def _cluster_rows(root: str) -> Iterator[tuple[str, ...]]:
    names = {"NODES": "NODE", "ROSTER": "HOST", "QUARANTINE": "HOST", "UNREACHABLE": "NODE", "WEB": "NODE"}
    not_records = {"CLUSTER", "JOBS"}  # prefixes of others
    constants = {name for name, value in vars(cluster_records).items() if name.isupper() and name[0] != "_"}
    keys = {name for name in constants if isinstance(getattr(cluster_records, name), str)}
    _require(keys - not_records == set(CLUSTER_KEYS), f"the cluster's keys are {sorted(keys)}: describe each of them")
    for name, (kept_by, holds) in CLUSTER_KEYS.items():
        yield f"`{root}{getattr(cluster_records, name)}{names.get(name, '')}`", kept_by, holds
    what = "a random value that tells one store from another"
    yield f"`{root}{etcd_connection.INCARNATION}`", STAYS, what


def _job_rows(root: str) -> Iterator[tuple[str, ...]]:
    keys = JobKeys(JOB)
    arguments: dict[str, tuple[Any, ...]] = {
        "world": ("ROUND", "PLACE"),
        "latest_world": ("ROUND",),
        "store": ("ROUND",),
    }
    methods = {name for name, _ in inspect.getmembers(JobKeys, inspect.isfunction) if name[0] != "_"}
    there = {name for name in vars(keys) if name != "prefix"} | methods
    _require(there == set(JOB_KEYS), f"a job's keys are {sorted(there)}: describe each of them")
    for name, described in JOB_KEYS.items():
        if described is None:
            continue
        found = getattr(keys, name)
        of = "HOST" if name == "recalled" else "NODE"
        key = found(*arguments.get(name, (of,))) if name in methods else found
        yield f"`{root}{key}{'NUMBER' if key.endswith('/') else ''}`", *described


def _plan_rows(root: str) -> Iterator[tuple[str, ...]]:
    public = {name for name in vars(plan_keys) if name.isupper() and not name.startswith("_")}
    constants = public - {"PLAN", "JOB_RECORDS", "VERDICT_VARIABLE"}
    _require(constants == set(PLAN_KEYS), f"the keys of planning are {sorted(constants)}: describe each of them")
    for name, described in PLAN_KEYS.items():
        key = getattr(plan_keys, name)
        yield f"`{root}{key}{'NODE' if key.endswith('/') else ''}`", *described
    keys = plan_keys.PlannedJobKeys(JOB)
    there = set(vars(keys)) - {"name", "prefix"}
    _require(there == set(PLANNED_KEYS), f"a planned job's keys are {sorted(there)}: describe each of them")
    for name, described in PLANNED_KEYS.items():
        key = getattr(keys, name)
        yield f"`{root}{key}{'NODE' if key.endswith('/') else ''}`", *described


def _news_rows(root: str) -> Iterator[tuple[str, ...]]:
    keys = {name for name, value in vars(news).items() if name.isupper() and isinstance(value, str)} - {"NEWS"}
    _require(keys == set(NEWS_KEYS), f"the keys of news are {sorted(keys)}: describe each of them")
    for name, (of, kept_by, holds) in NEWS_KEYS.items():
        yield f"`{root}{getattr(news, name)}{of}`", kept_by, holds


# -- text ----------------------------------------------------------------------------------------------------------


def _page(title: str, introduction: str, *parts: str) -> str:
    return "\n".join([f"# {title}\n", MADE, "", f"{introduction}\n", *parts])


def _section(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"## {title}", ""] if title else [""]
    lines += [_row(head), _row(tuple("---" for _ in head)), *map(_row, rows), ""]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _meaning(text: str) -> str:
    """A help text without what other columns have."""
    text = re.sub(r"\s*\(default: [^()]*\)", "", re.sub(r"\s*\[env: [^]]*\]", "", " ".join(text.split())))
    return _plain(text.strip().removesuffix("."))


def _default_in(text: str) -> str:
    found = re.search(r"\(default: ([^()]*)\)", " ".join(text.split()))
    return "" if found is None or found[1] == "none" else _plain(found[1])


def _variables_in(text: str) -> str:
    found = re.search(r"\[env: ([^]]*)\]", " ".join(text.split()))
    return "" if found is None else re.sub(r"\b[A-Z_]{4,}(?:=1)?", lambda name: f"`{name[0]}`", found[1])


def _value(value: Any) -> str:
    if value is None or value in ("", argparse.SUPPRESS):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, frozenset):
        value = ",".join(map(str, sorted(value)))
    return f"`{_plain(f'{value:g}' if isinstance(value, float) else str(value))}`"


def _plain(text: str) -> str:
    return text.replace("|", ", ")  # which would end a cell


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise LookupError(f"{why} (docs/tools/reference.py)")


def main(words: list[str]) -> int:
    """Writes the pages, or says which are out of date."""
    old = [name for name, made in PAGES.items() if _text(DOCS / name) != made()]
    if "--check" not in words:
        for name in old:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
    for name in old:
        print(f"docs/{name} {'is out of date' if '--check' in words else 'was written'}")
    return int("--check" in words and bool(old))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
