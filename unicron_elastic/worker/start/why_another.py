"""Whether a launch is the same as the one for which a warm process was begun: then that one may serve it, too.

A start from it is then what a restart within one job is.
"""

from __future__ import annotations

from unicron_elastic.worker.helper_tasks import Launch
from unicron_elastic.worker.process.standing import why_elsewhere

_SHOWN_MAX = 3  # names of variables
# A shell sets these for each command, or for itself; nothing that is imported asks for them.
_OF_SHELL = frozenset({"_", "SHLVL", "OLDPWD"})


def why_another(began: Launch, now: Launch, arguments: int) -> str | None:
    """Say how the launch differs from the one that there was, as a clause; None if it does not.

    In the command the script's own arguments begin at ``arguments``: these may be others.
    """
    if began.argv[:arguments] != now.argv[:arguments]:
        return "it was held for another command"
    names = (began.env.keys() | now.env.keys()) - _OF_SHELL
    if changed := sorted(name for name in names if began.env.get(name) != now.env.get(name)):
        more = f" and {len(changed) - _SHOWN_MAX} more" if len(changed) > _SHOWN_MAX else ""
        return f"the environment has another {', '.join(changed[:_SHOWN_MAX])}{more}"
    if began.preload != now.preload:
        return "other modules are to be preloaded"
    if began.streams != now.streams:
        return "a standard stream is of another kind"
    return why_elsewhere(began.standing, now.standing)
