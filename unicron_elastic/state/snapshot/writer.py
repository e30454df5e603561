"""Writes snapshots in a thread, in two files in turn, so that one of them is whole at any time.

There is a third file if some are copied to another node: it keeps the one that is being copied.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from unicron_elastic.state.layout import Layout
from unicron_elastic.state.snapshot.file import SnapshotFile
from unicron_elastic.state.snapshot.gpu import GpuCopier
from unicron_elastic.state.snapshot.newest_common import victim
from unicron_elastic.worker.notices import SnapshotMade

EXIT_TIMEOUT_S = 120.0  # a copy that takes longer waits for a GPU that hangs

Tell = Callable[[SnapshotMade], None]


class Marks(Protocol):
    """They tell of tensors whose changes torch does not count whether they have changed."""

    def have_changed(self) -> bool:
        """Return whether they have since the copy began."""

    def forget(self) -> None:
        """Let the script free them."""


@dataclass(frozen=True)
class _Job:
    """A copy that is to be made."""

    layout: Layout
    tensors: list[Tensor]
    ready: Any  # on the GPU's stream, when the state is complete; None without a GPU
    about: dict[str, Any]
    changes: list[int]  # of each tensor, until the copy began
    marks: Marks | None
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def is_whole(self) -> bool:
        """Whether nothing has changed since it began."""
        return _changes(self.tensors) == self.changes and not (self.marks is not None and self.marks.have_changed())

    def forget_tensors(self) -> None:
        """Let the script free them: nobody looks at them any more."""
        self.tensors.clear()
        if self.marks is not None:
            self.marks.forget()


class SnapshotWriter:
    """Of one process. ``tell`` gives a message and descriptors to the agent, and need not succeed."""

    def __init__(self, *, files: int) -> None:
        self._count = files
        self._files: list[SnapshotFile] = []
        self._given: set[int] = set()  # of the files, those that the agent has
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._latest: _Job | None = None
        self._looked_at: _Job | None = None  # after it was copied: from then on it may change
        self._stepped_from: int | None = None  # the number of the snapshot that was the newest one before a step
        self._gpu: GpuCopier | None = None
        self._thread: threading.Thread | None = None
        self.is_off = False  # there was not enough memory, for one
        self.is_careful = False  # the script has changed tensors while they were copied

    def begin(
        self, layout: Layout, tensors: list[Tensor], about: dict[str, Any], tell: Tell, marks: Marks | None = None
    ) -> None:
        """Begins to write a state, of which nothing may change until ``wait_copied`` returns; ``about``: its header.

        Where something changes all the same, that snapshot is not kept, and later ones are copied before this returns.
        """
        self.wait()
        if self._thread is None:
            thread = threading.Thread(target=self._work, args=(tell,), name="unicron-snapshot", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the script has ended, and this Python starts no threads then
                self.is_off = True
                return
            self._thread = thread
            atexit.register(self._end, thread)
        self._latest = _Job(layout, tensors, _ready(tensors), about, _changes(tensors), marks)
        self._jobs.put(self._latest)
        if self.is_careful:
            self.wait_copied()

    def wait(self) -> None:
        """Waits until what was begun last is written."""
        if self._latest is not None:
            self._latest.done.wait()

    def before_step(self, _optimizer: object) -> None:
        """Wait as `wait_copied` does: a step changes what is copied."""
        if self._latest is not None:
            self._stepped_from = self._latest.about["step"]
        self.wait_copied()

    def wait_copied(self) -> None:
        """Waits until the state that was begun last may change."""
        job = self._latest
        if job is None or job is self._looked_at:
            return
        job.copied.wait()
        is_whole = job.is_whole()  # before the other thread forgets what it looks at
        self._looked_at = job
        if not is_whole:  # the thread that copies may have looked when a change was half done: this one makes them
            job.done.wait()
            for file in self._files:
                if (header := file.header()) is not None and header.step == job.about["step"]:
                    file.clear()
            self._be_careful(job)
        if job.done.is_set():
            job.forget_tensors()

    def _be_careful(self, job: _Job) -> None:
        if self.is_careful:
            return
        self.is_careful = True
        self._stepped_from = None  # by who changes weights now, as an optimizer of the script's own, nobody is told
        sys.stderr.write(
            f"unicron: the snapshot after {job.about['step']} steps is not kept, as weights were changed while it was "
            "copied; from now on each is copied before the step begins.\n"
        )

    def note_reached(self, step: int) -> None:
        """Writes down beside the snapshots which step the job has come to."""
        for file in tuple(self._files):
            file.note_reached(step)

    def adopt(self, files: Mapping[int, SnapshotFile], step: int) -> None:
        """Goes on in files of an earlier process of this place, which the agent has.

        What came after ``step`` will be done otherwise, so it is cleared.
        """
        numbers = range(min(len(files), self._count))
        self._files = [files[number] for number in numbers] if all(number in files for number in numbers) else []
        self._given = set(range(len(self._files)))
        for file in self._files:
            if (header := file.header()) is None or header.step > step:
                file.clear()
            file.note_reached(min(step, file.reached()))

    def _end(self, thread: threading.Thread) -> None:
        """When the script ends: completes the copy that is under way.

        Python ends threads that come back to it later where they are, which within torch is an abort of the process.
        """
        self.is_off = True
        self._jobs.put(None)
        thread.join(EXIT_TIMEOUT_S)

    def _work(self, tell: Tell) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(job, tell)
            except Exception as error:
                self.is_off = True
                sys.stderr.write(f"unicron: this worker keeps no more snapshots: {type(error).__name__}: {error}\n")
            finally:
                job.copied.set()
                job.done.set()
                if job is self._looked_at:  # else who looks at it forgets them
                    job.forget_tensors()
                del job

    def _write(self, job: _Job, tell: Tell) -> None:
        while len(self._files) < self._count:
            self._files.append(SnapshotFile.create())
        if job.ready is not None:
            self._gpu = self._gpu or GpuCopier(next(each.device for each in job.tensors if each.is_cuda))
            self._gpu.begin(job.ready)
        number = victim([file.header() for file in self._files], self._stepped_from)
        header = self._files[number].write(
            job.layout, job.tensors, job.copied, self._gpu, is_whole=job.is_whole, **job.about
        )
        if header is None:
            self._be_careful(job)
            return
        fds = () if number in self._given else (self._files[number].fd,)
        try:
            tell(SnapshotMade(slot=number, is_for_peer=header.is_for_peer, fds=fds))
        except OSError:
            return  # the agent was stopped, and hears of it with the next one
        self._given.add(number)


def _changes(tensors: list[Tensor]) -> list[int]:
    return [0 if each.is_inference() else each._version for each in tensors]


def _ready(tensors: list[Tensor]) -> Any:
    device = next((each.device for each in tensors if each.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
