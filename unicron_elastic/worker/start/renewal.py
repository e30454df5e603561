"""Renews, in a worker forked from the warm process, what an import leaves behind and must differ between processes."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet


class Renewal:
    """Remembers what was made from the system's entropy while modules were preloaded, and makes it anew in a fork.

    A generator that a module seeded with a number of its own is the same in all processes, and stays so.
    """

    def __init__(self) -> None:
        self._generators: WeakSet[random.Random] = WeakSet()
        self._entropy: set[int] = set()  # what numpy drew from the system for generators that nobody seeded
        self._bit_generators: list[Any] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Notices the generators that are made meanwhile without a seed."""
        seed, randbits = random.Random.seed, secrets.randbits

        def noted_seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            seed(generator, a, version)
            (self._generators.add if a is None else self._generators.discard)(generator)

        def noted_randbits(k: int) -> int:
            drawn = randbits(k)
            self._entropy.add(drawn)
            return drawn

        random.Random.seed = noted_seed  # type: ignore[assignment, method-assign]
        secrets.randbits = noted_randbits
        try:
            yield
        finally:
            random.Random.seed = seed  # type: ignore[method-assign]
            for module in list(sys.modules.values()):  # numpy has taken it into a module of its own
                if getattr(module, "__dict__", {}).get("randbits") is noted_randbits:
                    module.randbits = randbits  # type: ignore[attr-defined]
            self._bit_generators = self._unseeded_of_numpy()
            _forget_temporary_folder()

    def _unseeded_of_numpy(self) -> list[Any]:
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is None:
            return []
        holders, kind = (numpy_random.Generator, numpy_random.RandomState), numpy_random.BitGenerator
        # By type(), as isinstance() would ask the objects, and some answer with a warning.
        held = [each for each in gc.get_objects() if issubclass(type(each), (*holders, kind))]
        ones = (
            each if issubclass(type(each), kind) else getattr(each, "bit_generator", None) or each._bit_generator
            for each in held
        )
        found = {id(one): one for one in ones}
        return [one for one in found.values() if _entropy(one) in self._entropy]

    def renew(self) -> None:
        """Gives this fork what an interpreter of its own would have: its own random states, times and ids."""
        random.seed()
        for generator in list(self._generators):
            generator.seed()
        for bit_generator in self._bit_generators:
            bit_generator.state = type(bit_generator)().state
        for name, renew in _OF_MODULES.items():
            module = sys.modules.get(name)
            if module is not None:
                renew(module)
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python 3.12 and older leave the parent's


def _entropy(bit_generator: Any) -> int | None:
    """Return the number that it was seeded from; numpy before 1.25 has no public name for it."""
    sequence = getattr(bit_generator, "seed_seq", None) or getattr(bit_generator, "_seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    return entropy if isinstance(entropy, int) else None


def _renew_numpy(numpy_random: Any) -> None:
    numpy_random.seed()


def _renew_torch(torch: Any) -> None:
    """Seeds the generator of the CPU; those of devices are made and seeded when a device is first used."""
    torch.default_generator.seed()


def _renew_multiprocessing(process: Any) -> None:
    process.ORIGINAL_DIR = os.getcwd()
    process.current_process().authkey = os.urandom(32)


def _renew_sympy(symbol: Any) -> None:
    """Numbers the dummies of this process from where no other does: two with one number are equal when one is sent."""
    first, last = 10**6, 9 * 10**6  # as sympy draws it
    symbol.Dummy._base_dummy_index = random.randint(first, last)


def _forget_temporary_folder() -> None:
    """Lets ``tempfile`` find it again when the script asks, which may set TMPDIR before that."""
    tempfile: Any = sys.modules.get("tempfile")
    with contextlib.suppress(OSError):  # there is none
        if tempfile is not None and tempfile.tempdir == tempfile._get_default_tempdir():
            tempfile.tempdir = None


def _renew_logging(module: Any) -> None:
    module._startTime = time.time() if isinstance(module._startTime, float) else time.time_ns()


def _renew_lightning(rank_zero: Any) -> None:
    """Sets the rank as the module does when it is imported."""
    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0


def _renew_torchmetrics(prints: Any) -> None:
    """Sets the rank as the module does when it is imported."""
    prints.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


# What these modules read of the environment while they are imported is read anew, too.
_RENEWED: dict[str, tuple[str, ...]] = {
    "lightning.fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK"),
    "lightning_fabric.utilities.rank_zero": ("RANK", "LOCAL_RANK"),
    "torchmetrics.utilities.prints": ("LOCAL_RANK",),
}
# These go through the whole environment, for the variables with a beginning of their own.
_OWN_BEGINNINGS = {"fsspec.config": "FSSPEC"}


def renews(module: str) -> bool:
    """Return whether a fork makes anew what this module leaves."""
    return module in _OF_MODULES


def is_renewed(module: str, variable: str) -> bool:
    """Whether it does not matter, in a fork, what the module has read of this variable while it was imported."""
    beginning = _OWN_BEGINNINGS.get(module)
    return variable in _RENEWED.get(module, ()) or (beginning is not None and not variable.startswith(beginning))


_OF_MODULES: dict[str, Callable[[Any], None]] = {
    "numpy.random": _renew_numpy,
    "torch": _renew_torch,
    "multiprocessing.process": _renew_multiprocessing,
    "multiprocess.process": _renew_multiprocessing,  # of datasets
    "logging": _renew_logging,
    "sympy.core.symbol": _renew_sympy,
    "torchmetrics.utilities.prints": _renew_torchmetrics,
    "lightning_fabric.utilities.rank_zero": _renew_lightning,
    "lightning.fabric.utilities.rank_zero": _renew_lightning,
}
