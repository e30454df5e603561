"""What a case must come to: computed by plain torch, and by a run alone, each in a forked process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import when they are first made: here, and not in each forked process

from differential.case import Case
from differential.parts import flat, make
from differential.plain import PlainRun
from differential.script import SAVE_AT, Script
from differential.worker import is_ours

__all__ = ["Came", "alone", "plain", "restored"]

_STRANGE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DEADLINE_S = 120


@dataclass
class Came:
    """What came out. ``error``: with which it ended; ``is_ours``: whether the product raised that."""

    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    spans: dict[int, dict[str, str]] = field(default_factory=dict)  # digests of what is registered, as steps begin
    evaluated: dict[tuple[str, int], float] = field(default_factory=dict)  # by place in the script, and step
    final: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)  # the state when it was to be saved
    error: str = ""
    is_ours: bool = False


class _Notes:
    """A watcher that only remembers."""

    def __init__(self, came: Came, state: Callable[[], dict[str, Any]]) -> None:
        self.came, self.state = came, state

    def at(self, phase: str, step: int) -> None:
        """Nothing happens."""

    def log(self, what: str, **values: Any) -> None:
        """Remembers."""
        if what == "step":
            self.came.losses[values["step"]] = values["loss"]
            self.came.digests[values["step"]] = values["digest"]
        elif what == "span":
            self.came.rates[values["step"]] = values["rates"]
            self.came.spans[values["step"]] = values["digests"]
        elif what == "evaluated":
            self.came.evaluated[values["place"], values["step"]] = values["value"]
        elif what == "saved":
            self.came.saved = self.state()


def plain(case: Case, folder: Path) -> Came:
    """Plain torch, all micro-batches in one process."""
    return _forked(folder / "plain", lambda came: _train(case, folder, came, PlainRun, reference=True))


def alone(case: Case, folder: Path) -> Came:
    """``unicron_elastic.Run`` in one process, without a launcher."""
    import unicron_elastic

    own = folder / "alone-folder"
    own.mkdir(exist_ok=True)
    return _forked(
        folder / "alone", lambda came: _train(case, own, came, unicron_elastic.Run, reference=False, more=True)
    )


def restored(case: Case, folder: Path) -> Came:
    """What another process gets from the folder into which a case has saved."""
    import unicron_elastic

    def restore(came: Came) -> None:
        parts = make(case, seed=9)
        run = unicron_elastic.Run(**parts.registered(), witness=_Nothing())
        step = run.restore(folder / "saved")
        assert step == SAVE_AT, f"step {step} was restored, and step {SAVE_AT} was saved"
        came.saved = flat(parts)

    return _forked(folder / "restored", restore)


class _Nothing:
    """In the place of the witness."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        """Nothing."""


def _train(
    case: Case, folder: Path, came: Came, kind: Callable[..., Any], *, reference: bool, more: bool = False
) -> None:
    parts = make(case, seed=0)
    options: dict[str, Any] = parts.registered()
    if more:
        options |= {"reproducible": case.reproducible, "snapshot_every": case.snapshot_every, "witness": _Nothing()}
    run = kind(**options)
    Script(case, parts, run, _Notes(came, lambda: flat(parts)), folder, reference=reference).main()
    run.wait_saved()  # for the process ends without what Python does at its end
    came.final = flat(parts)


def _forked(target: Path, work: Callable[[Came], None]) -> Came:
    """Done in a process of its own, so that nothing stays of default types, groups and generators."""
    pid = os.fork()
    if pid == 0:
        _child(target, work)
    status = -1
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        if status < 0:  # whoever waits has been interrupted
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not target.exists():
        return Came(error=f"the process ended with {os.waitstatus_to_exitcode(status)}")
    found: Came = torch.load(target, weights_only=False)
    return found


def _child(target: Path, work: Callable[[Came], None]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends it wherever it hangs; a handler would wait for Python
    signal.alarm(DEADLINE_S)
    for name in _STRANGE:
        os.environ.pop(name, None)
    came = Came()
    with open(f"{target}.err", "w") as err:
        os.dup2(err.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            work(came)
        except BaseException as error:
            traceback.print_exc(file=err)
            came.error, came.is_ours = f"{type(error).__name__}: {error}".splitlines()[0][:300], is_ours(error)
        torch.save(came, f"{target}.part")
        os.rename(f"{target}.part", target)
        err.flush()
    os._exit(0)
