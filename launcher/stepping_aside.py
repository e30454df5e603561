"""What is done where the installed torch is not as expected: it is said in one line and done without, never failed for.

What goes without what stands in ``compat.expectations``. Without our agent it is torch's own that runs the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache

from unicron_elastic.compat import KNOWN
from unicron_elastic.compat.expectations import Feature, lacks
from unicron_elastic.launcher.agent.process.runtime import Runtime
from unicron_elastic.launcher.config.options import OPTIONS

# What comes of a torch that is not as expected, whatever it is that was not.
STRANGE = (AttributeError, ImportError, NameError, TypeError, argparse.ArgumentError)

_OWN_FLAGS = {flag for option in OPTIONS for flag in option.flags} | {"--cluster", "--weight", "--job-spec", "--config"}


class _State:
    """Of this process."""

    told = ""


@cache
def why_not_ours() -> str:
    """Return why our agent cannot run here, "" if it can. Imports it."""
    if missing := lacks(Feature.AGENT):
        return missing[0]
    try:
        import unicron_elastic.launcher.agent.core.agent
        import unicron_elastic.rendezvous.torch.choose  # noqa: F401
    except STRANGE as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tell(why_not_ours_after_all: str = "") -> None:
    """Say on stderr, once, what this job goes without because of the installed torch, if there is anything."""
    line = _line([why_not_ours_after_all], [Feature.AGENT]) if why_not_ours_after_all else _sentence()
    if line and line != _State.told:
        _State.told = line
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"unicron-run: {line}", file=sys.stderr)


def may_step_aside() -> bool:
    """Return whether what was raised may be laid to a torch that is not known, with nothing begun."""
    oldest, newest = map(_minor, KNOWN)
    return not Runtime.workers_began and not oldest <= _minor(_version()) <= newest


def run_as_torchrun(argv: Sequence[str], error: Exception) -> None:
    """Run a command line by torch's own command, without what only ours takes. Raises what torchrun raises."""
    from unicron_elastic.compat.launch import torch_run

    tell(f"{type(error).__name__}: {error}")
    torch_run.main(list(_without_own(argv)))


def _without_own(argv: Sequence[str]) -> Iterator[str]:
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag in _OWN_FLAGS:
            if not equals:
                next(words, None)
        elif flag != "--detach":
            yield word
            if not word.startswith("-") and os.path.exists(word):
                yield from words  # of the script


def _sentence() -> str:
    if why := why_not_ours():
        return _line([why], [Feature.AGENT])
    lacking = {part: missing for part in Feature if (missing := lacks(part))}
    return _line([each for missing in lacking.values() for each in missing], lacking) if lacking else ""


def _line(lacking: Sequence[str], parts: Collection[Feature]) -> str:
    oldest, newest = KNOWN
    if _minor(_version()) > _minor(newest):
        what = f"newer than what this version knows ({newest})"
    elif _minor(_version()) < _minor(oldest):
        what = f"older than what this version knows ({oldest})"
    else:
        what = f"not as those that this version knows ({oldest} to {newest})"
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    so = "; ".join(part.value for part in parts)
    return f"torch {_version()} is {what}: {lacking[0]}{more}. So {so}."


def _version() -> str:
    import torch

    return str(torch.__version__).partition("+")[0]


def _minor(version: str) -> tuple[int, int]:
    """(2, 15) of "2.15.0a0"."""
    major, _, rest = version.partition(".")
    return int(major), int(rest.partition(".")[0])
