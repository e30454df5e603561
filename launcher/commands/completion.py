"""``unicron completion``: what a shell needs to complete unicron and unicron-run. The script asks no program again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from string import Template
from typing import Annotated, Any

import typer

from unicron_elastic.launcher.config.answers import show
from unicron_elastic.launcher.config.table import walk

_CHOICES = re.compile(r"[a-z-]+(\|[a-z-]+)+")
_HEADS = {
    "bash": "",
    # What bash's functions need of zsh.
    "zsh": (
        "(( $$+functions[compdef] )) || { autoload -Uz compinit && compinit; }\n"
        "autoload -Uz bashcompinit && bashcompinit\n"
    ),
}
# A word in front of the cursor is a command, an option, what an option takes, or the script of unicron-run.
_SCRIPT = """\
# Made by `unicron completion $shell` for this version: make it again after an update.
$head
_unicron_words() {
  case "$$1" in
$words
    *) return 1 ;;
  esac
}
_unicron_choices() {
  case "$$1" in
$choices
    *) return 1 ;;
  esac
}
_unicron_offer() {
  local each
  COMPREPLY=()
  for each in $$1; do
    case "$$each" in
      -*) [[ "$$2" == -* ]] || continue ;;
    esac
    [[ "$$each" == "$$2"* ]] && COMPREPLY+=("$$each")
  done
}
_unicron() {
  local path="" word at
  for ((at = 1; at < COMP_CWORD; at++)); do
    word="$${COMP_WORDS[at]}"
    if [[ "$$word" != -* ]] && _unicron_words "unicron $${path:+$$path }$$word" > /dev/null; then
      path="$${path:+$$path }$$word"
    fi
  done
  if word="$$(_unicron_choices "unicron $${path:+$$path }$${COMP_WORDS[COMP_CWORD - 1]}")"; then
    _unicron_offer "$$word" "$${COMP_WORDS[COMP_CWORD]}"
  else
    _unicron_offer "$$(_unicron_words "unicron$${path:+ $$path}")" "$${COMP_WORDS[COMP_CWORD]}"
  fi
}
_unicron_run() {
  local flags=" $flags " word at
  for ((at = 1; at < COMP_CWORD; at++)); do
    word="$${COMP_WORDS[at]}"
    if [[ "$$word" != -* ]]; then
      COMPREPLY=()
      return  # the script's own arguments
    fi
    [[ "$$word" == *=* || "$$flags" == *" $$word "* ]] || ((at++))
  done
  if word="$$(_unicron_choices "unicron-run $${COMP_WORDS[COMP_CWORD - 1]}")"; then
    _unicron_offer "$$word" "$${COMP_WORDS[COMP_CWORD]}"
  elif [[ "$${COMP_WORDS[COMP_CWORD]}" == -* ]]; then
    _unicron_offer "$$(_unicron_words unicron-run)" "$${COMP_WORDS[COMP_CWORD]}"
  else
    COMPREPLY=()
  fi
}
complete -o default -F _unicron unicron
complete -o default -F _unicron_run unicron-run
"""


class CompletingShell(str, Enum):
    """`CompletingShell` is one of those that are known."""

    BASH = "bash"
    ZSH = "zsh"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellWords:
    """`ShellWords` is what there is to complete, by the words before it. ``flags`` of unicron-run take no value."""

    words: Mapping[str, tuple[str, ...]]
    choices: Mapping[str, tuple[str, ...]]
    flags: tuple[str, ...]


def completion(
    context: typer.Context,
    shell: Annotated[CompletingShell, typer.Argument(metavar="bash|zsh", help="For which shell.")],
) -> None:
    """Print a script that completes unicron and unicron-run: source it, or put it where the shell looks.

    \b
    source <(unicron completion bash)                                          # in ~/.bashrc
    unicron completion bash > ~/.local/share/bash-completion/completions/unicron
    source <(unicron completion zsh)                                           # in ~/.zshrc
    """
    show(script_for(shell.value, completion_of(context.find_root().command)).rstrip("\n"))


def script_for(shell: str, found: ShellWords) -> str:
    """Return what a shell is to read."""
    return Template(_SCRIPT).substitute(
        shell=shell,
        head=_HEADS[shell].replace("$$", "$"),
        words="\n".join(_cases(found.words)),
        choices="\n".join(_cases(found.choices)),
        flags=" ".join(found.flags),
    )


def completion_of(root: Any) -> ShellWords:
    """Return what the commands below ``root``, and unicron-run, have; of the latter nothing where there is no torch."""
    words: dict[str, tuple[str, ...]] = {}
    choices: dict[str, tuple[str, ...]] = {}
    for path, command in [((), root), *walk(root)]:
        before = " ".join(("unicron", *path))
        options = [option for option in command.params if option.param_type_name == "option"]
        names = [name for option in options for name in (*option.opts, *option.secondary_opts) if name.startswith("--")]
        places = [place for place in command.params if place not in options]
        named = [word for place in places for word in _choices(place.metavar)]
        words[before] = (*getattr(command, "commands", {}), *named, *names, "--help")
        for option in options:
            known = _choices(option.metavar)
            choices.update({f"{before} {name}": known for name in option.opts if known})
    flags: list[str] = []
    of_run: list[str] = []
    for names, takes_value, known in _run_options():
        of_run += [name for name in names if name.startswith("--") and "_" not in name]
        flags += [] if takes_value else names
        choices.update({f"unicron-run {name}": known for name in names if known})
    return ShellWords(words={**words, "unicron-run": tuple(of_run)}, choices=choices, flags=tuple(flags))


def _run_options() -> Iterator[tuple[list[str], bool, tuple[str, ...]]]:
    """The names of each option of unicron-run, whether it takes a value, and which ones if that is a choice."""
    from unicron_elastic.compat.command_line import TorchMissing
    from unicron_elastic.launcher.config.arguments import get_args_parser

    try:
        actions = get_args_parser()._actions
    except TorchMissing:
        return
    for action in actions:
        if action.option_strings:
            known = tuple(map(str, action.choices or ())) or _choices(action.metavar)
            yield list(action.option_strings), action.nargs != 0, known


def _choices(metavar: object) -> tuple[str, ...]:
    return tuple(metavar.split("|")) if isinstance(metavar, str) and _CHOICES.fullmatch(metavar) else ()


def _cases(found: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for before, words in found.items():
        yield f"    {shlex.quote(before)}) echo {shlex.quote(' '.join(words))} ;;"
