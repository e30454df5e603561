"""What a process of a case does to itself: it strikes, each strike once, whoever comes first to its place and phase."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from differential.case import Case, Fault

__all__ = ["Recorder", "Witness", "expected_replacements"]

GATE_S = 15.0
LOOK_S = 0.005
_COLLECTIVES = ("all_reduce", "isend", "irecv")


class StruckError(OSError):
    """What a rank raises that is to fail."""


class Recorder:
    """The watcher of a rank: writes a line for each thing, strikes, waits at the gate, and keeps the pace."""

    def __init__(self, case: Case, folder: Path, place: str) -> None:
        self.case, self.folder, self.place = case, folder, place
        self._file = os.open(folder / f"log.{place}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._counts: dict[str, int] = {}
        self._in_reduction: int | None = None
        self._mine = [(number, fault) for number, fault in enumerate(case.faults) if fault.is_inside]
        self._joins = {fault.step + 1 for fault in case.faults if fault.kind == "node-join"}
        self._gates = {case.steps - 1, *self._joins, *_repeated(case)}
        _wrap_collectives(self._collective)

    def log(self, what: str, **values: Any) -> None:
        """A line."""
        os.write(self._file, (json.dumps({"what": what, **values}) + "\n").encode())

    def at(self, phase: str, step: int) -> None:
        """Strikes, if it is the place; otherwise waits as the case wants."""
        if phase == "begin":
            (self.folder / f"reached-{step}").touch()
        computing = "perturbed" if self.case.perturb else "forward"
        if phase == computing and self.case.pace_s:
            time.sleep(self.case.pace_s)
        if phase in ("optimized", "evaluated") and self.case.between_s:
            time.sleep(self.case.between_s)
        if phase == "end" and self.case.after_s:
            time.sleep(self.case.after_s)
        self._in_reduction = step if phase == "between" else None
        self._counts["reduce"] = 0
        for number, fault in self._mine:
            if fault.place == self.place and self._is_at(fault, phase) and step >= fault.step:
                self._strike_at(number, fault, phase)
        if phase == computing and self.case.gate and step in self._gates:
            self._wait_at_gate(step)

    def _is_at(self, fault: Fault, phase: str) -> bool:
        if fault.phase == "joining":  # when a replacement has the state, and is about to take part
            return phase in ("forward", "between") and any(self.folder.glob("loaded-*"))
        return fault.phase == phase

    def _strike_at(self, number: int, fault: Fault, phase: str) -> None:
        key = f"{number}"
        self._counts[key] = self._counts.get(key, 0) + 1
        if phase == "between" and self._counts[key] < fault.nth:
            return
        self._strike(number, fault)

    def _collective(self) -> None:
        step = self._in_reduction
        if step is None:
            return
        self._counts["reduce"] += 1
        for number, fault in self._mine:
            is_here = fault.place == self.place and fault.phase == "reduce" and step >= fault.step
            if is_here and self._counts["reduce"] >= fault.nth:
                self._strike(number, fault)

    def _strike(self, number: int, fault: Fault) -> None:
        try:
            (self.folder / f"struck-{number}").touch(exist_ok=False)
        except FileExistsError:
            return
        self.log("struck", fault=number)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StruckError("struck on purpose")

    def _wait_at_gate(self, step: int) -> None:
        end = time.monotonic() + GATE_S
        while time.monotonic() < end and not (self.folder / "gave-up").exists():
            if self._is_open(step):
                time.sleep(self.case.gate_s if step == self.case.steps - 1 else 0.0)
                return
            time.sleep(LOOK_S)
        (self.folder / "gave-up").touch()  # as those who come later would wait again

    def _is_open(self, step: int) -> bool:
        if self.case.gate == "begun" or step in self._joins:  # a late node needs seconds to begin, and steps little
            return len(list(self.folder.glob("log.*"))) > self.case.ranks
        struck = len(list(self.folder.glob("struck-*")))
        expected = min(struck, expected_replacements(self.case)) + len(self._joins)
        return len(list(self.folder.glob("loaded-*"))) >= expected


class Witness:
    """Registered state that leaves a file when a replacement has loaded it."""

    def __init__(self, folder: Path, load_s: float) -> None:
        self._folder, self._load_s = folder, load_s

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """The others' state has come."""
        time.sleep(self._load_s)
        (self._folder / f"loaded-{os.getpid()}").touch()


def expected_replacements(case: Case) -> int:
    """How many processes come that get the state of others. None where all are lost at once."""
    inside = [fault for fault in case.faults if fault.is_inside]
    places = {fault.place for fault in inside}
    return 0 if len(places) == case.ranks and case.ranks else len(inside)


def _repeated(case: Case) -> set[int]:
    """The steps of faults that strike whoever replaced a process that was struck before."""
    inside = [fault for fault in case.faults if fault.is_inside]
    return {
        fault.step
        for fault in inside
        if any(other.place == fault.place and other.step < fault.step for other in inside)
    }


def _wrap_collectives(before: Callable[[], None]) -> None:
    for name in _COLLECTIVES:
        function = getattr(dist, name)

        def call(*args: Any, _function: Callable[..., Any] = function, **kwargs: Any) -> Any:
            before()
            return _function(*args, **kwargs)

        setattr(dist, name, call)
