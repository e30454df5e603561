"""``unicron simulate``: what policies make of months of faults, in seconds, by the decisions of the live system."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_elastic.launcher.config.answers import BAD_USAGE, fail

if TYPE_CHECKING:
    from unicron_elastic.simulation.model.scenario import Scenario
    from unicron_elastic.simulation.model.study_result import StudyResult


def simulate(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="A preset such as trace-a, trace-b, rsc-1 or llama3; or a file: a scenario (.json), a history (.csv), "
            "or the ledger of a real job (.jsonl).",
        ),
    ],
    *,
    policies: Annotated[
        str, typer.Option(metavar="NAMES", help='Policies, separated by commas; "all", or "ablation".')
    ] = "unicron,megatron,torchrun,torchft,oobleck,bamboo,varuna,oracle",
    seeds: Annotated[int, typer.Option(metavar="N", min=1, max=10_000, help="Simulate N histories.")] = 20,
    first_seed: Annotated[int, typer.Option(metavar="SEED", min=0, help="The first of them.")] = 0,
    jobs: Annotated[
        str | None, typer.Option(metavar="SET", help="The jobs of a preset or history: case-1 to case-5, or one.")
    ] = None,
    spares: Annotated[int | None, typer.Option(metavar="N", min=0, help="Nodes more than the jobs count on.")] = None,
    sensitivity: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="Vary one thing: checkpoint-interval, fault-rate or spares."),
    ] = None,
    values: Annotated[
        str | None, typer.Option(metavar="LIST", help="The values for that, separated by commas; seconds or factors.")
    ] = None,
    baseline: Annotated[
        str, typer.Option(metavar="NAME", help="The policy that others are compared with.")
    ] = "megatron",
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for each policy and seed.")] = None,
    incidents: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every incident as CSV.")] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="So many processes at once; by default one for each core.")
    ] = None,
) -> None:
    """Simulate a cluster under several policies, and compare what they achieve.

    The coordinator, the agents and the recovery machine that decide are those of the live system; only what they have
    done takes simulated time. The same seed gives the same bytes.
    """
    from unicron_elastic.simulation.study.studies import study_count

    chosen = _policies(policies)
    scenario = _scenario(what, jobs, spares)
    variants = _variants(scenario, sensitivity, values)
    numbers = range(first_seed, first_seed + seeds)
    with _bar(len(variants) * study_count(chosen, numbers)) as done:
        try:
            found = [
                _studied(each, chosen, numbers, processes=processes, done=done, told=told) for each, told in variants
            ]
        except (ValueError, OSError) as error:
            fail(BAD_USAGE, _sentence(error))
    _show(found, baseline)
    try:
        _write(found, baseline, as_json, csv, incidents)
    except OSError as error:
        fail(BAD_USAGE, _sentence(error))


def _policies(text: str) -> list[str]:
    from unicron_elastic.simulation.policies.policies import ABLATION, POLICIES

    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return list(POLICIES)
    if names == ["ablation"]:
        return list(ABLATION)
    for name in names:
        if name not in POLICIES:
            fail(BAD_USAGE, f"There is no policy {name!r}. Known are {', '.join(POLICIES)}.")
    if not names:
        fail(BAD_USAGE, "No policy is named.")
    return list(dict.fromkeys(names))


def _scenario(what: str, jobs: str | None, spares: int | None) -> Scenario:
    from dataclasses import replace

    from unicron_elastic.simulation.history.presets import PRESETS
    from unicron_elastic.simulation.study.scenario_file import preset_scenario, read_scenario, replay_scenario

    path = Path(what)
    try:
        if what in PRESETS:
            found = preset_scenario(what, jobs)
        elif not path.exists():
            fail(BAD_USAGE, f"{what!r} is neither a file nor a preset. Presets are {', '.join(PRESETS)}.")
        elif path.suffix == ".json":
            if jobs is not None:
                fail(BAD_USAGE, "--jobs is for presets and histories: this scenario's jobs are in its file.")
            found = read_scenario(path)
        else:
            found = replay_scenario(path, jobs)
        return found if spares is None else replace(found, spares=spares)
    except (ValueError, OSError) as error:
        fail(BAD_USAGE, _sentence(error))


def _variants(scenario: Scenario, sensitivity: str | None, values: str | None) -> list[tuple[Scenario, str]]:
    from unicron_elastic.simulation.study.studies import VARIED, varied

    if sensitivity is None:
        if values is not None:
            fail(BAD_USAGE, "--values needs --sensitivity, which says what they are of.")
        return [(scenario, "")]
    if sensitivity not in VARIED:
        fail(BAD_USAGE, f"--sensitivity {sensitivity!r} is not possible: known are {', '.join(VARIED)}.")
    try:
        numbers = VARIED[sensitivity] if values is None else [float(each) for each in values.split(",")]
    except ValueError:
        fail(BAD_USAGE, f"--values {values!r} must be numbers, separated by commas.")
    try:
        return [varied(scenario, sensitivity, number) for number in numbers]
    except ValueError as error:
        fail(BAD_USAGE, _sentence(error))


def _studied(
    scenario: Scenario, policies: Sequence[str], seeds: range, *, processes: int | None, done: object, told: str
) -> StudyResult:
    from unicron_elastic.simulation.study.studies import study

    count = processes or os.cpu_count() or 1
    return study(scenario, policies, seeds, processes=count, done=done, told=told)  # type: ignore[arg-type]


@contextmanager
def _bar(total: int) -> Iterator[object]:
    """What is to be called after each of ``total`` simulations; on a terminal people see how far it is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=total)
        yield lambda: progress.advance(task)


def _show(found: Sequence[StudyResult], baseline: str) -> None:
    from rich.console import Console

    from unicron_elastic.simulation.study.study_table import study_table

    console = Console() if sys.stdout.isatty() else Console(width=160)
    for each in found:
        console.print(study_table(each, baseline))


def _write(
    found: Sequence[StudyResult], baseline: str, as_json: Path | None, csv: Path | None, incidents: Path | None
) -> None:
    from unicron_elastic.simulation.study.report import incidents_csv, to_csv, to_json

    if as_json is not None:
        texts = [to_json(each, baseline=baseline).rstrip() for each in found]
        as_json.write_text((texts[0] if len(texts) == 1 else "[" + ",\n".join(texts) + "]") + "\n", encoding="utf-8")
    for path, text_of in ((csv, to_csv), (incidents, incidents_csv)):
        if path is not None:
            texts = [text_of(each) for each in found]
            # One head for all: a row says of which study it is.
            path.write_text(texts[0] + "".join(text.split("\n", 1)[1] for text in texts[1:]), encoding="utf-8")


def _sentence(error: Exception) -> str:
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    return text if text.endswith(".") else f"{text}."
