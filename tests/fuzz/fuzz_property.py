"""What must hold for every reader of bytes, whatever the bytes are."""

from __future__ import annotations

import logging
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fuzz_parsers import Parser

__all__ = ["CORPUS", "Broken", "holds"]

CORPUS = Path(__file__).parent / "corpus"  # a folder for each parser, with what was found to be worth keeping
MEMORY_MAX_BYTES = 8 * 1024 * 1024
MEMORY_FACTOR = 100  # times the input: an object of Python takes 50 bytes and more where JSON takes 2
SENTENCE_MAX = 500  # characters of our own; what it names of the input may take six for one


class Broken(AssertionError):
    """The property does not hold; the first text says in what way, and the second one more."""


class _Unexpected(logging.Handler):
    """What threads of ours have not foreseen: they log it and go on, or end."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While what is read is read."""
        logger, hook = logging.getLogger("unicron_elastic"), threading.excepthook
        propagated, logger.propagate = logger.propagate, False
        threading.excepthook = lambda told: self.seen.append(f"{told.exc_type.__name__}: {told.exc_value}")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.propagate, threading.excepthook = propagated, hook


def holds(parser: Parser, data: bytes) -> str:
    """What the parser says of ``data``, "" if it takes it. Raises Broken, or what the parser should not have raised.

    It takes the input or raises what its module names, with a sentence that can be shown; in bounded time and memory;
    and what is valid is taken afterwards as it was before.
    """
    unexpected = _Unexpected()
    with unexpected.watching():
        said = _bounded(parser, data)
        again = parser.complaint(parser.seeds[0])
    if len(said) > SENTENCE_MAX + 6 * len(data):
        raise Broken("too long a sentence", f"{parser.name}: {len(said)} characters: {said[:100]!r}...")
    if not said.isprintable():
        raise Broken("a sentence that cannot be shown", f"{parser.name}: {said[:300]!r}")
    if unexpected.seen:
        raise Broken("an error in a thread", f"{parser.name}: {unexpected.seen[0]}")
    if again:
        raise Broken("what is valid is not taken any more", parser.name)
    return said


def _bounded(parser: Parser, data: bytes) -> str:
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    began = time.thread_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            said = parser.complaint(data)
        took_s, (_, peak) = time.thread_time() - began, tracemalloc.get_traced_memory()
    finally:
        if not was_tracing:
            tracemalloc.stop()
    if took_s > parser.took_max_s:
        raise Broken("too long", f"{parser.name}: {len(data)} bytes took {took_s:.1f} s")
    if peak - before > MEMORY_MAX_BYTES + MEMORY_FACTOR * len(data):
        raise Broken("too much memory", f"{parser.name}: {len(data)} bytes took {peak - before} bytes")
    return said
