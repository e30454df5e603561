"""Tries a case: the references, the launch, the verdict; and once more, if there is a finding."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

from differential.case import Case
from differential.launch import Begin, Launched, begin_agent, launch
from differential.reference import alone, plain, restored
from differential.report import Result
from differential.script import SAVE_AT
from differential.verdict import judge
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.state.storage.manifest import MANIFEST

__all__ = ["Trials"]


class Trials:
    """Runs cases one after another; an etcd is started when the first case wants one. ``keep``: for what is left."""

    def __init__(self, keep: Path | None = None, begin: Begin = begin_agent) -> None:
        self._keep = keep
        self._begin = begin
        self._etcd: EmbeddedEtcd | None = None

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._etcd is not None:
            self._etcd.__exit__(kind, error, trace)

    def result(self, name: str, case: Case, repeat: int = 0) -> Result:
        """Of one case. One with findings is tried ``repeat`` times more, to say how often they come."""
        result = self._once(name, case)
        if result.problems:
            again = [self._once(name, case) for _ in range(repeat)]
            result.tries += len(again)
            result.times_seen += sum(bool(each.problems) for each in again)
        return result

    def _once(self, name: str, case: Case) -> Result:
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="unicron-differential-"))
        try:
            expected = plain(case, folder)
            by_itself = alone(case, folder) if case.reproducible else None
            launched = Launched() if expected.error else launch(case, folder, self._endpoint(case), self._begin)
            was_saved = _is_saved_for_sure(case, folder) and any(log.of("end") for log in launched.logs)
            again = restored(case, folder) if was_saved else None
            problems = judge(case, launched, expected, by_itself, again)
            if problems and self._keep is not None:
                target = self._keep / folder.name
                shutil.copytree(folder, target, ignore_dangling_symlinks=True)
                problems.append(f"kept in {target}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(
            name=name,
            case=case,
            problems=problems,
            took_s=time.monotonic() - started,
            launch_s=launched.took_s,
            processes=len(launched.logs),
            struck=sum(len(log.of("struck")) for log in launched.logs) + len(launched.done),
            err=launched.err,
        )

    def _endpoint(self, case: Case) -> str:
        if not case.nodes:
            return ""
        if self._etcd is None:
            self._etcd = EmbeddedEtcd().__enter__()
        return self._etcd.endpoint


def _is_saved_for_sure(case: Case, folder: Path) -> bool:
    """Whether it was written, or nobody was lost who may still have been writing it."""
    is_disturbed = any(fault.is_inside and fault.step >= SAVE_AT - 1 for fault in case.faults)
    is_written = (folder / "saved" / f"step-{SAVE_AT}" / MANIFEST).exists()
    return case.loop == "save" and (is_written or not is_disturbed)
