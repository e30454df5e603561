"""What the entry point `torchrun.handlers` names: a rendezvous for all that launch by torchrun, and our agent.

torch loads this while it is itself imported, so it imports nothing. torch has no plug-in for agents: its launcher makes
the handler of the rendezvous, and then looks up its agent's class by name, which is ours at that moment.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

CHOICES = ("unicron", "torch")


def creator() -> Callable[[Any], Any]:
    """The function that makes a handler of torch's RendezvousParameters."""
    return _create


def _create(parameters: Any) -> Any:
    """Make the handler. Raises ValueError for parameters that cannot be right, with what would be."""
    from unicron_elastic.rendezvous.torch.choose import unicron_handler

    chosen = str(parameters.get("agent", CHOICES[0]))
    if chosen not in CHOICES:
        raise ValueError(f"--rdzv-conf agent must be {' or '.join(CHOICES)}, not {chosen!r}")
    handler = unicron_handler(parameters)
    if chosen == CHOICES[0]:
        _bring_agent(handler)
    return handler


def _bring_agent(handler: Any) -> None:
    """Have the launch that asked for this handler run by our agent, if torch is as expected; say which it is."""
    from unicron_elastic.launcher import stepping_aside

    stepping_aside.tell()
    if stepping_aside.why_not_ours():
        return
    from unicron_elastic.compat.expectations import Feature, lacks
    from unicron_elastic.compat.launch import lend_agent
    from unicron_elastic.launcher.agent.core.agent import Agent

    def make(theirs: Callable[..., Any], **options: Any) -> Any:
        if options["spec"].numa_options and lacks(Feature.NUMA):
            return theirs(**options)
        try:
            agent = Agent(**options)
        except stepping_aside.STRANGE as error:
            if not stepping_aside.may_step_aside():
                raise
            stepping_aside.tell(f"{type(error).__name__}: {error}")
            return theirs(**options)
        _say("this job has unicron's agent, not torchrun's; --rdzv-conf agent=torch gives it torchrun's")
        return agent

    lend_agent(handler, make)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"unicron: {sentence}.", file=sys.stderr)
