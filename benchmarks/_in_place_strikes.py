"""In a worker of the matrix of tier 2: does the faults at exact moments, and says what the members agree on.

Moments that a training script cannot reach are reached by wrapping functions of ``unicron_elastic.training``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from _in_place_cases import Strike

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["Log", "Strikes", "StruckError"]

SEVERAL_BUCKETS_BYTES = 16 * 1024


class StruckError(Exception):
    """The exception that a strike raises; no RuntimeError, for as such torch raises what befalls a collective."""


class Log:
    """One file for each process; every line is written at once, since the process may have no other moment."""

    def __init__(self, folder: Path, slot: int, life: int) -> None:
        name = f"log.{slot}.{life}.{os.getpid()}"
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.write("start")

    def write(self, what: str, *words: object) -> None:
        """One line: the time, CLOCK_MONOTONIC ns, what happened, and more words."""
        os.write(self._file, (" ".join(map(str, (time.monotonic_ns(), what, *words))) + "\n").encode())


class Strikes:
    """Those meant for this process."""

    def __init__(self, strikes: Sequence[Strike], log: Log, slot: int, life: int) -> None:
        self._waiting = [strike for strike in strikes if (strike.slot, strike.life) == (slot, life)]
        self._log = log
        self._engine: Any = None
        self._share: list[int] = []  # micro-batches with which this rank began the step
        self._position = 0
        self._bucket = ""
        self.step = -1

    # -- from the training loop ---------------------------------------------------------------------------------------

    def begin(self, step: int, index: int) -> None:
        """Micro-batch ``index`` of ``step`` begins."""
        self.step = step
        if index in self._share:
            self._position = self._share.index(index)
        else:
            self.at("recomputing")

    def in_forward(self, hidden: Tensor) -> None:
        """In the middle of a forward pass, with what flows there."""
        if self._position == 0:
            self.at("forward-first")
        if self._position == len(self._share) - 1:
            self.at("forward-last")
        if self._position == self._middle:
            hidden.register_hook(lambda _: self.at("backward"))

    def after_micro_batch(self) -> None:
        """The backward pass of a micro-batch has ended."""
        if self._position == self._middle:
            self.at("between")

    def at(self, moment: str) -> None:
        """It is this moment: whoever is to be struck now, is."""
        for strike in self._waiting:
            if strike.moment == moment and strike.step in (None, self.step) and self._world >= strike.world:
                self._waiting.remove(strike)
                self._strike(strike)
                return

    @property
    def _middle(self) -> int:
        return (len(self._share) - 1) // 2

    @property
    def _world(self) -> int:
        assembly = None if self._engine is None else self._engine._assembly
        return 0 if assembly is None or assembly.world is None else int(assembly.world.number)

    def _strike(self, strike: Strike) -> None:
        if strike.delay_ms is None:
            self._log.write("strike", self.step)
            do(strike.kind)
            return
        threading.Thread(target=self._strike_later, args=(strike, strike.delay_ms), daemon=True).start()

    def _strike_later(self, strike: Strike, delay_ms: float) -> None:
        time.sleep(delay_ms / 1e3)
        self._log.write("strike", self.step)
        do(strike.kind)

    # -- inside of the product ----------------------------------------------------------------------------------------

    def install(self) -> None:
        """Wraps what it takes; before the run is made, which gets small buckets."""
        from unicron_elastic.engine.protocol import handle
        from unicron_elastic.engine.transport import interruptible_store
        from unicron_elastic.training import engine
        from unicron_elastic.training.group import assembly, meeting, servant
        from unicron_elastic.training.step import gradients, tree_gradients, tree_sum

        for kind in (gradients.Gradients, tree_gradients.TreeGradients):
            kind.__init__.__kwdefaults__["bucket_bytes"] = SEVERAL_BUCKETS_BYTES
        self._wrap(engine.Engine, "begin_step", before=self._begins, after=self._begun)
        self._wrap(engine.Engine, "end_step", before=lambda *_: self.at("after-reduce"))
        self._wrap(engine.Engine, "part", before=lambda *_: self.at("end"))
        self._wrap(assembly.Assembly, "reduce", before=lambda *_: self.at("before-reduce"))
        self._wrap(gradients.Gradients, "reduce", after=self._bucket_begun)
        self._wrap(tree_gradients.TreeGradients, "reduce", before=self._name_bucket)
        self._wrap(tree_sum.TreeSum, "begin", exchange=self._watch_exchanges)
        self._wrap(importlib.import_module("torch.optim.adam"), "adam", before=self._count_groups())
        self._wrap(meeting.Meeting, "hear", before=lambda *_: self.at("meeting"))
        self._wrap(interruptible_store.InterruptibleStore, "set", after=lambda *_: self.at("connecting"))
        self._wrap(servant, "pull", before=lambda *_: self._soon("newcomer-copies"))
        self._wrap(servant, "rebuild", before=lambda *_: self.at("newcomer-has-copied"))
        self._wrap_agree(handle)

    def _wrap(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., Any] = lambda *_: None,
        after: Callable[..., Any] = lambda *_: None,
        exchange: Callable[..., tuple[Any, ...]] = lambda *arguments: arguments,
    ) -> None:
        """Calls ``before`` with a function's arguments, and ``after`` with its result and them."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            before(*arguments)
            result = original(*exchange(*arguments), **named)
            after(result, *arguments)
            return result

        setattr(owner, name, wrapper)

    def _begins(self, engine: Any) -> None:
        self._engine = engine

    def _begun(self, share: list[int], engine: Any) -> None:
        self._share, self.step = list(share), engine.state

    def _name_bucket(self, gradients: Any, number: int, *_: Any) -> None:
        count = len(gradients.buckets)
        self._bucket = {0: "reduce-first", count // 2: "reduce-middle", count - 1: "reduce-last"}.get(number, "")

    def _bucket_begun(self, _work: Any, gradients: Any, number: int, *more: Any) -> None:
        self._name_bucket(gradients, number, *more)
        self.at(self._bucket)

    def _watch_exchanges(self, sums: Any, bucket: Any, group: Any, *more: Any) -> tuple[Any, ...]:
        return sums, bucket, _Group(group, more[-1], functools.partial(self.at, self._bucket)), *more

    def _count_groups(self) -> Callable[..., None]:
        """The optimizer has two groups of parameters: between them one is new, the other old."""
        counted = [-1, 0]

        def count(*_: Any) -> None:
            counted[:] = [self.step, counted[1] + 1 if counted[0] == self.step else 1]
            if counted[1] == 2:
                self.at("optimizer")

        return count

    def _soon(self, moment: str) -> None:
        """From a thread: the function that was wrapped has then begun its work."""
        threading.Timer(0.002, self.at, (moment,)).start()

    def _wrap_agree(self, module: Any) -> None:
        """Logs who said what, as one word for each rank: state, micro-batches held, buckets done."""
        original = module.agree

        def agree(said: Sequence[Any], *, micro_batches: int) -> Any:
            words = (f"{each.state};{_listed(each.held)};{_listed(each.done)}" for each in said)
            self._log.write("said", self._world, max(each.buckets for each in said), *words)
            return original(said, micro_batches=micro_batches)

        module.agree = agree


class _Group:
    """A process group that calls ``begun`` when the exchange into ``out``, a bucket's last, is under way."""

    def __init__(self, group: Any, out: Tensor, begun: Callable[[], None]) -> None:
        self._group = group
        self._out = out
        self._begun = begun

    @property
    def size(self) -> int:
        return int(self._group.size)

    def exchange(self, came: Tensor, *arguments: Any) -> Any:
        begun = self._group.exchange(came, *arguments)
        if came is self._out:
            self._begun()
        return begun


def do(kind: str) -> None:
    """Does the fault to this process."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "exception":
            raise StruckError("struck on purpose")
        case "exit-3":
            _exit_at_once(3)
        case "exit-0":
            sys.exit(0)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sever":
            from unicron_elastic.worker.collectives.gloo_connections import shut_gloo_connections

            shut_gloo_connections()
        case _:
            raise ValueError(f"there is no fault {kind!r}")


def _exit_at_once(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)


def _listed(numbers: frozenset[int]) -> str:
    return ",".join(map(str, sorted(numbers)))
