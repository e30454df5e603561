"""``unicron``: what an operator asks beside the running jobs. Never imports torch: the answer comes in a blink."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from unicron_elastic import __version__
from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import find_ledgers, read_ledger
from unicron_elastic.base.state_folder import state_folder
from unicron_elastic.base.text import counted, one_line
from unicron_elastic.launcher.commands import chaos as chaos_cli
from unicron_elastic.launcher.commands import cluster as cluster_cli
from unicron_elastic.launcher.commands import completion as completion_cli
from unicron_elastic.launcher.commands import config as config_cli
from unicron_elastic.launcher.commands import etcd as etcd_cli
from unicron_elastic.launcher.commands import plan as plan_cli
from unicron_elastic.launcher.commands import quarantine as quarantine_cli
from unicron_elastic.launcher.commands import services as cluster_services
from unicron_elastic.launcher.commands import simulate as simulate_cli
from unicron_elastic.launcher.commands import status as status_cli
from unicron_elastic.launcher.commands import web as web_cli
from unicron_elastic.launcher.config.answers import BAD_USAGE, NOTHING_FOUND, fail
from unicron_elastic.launcher.config.commands import ConfiguredGroup
from unicron_elastic.launcher.config.table import declare_commands

_EVIDENCE_BYTES = 20_000  # of a report that are looked at

_SECTIONS = (
    ("See", ("status", "jobs", "nodes", "plan", "incidents", "web")),
    ("Operate", ("drain", "undrain", "cancel", "quarantine")),
    ("Run a cluster, to which unicron-run --cluster submits jobs", ("agent", "coordinator", "etcd")),
    ("Tools", ("simulate", "chaos", "config", "completion", "version")),
)


class SortedCommands(ConfiguredGroup):
    """`SortedCommands` lists the commands by what they are for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return their names in that order."""
        sorted_names = [name for _, names in _SECTIONS for name in names if name in self.commands]
        return [*sorted_names, *(name for name in super().list_commands(ctx) if name not in sorted_names)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as typer calls it
        """Write them into the help, in sections."""
        width = max(map(len, self.commands), default=0)
        for heading, names in _SECTIONS:
            commands = [self.commands[name] for name in names if name in self.commands]
            rows = [
                (f"{each.name:<{width}}", each.get_short_help_str(formatter.width - width - 6)) for each in commands
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)


app = typer.Typer(
    name="unicron",
    cls=SortedCommands,
    help="Shows what broke, what it cost and what was done about it. Keeps sick nodes out, and breaks jobs on purpose.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(chaos_cli.app, name="chaos")
app.add_typer(quarantine_cli.app, name="quarantine")
app.add_typer(config_cli.app, name="config")


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def main(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """See what broke in the cluster and what it cost, keep sick nodes out, and break jobs on purpose."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"unicron-elastic {__version__}")


@app.command()
def incidents(
    number: Annotated[
        str | None,
        typer.Argument(metavar="[NUMBER]", help="This incident of the newest run, as it is listed: 3, RUN:3, 3@HOST."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list, or one object for NUMBER.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Of all runs, not of the newest alone; as --json always.")
    ] = False,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read the ledgers in and below this folder [env: PET_LOG_DIR].")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read this ledger alone [env: UNICRON_LEDGER].")
    ] = None,
) -> None:
    """List the incidents of the newest run, or of all, or tell the story of one.

    Without --ledger or --log-dir, reads where unicron-run writes: UNICRON_LEDGER, else PET_LOG_DIR, else the folder
    "unicron" in XDG_STATE_HOME or ~/.local/state.
    """
    wanted = _parse_number(number)
    known, source = _load(log_dir, ledger)
    found, others = (known, []) if wanted is None else _of_newest_run(known, wanted)
    if as_json:
        _print_json(found, one=wanted is not None)
    if not found:
        fail(NOTHING_FOUND, f"No incident {'is' if number is None else f'{number} is'} recorded in {source}")
    if not as_json:
        shown = found if every or wanted is not None else _of_last_run(found)
        _print_text(shown, known if wanted is not None else None)
        if runs := len({each.run_id for each in found} - {each.run_id for each in shown}):
            typer.echo(f"{counted(runs, 'earlier run has', 'earlier runs have')} more: unicron incidents --all")
        if others:
            typer.echo(f"This number is also that of {', '.join(map(one_line, others))}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedIncident:
    """`WantedIncident` says which incident is asked for. None: any run, any host, the newest of those on a host."""

    run_id: str | None
    number: int
    host: str | None
    which: int | None


def _parse_number(text: str | None) -> WantedIncident | None:
    """The incident that ``text`` names; None if there is no text."""
    if text is None:
        return None
    found = re.fullmatch(r"(?:(.*):)?(\d{1,9})(?:@(.+?))?(?:#(\d{1,9}))?", text, re.DOTALL | re.ASCII)
    if found is None:
        fail(BAD_USAGE, f"{text!r} names no incident; give a number such as 3, or RUN:3, or 3@HOST.")
    run_id, number, host, which = found.groups()
    return WantedIncident(run_id=run_id, number=int(number), host=host, which=int(which) if which else None)


def _load(log_dir: Path | None, ledger: Path | None) -> tuple[list[Incident], str]:
    """Every incident there is, and where it was looked for, in words that end a sentence."""
    if log_dir is not None and ledger is not None:
        fail(BAD_USAGE, "Give --ledger or --log-dir, not both.")
    if log_dir is None and ledger is None:
        ledger = _path_from("UNICRON_LEDGER")
        log_dir = _path_from("PET_LOG_DIR") if ledger is None else None
    if ledger is not None:
        return _read(ledger), f"{ledger}.{_if_absent(ledger, 'file')}"
    folder = log_dir if log_dir is not None else state_folder()
    try:
        ledgers = find_ledgers(folder)
    except PermissionError as error:
        fail(BAD_USAGE, f"{error.strerror}.")
    return [
        incident for path in ledgers for incident in _read(path)
    ], f"the folder {folder}.{_if_absent(folder, 'folder')}"


def _if_absent(path: Path, kind: str) -> str:
    """Say that there is no such thing, which may be a typing mistake."""
    return "" if path.exists() else f" There is no such {kind} here; the first incident makes it."


def _path_from(variable: str) -> Path | None:
    value = os.environ.get(variable, "")
    return Path(value) if value else None


def _read(path: Path) -> list[Incident]:
    """The incidents of one ledger; what is wrong with it goes to stderr. A missing one has none: no fault came yet."""
    try:
        found, problems = read_ledger(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        fail(BAD_USAGE, f"{path} cannot be read: {error.strerror or error}.")
    for problem in problems:
        typer.echo(f"Skipped {problem}", err=True)
    return found


def _of_newest_run(found: list[Incident], wanted: WantedIncident) -> tuple[list[Incident], list[str]]:
    """The incidents that are wanted, of the newest run that has any: one for each host, as each node counts its own.

    And what the others of that run with the same number are called.
    """
    from unicron_elastic.launcher.view.incidents.names_of import names_of
    from unicron_elastic.launcher.view.incidents.story import by_time

    same = [each for each in by_time(found) if _is_wanted(each, wanted)]
    if not same:
        return [], []
    of_run = by_time(each for each in found if each.run_id == same[-1].run_id)
    named = [(each, name) for each, name in zip(of_run, names_of(of_run), strict=True) if _is_wanted(each, wanted)]
    if wanted.which is not None:
        return [each for each, name in named if name.endswith(f"#{wanted.which}")], []
    newest = {each.host: each for each, _ in named}
    return list(newest.values()), [name for each, name in named if newest[each.host] is not each]


def _is_wanted(each: Incident, wanted: WantedIncident) -> bool:
    is_of_run = wanted.run_id in (None, each.run_id) and wanted.host in (None, each.host)
    return is_of_run and each.number == wanted.number


def _of_last_run(found: list[Incident]) -> list[Incident]:
    """The incidents of the run that had one last."""
    from unicron_elastic.launcher.view.incidents.story import moment_of

    last = max(found, key=moment_of)
    return [each for each in found if each.run_id == last.run_id]


def _print_json(found: list[Incident], *, one: bool) -> None:
    if one and len(found) <= 1:
        data = [incident.to_json() for incident in found]
        if data:
            typer.echo(json.dumps(data[0], indent=2))
    else:
        typer.echo(json.dumps([incident.to_json() for incident in found], indent=2))


def _print_text(found: list[Incident], known: list[Incident] | None) -> None:
    """The table, or with ``known``, to compare with, the story of each."""
    from unicron_elastic.launcher.view.incidents.story import story, table

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if known is None:
        text = table(found, width)
    else:
        text = "\n".join(story(each, width, known, _evidence_of(each)) for each in found)
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "replace").decode(encoding), nl=False)


def _evidence_of(incident: Incident) -> str:
    """The beginning of its report; "" if there is none, or not here. Others may write ledgers: nothing else is read."""
    name = Path(incident.evidence or "")
    if not (name.name.startswith("evidence-") and name.suffix == ".txt"):
        return ""
    try:
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            return file.read(_EVIDENCE_BYTES).decode(errors="replace") if is_file else ""
    except (OSError, ValueError):
        return ""


app.command("status", cls=status_cli.StatusCommand)(status_cli.status)
app.command("etcd")(etcd_cli.etcd)
app.command("completion")(completion_cli.completion)
app.command("coordinator")(cluster_services.coordinator)
app.command("agent")(cluster_services.agent)
app.add_typer(cluster_cli.jobs_app, name="jobs")
cluster_cli.jobs_app.command("set")(plan_cli.set_job)
app.add_typer(cluster_cli.nodes_app, name="nodes")
app.command("plan")(plan_cli.plan)
app.command("web")(web_cli.web)
app.command("simulate")(simulate_cli.simulate)
for command in (cluster_cli.drain, cluster_cli.undrain, cluster_cli.cancel):
    app.command()(command)
declare_commands(lambda: app)
