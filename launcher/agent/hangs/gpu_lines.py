"""How the GPUs are, as lines for the report on a hang; and a way to ask the driver that never waits long for it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from unicron_elastic.health.gpu.state import GpuState, MemoryHolder

DRIVER_TIMEOUT_S = 1.0
_GIB = 1 << 30

_Answer = TypeVar("_Answer")


class Asker(Generic[_Answer]):
    """Asks a question that may never be answered. One that is still open is not asked again."""

    def __init__(self, question: Callable[[], _Answer]) -> None:
        self._question = question
        self._asking = threading.Lock()

    def ask(self, timeout_s: float) -> _Answer | None:
        """The answer; None if it does not come in time, or raises. Safe from any thread."""
        if not self._asking.acquire(blocking=False):
            return None
        answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()

        def work() -> None:
            answer = None
            with contextlib.suppress(Exception):
                answer = self._question()
            self._asking.release()
            answers.put(answer)

        threading.Thread(target=work, name="unicron-gpus", daemon=True).start()
        try:
            return answers.get(timeout=timeout_s)
        except queue.Empty:
            return None


def gpu_lines(states: Sequence[GpuState] | None, names: Mapping[int, str]) -> list[str]:
    """A table, and under each GPU what is wrong with it; nothing where there are no GPUs.

    ``states`` is None if the driver did not answer. ``names`` are those of the workers, such as {1234: "rank 3"}.
    """
    if states is None:
        return [f"NVIDIA's driver did not answer within {DRIVER_TIMEOUT_S:g} s: nothing is known of the GPUs."]
    if not states:
        return []
    rows = [("GPU", "busy", "memory (GiB)", "temperature", "held by (GiB)")]
    rows += [_row(state, names) for state in states]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for number, state in reversed(list(enumerate(states, 1))):
        lines[number + 1 : number + 1] = [f"    {words}." for words in (*state.throttling, *state.pending)]
    return lines


def _row(state: GpuState, names: Mapping[int, str]) -> tuple[str, str, str, str, str]:
    name = f"{state.gpu.label} {state.name}".rstrip()
    if state.gone:
        return name, "-", "-", "-", state.gone
    return (
        name,
        "?" if state.utilisation_percent is None else f"{state.utilisation_percent}%",
        f"{_gib(state.memory_used_bytes)} of {_gib(state.memory_total_bytes)}",
        "?" if state.temperature_c is None else f"{state.temperature_c} °C",
        ", ".join(_holder(holder, names) for holder in state.holders) or "nobody",
    )


def _holder(holder: MemoryHolder, names: Mapping[int, str]) -> str:
    name = names.get(holder.pid)
    return f"{f'{name}, ' if name else ''}pid {holder.pid}: {_gib(holder.used_bytes)}"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / _GIB:.1f}"
