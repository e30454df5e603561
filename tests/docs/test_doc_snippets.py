"""What the documentation shows can be typed: commands and options exist, Python compiles, the reference is right."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from doc_pages import REPOSITORY, Page, pages, tool

from unicron_elastic.launcher.common.shelf_messages import SHELF_MESSAGES
from unicron_elastic.launcher.config.arguments import get_args_parser
from unicron_elastic.worker.helper_tasks import KEEPER_ANSWERS, KEEPER_TASKS, WARM_ANSWERS, WARM_TASKS
from unicron_elastic.worker.instructions import INSTRUCTIONS
from unicron_elastic.worker.notices import NOTICES

REFERENCE = tool("reference")
SHELL = ("", "bash", "sh", "console")
# Programs that shell blocks may begin with; those below are looked into.
OTHERS = {"curl", "diff", "etcdctl", "export", "kill", "promtool", "py-spy", "source", ".", "torchrun"} | {
    "accelerate", "fabric", "cp", "kubectl", "helm", "sbatch", "scancel", "scontrol", "squeue", "srun"
}  # fmt: skip
INNER = re.compile(r"(?<!`)`((?:unicron|unicron-run) [^`\n]+)`(?!`)")


def shell_lines(page: Page) -> Iterator[tuple[str, str]]:
    """Commands of fenced blocks, and where they are; of a session, which has prompts, only what was typed."""
    for language, text, where in page.blocks():
        if language in SHELL and _is_shell(text) and "└─" not in text:  # which is a tree of processes
            lines = re.sub(r"\\\n\s*", " ", text).splitlines()
            prompts = [line[2:] for line in lines if line.startswith("$ ")]
            yield from ((line, where) for line in prompts or lines if line.strip())


def _is_shell(text: str) -> bool:
    first = text.lstrip("$ ").split(maxsplit=1)[0]
    return first in {*OTHERS, *CHECKS} or re.fullmatch(r"[A-Z_]+=\S*", first) is not None


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each command in a line, without variables that are set for it, and without what is redirected."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in ("&&", "||", "|", ";"):
            words.append(word)
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words[: words.index(">")] if ">" in words else words
        words = []


@cache
def variables() -> set[str]:
    """Ours, those of the code and those that are made of the options' names."""
    found: set[str] = REFERENCE.found_variables() | REFERENCE.known_variables()
    return found


@cache
def run_options() -> dict[str, bool]:
    """The options of unicron-run, and whether a value follows."""
    actions = get_args_parser()._actions
    return {option: action.nargs != 0 for action in actions for option in action.option_strings}


def wrong_in_run(words: list[str]) -> list[str]:
    """What of the words after ``unicron-run`` it would not know."""
    left = list(words)
    while left:
        name, equals, _ = left.pop(0).partition("=")
        if not name.startswith("-"):
            return [] if name == "..." or not name.endswith(".py") else _missing_script(name)
        if name not in run_options():
            return [f"unicron-run has no {name}"]
        if run_options()[name] and not equals and left:
            left.pop(0)
    return []


def _missing_script(name: str) -> list[str]:
    known = name in ("train.py", "my.py") or (REPOSITORY / name).is_file()
    return [] if known else [f"{name} is not there"]


@cache
def unicron_commands() -> dict[str, Any]:
    return dict(REFERENCE.commands())


def wrong_in_unicron(words: list[str]) -> list[str]:
    """What of the words after ``unicron`` it would not know."""
    path, left = "unicron", list(words)
    while left and f"{path} {left[0]}" in unicron_commands():
        path += f" {left.pop(0)}"
    command = unicron_commands()[path]
    if hasattr(command, "commands") and left and not left[0].startswith("-") and path != "unicron jobs":
        return [f"{path} has no command {left[0]}"]
    if path == "unicron chaos run":
        return wrong_in_run(left[1:])
    if path == "unicron config show" and left and not left[0].startswith("-"):
        return wrong_in_run(left[1:]) if left[0] == "run" else wrong_in_unicron(left)
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in left if word.startswith("--")]
    return [f"{path} has no {name}" for name in given if name not in {*options, "--help"}]


def wrong_in_python(words: list[str]) -> list[str]:
    """Of a script or module of ours, whether it is there, and has the options."""
    if words[:1] == ["-m"]:
        module = words[1]
        if not module.startswith("unicron_elastic"):
            return []
        path = REPOSITORY / module.replace(".", "/")
        return [] if path.is_dir() or path.with_suffix(".py").is_file() else [f"there is no module {module}"]
    if not words or not words[0].endswith(".py"):
        return []
    if not (REPOSITORY / words[0]).is_file():
        return [f"{words[0]} is not there"]
    text = (REPOSITORY / words[0]).read_text(encoding="utf-8")
    given = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    return [f"{words[0]} has no {name}" for name in given if f'"{name}"' not in text]


def wrong_in_pip(words: list[str]) -> list[str]:
    """Whether the extras are there."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(
        re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("[project.")[0], re.M)
    )
    given = {
        extra
        for word in words
        for each in re.findall(r"^(?:\.|unicron-elastic)\[(.*)\]", word)
        for extra in each.split(",")
    }
    return [f"there is no extra {extra}" for extra in sorted(given - extras)]


def wrong_in_make(words: list[str]) -> list[str]:
    """Whether the targets are there."""
    targets = set(re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    return [f"make has no {word}" for word in words if "=" not in word and word not in targets]


CHECKS = {
    "unicron-run": wrong_in_run,
    "unicron": wrong_in_unicron,
    "python": wrong_in_python,
    "python3": wrong_in_python,
    "pip": wrong_in_pip,
    "make": wrong_in_make,
    "pytest": lambda _words: [],
}


def wrong_in(line: str) -> list[str]:
    """What is wrong in a line of the shell."""
    found = []
    for words in commands_of(line):
        check = CHECKS.get(words[0].rpartition("/")[2] if words[0].endswith(("/python", "/pip")) else words[0])
        if check is not None:
            found += check(words[1:])
        elif words[0] not in OTHERS:
            found.append(f"{words[0]} is no command that is known here")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_shell_blocks_have_commands_and_options_that_exist(page: Page) -> None:
    assert [f"{where}: {wrong}" for line, where in shell_lines(page) for wrong in wrong_in(line)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_commands_in_sentences_exist(page: Page) -> None:
    prose = re.sub(r"^```.*?^```", "", page.text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in INNER.findall(prose) if "..." not in line]
    assert [wrong for line in lines for wrong in wrong_in(line)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_options_that_are_named_exist(page: Page) -> None:
    """Our own, wherever a page names one."""
    named = set(re.findall(r"`(--(?:unicron|rdzv|metrics|nnodes|nproc|max-restarts)[\w-]*\w)(?![-*\w])", page.text))
    assert sorted(named - set(run_options())) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_variables_that_are_named_exist(page: Page) -> None:
    """But those that are for tests."""
    named = set(re.findall(r"\bUNICRON_(?!TEST_)[A-Z_]*[A-Z]\b", page.text))
    assert sorted(name for name in named - variables() if not (name == "UNICRON_ETCD" or f"{name}_" in page.text)) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.path)
def test_other_blocks_can_be_read(page: Page) -> None:
    for language, text, where in page.blocks():
        if language == "python":
            compile(textwrap.dedent(text), where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif language == "json":
            json.loads(text)
        elif language in ("yaml", "yml"):
            yaml.safe_load(text)


@pytest.mark.parametrize("name", REFERENCE.PAGES)
def test_the_reference_is_up_to_date(name: str) -> None:
    text = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
    assert text == REFERENCE.PAGES[name](), "out of date: `python docs/tools/reference.py` writes it"


def test_every_message_between_processes_of_a_host_is_described_with_its_fields() -> None:
    kinds = {*NOTICES, *INSTRUCTIONS, *KEEPER_TASKS, *KEEPER_ANSWERS, *WARM_TASKS, *WARM_ANSWERS, *SHELF_MESSAGES}
    wanted = {kind.__name__: [each.name for each in dataclasses.fields(kind)] for kind in kinds}  # type: ignore[arg-type]
    rows = re.findall(
        r"^\|(?:[^|]+\|)? `([A-Z]\w+)` \|([^|]*)\|[^|]+\|$", Page("docs/reference-messages.md").text, re.M
    )
    told = {name: re.findall(r"\w+", fields.replace("descriptors", "fds")) for name, fields in rows}
    assert told == wanted
    assert len(rows) == len(told)


@pytest.mark.parametrize(
    "line",
    [
        "unicron-run --standalone --nprocs 2 train.py",
        "unicron-run --standalone examples/no_such.py",
        "unicron quarantines list",
        "unicron quarantine lists",
        "unicron jobs set chat --wait 2",
        "unicron chaos run kill:rank=1 --nprocs 2 train.py",
        "unicron config show run --nprocs 2 train.py",
        "unicron config show agent --labels a",
        "python benchmarks/no_such.py",
        "python benchmarks/restart.py --nprocs 2",
        "pip install -e '.[clusters]'",
        "make tests",
        "unicron-runn train.py",
        "A=1 unicron nodes && unicron node",
    ],
)
def test_a_wrong_line_is_noticed(line: str) -> None:
    assert len(wrong_in(line)) == 1
