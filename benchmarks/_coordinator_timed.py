"""``unicron coordinator``, with the parts of its planning timed as they come; the first argument is the file for that.

Each line of the file is a JSON list: thread, part, begin and end (CLOCK_MONOTONIC, s), and what of it no other part
took, by the clock and by the thread's processor time. Little is added by that, unlike by a profiler.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from unicron_elastic.launcher.cli import app
from unicron_elastic.planning.coordinate import coordinator, proposal
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.rendezvous.plan.mirror import PlanMirror
from unicron_elastic.rendezvous.plan.term import Term

PARTS: tuple[tuple[str, object, str], ...] = (
    ("look, the rest", Term, "look"),
    ("changes into the mirror", PlanMirror, "apply"),
    ("snapshot of the mirror", PlanMirror, "planning_snapshot"),
    ("why overtaken", coordinator, "why_overtaken"),
    ("proposal: reasons and holds", coordinator, "propose"),
    ("proposal: the optimum", proposal, "_planned"),
    ("proposal: seats", proposal, "seated"),
    ("reconcile", coordinator, "reconcile"),
    ("comparing with commands of late, the rest", coordinator, "_once"),
    ("... plans without their times", Published, "without_times"),
    ("situation for the table", coordinator, "_prepared"),
    ("plan to JSON", Published, "to_json"),
    ("plan from JSON", Published, "from_json"),
    ("writing the plan to etcd", Term, "_publish"),
    ("writing how often nodes fail", Term, "_note_faults"),
    ("writing orders", Term, "_order"),
    ("writing starts and stops", Term, "_set_phase"),
    ("table, in another thread", Term, "_build"),
)


class Clock:
    """What the parts take."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []
        self._inner = threading.local()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same, timed."""

        @functools.wraps(call)
        def inner(*args: Any, **options: Any) -> Any:
            outer = getattr(self._inner, "took", None)
            took = self._inner.took = [0.0, 0.0]  # by other parts within this one
            began, began_cpu = time.monotonic(), time.thread_time()
            try:
                return call(*args, **options)
            finally:
                ended, spent_s = time.monotonic(), time.thread_time() - began_cpu
                own = (ended - began - took[0], spent_s - took[1])
                self.lines.append((threading.get_ident(), part, began, ended, *own))
                self._inner.took = outer
                if outer is not None:
                    outer[0] += ended - began
                    outer[1] += spent_s

        return inner

    def collecting(self, phase: str, _info: object) -> None:
        """For ``gc.callbacks``: it comes within other parts."""
        now, cpu = time.monotonic(), time.thread_time()
        if phase == "start":
            self._inner.collecting = now, cpu
            return
        began, began_cpu = getattr(self._inner, "collecting", (now, cpu))
        own = (now - began, cpu - began_cpu)
        if (outer := getattr(self._inner, "took", None)) is not None:
            outer[0] += own[0]
            outer[1] += own[1]
            self.lines.append((threading.get_ident(), "garbage collection", began, now, *own))


def main() -> None:
    """Runs the rest of the command line."""
    path, sys.argv = sys.argv[1], ["unicron", *sys.argv[2:]]
    clock = Clock()
    gc.callbacks.append(clock.collecting)
    for part, where, name in PARTS:
        call = vars(where)[name]
        if isinstance(call, classmethod):
            setattr(where, name, classmethod(clock.timed(part, call.__func__)))
        else:
            setattr(where, name, clock.timed(part, call))
    try:
        app()
    finally:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in clock.lines)


if __name__ == "__main__":
    main()
