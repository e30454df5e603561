"""What a script asks to keep between two steps: done when it gets the next step; a save also when it ends.

Until then it may still change what is registered, as the learning rate at the end of an epoch. From there a script goes
on that restores the state: what it does before the step's first micro-batch it does again, and that is not in it. So no
snapshot is made behind the last step: a job that went on from there would do a second time what its script does there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable


class _AtEnd:
    """`_AtEnd` keeps those alive that have something to do when the script ends, and no others."""

    def __init__(self) -> None:
        self._asking: dict[Requests, None] = {}  # in the order in which they asked
        self._is_hooked = False
        self._has_ended = False  # the script: only what it has registered with atexit still runs

    def add(self, one: Requests) -> bool:
        """Call ``one.end`` when the script ends; whether that is yet to come."""
        if not self._is_hooked:
            self._is_hooked = True
            try:
                # Before Python ends, as it begins no threads later, and it is threads that write.
                threading._register_atexit(self._end)  # type: ignore[attr-defined]
            except RuntimeError:
                self._has_ended = True
        if not self._has_ended:
            self._asking[one] = None
        return not self._has_ended

    def drop(self, one: Requests) -> None:
        """Forget ``one``, which has nothing to do any more."""
        self._asking.pop(one, None)

    def _end(self) -> None:
        self._has_ended = True
        for one in list(self._asking):
            one.end()


_AT_END = _AtEnd()


class Requests:
    """Of one run; those for the same thing are one. ``wait`` returns when what was begun is complete."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._process = os.getpid()
        self._asked: dict[Hashable, Callable[[], object]] = {}
        self._of_next: Callable[[], object] | None = None  # what is done only if a next step comes
        self._told = ""  # why a state cannot be kept

    def ask(self, what: Hashable, keep: Callable[[], object]) -> None:
        """Notes that ``keep`` is to be called; where the script has ended, calls it, as nothing comes after."""
        self._asked[what] = keep
        if not _AT_END.add(self):
            self.end()

    def ask_of_next(self, keep: Callable[[], object]) -> None:
        """Note that ``keep`` is to be called when the next step comes, if one does."""
        self._of_next = keep

    def begin_step(self) -> None:
        """Do all that was asked for: the next step is about to be yielded. Raises what ``carry_out`` raises."""
        if self._of_next is not None:
            self._asked["of next"] = self._of_next
            self._of_next = None
        self.carry_out()

    def carry_out(self) -> None:
        """Does what was asked for, but for what is of the next step.

        Raises what that raises, but of a state that cannot be kept it is told once.
        """
        asked, self._asked = self._asked, {}
        _AT_END.drop(self)
        for keep in asked.values():
            try:
                keep()
            except TypeError as error:  # it could be when the run began: training goes on
                if (why := str(error)) != self._told:
                    self._told = why
                    sys.stderr.write(f"unicron: the state is not kept: {why}. The training goes on.\n")

    def end(self) -> None:
        """Do it when the script ends, unless by an exception, which may have come when half of the state was changed.

        A process that it has forked between two steps, as a worker of a DataLoader, comes here at its own end, and has
        the state of another moment.
        """
        if os.getpid() != self._process:
            return
        if self._asked and getattr(sys, "last_value", None) is None:
            self.carry_out()
            self._wait()
