"""Fuzzes for as long as is said: ``python tests/fuzz/run_long.py --seconds 60 [--seed N] [NAME ...]``.

What breaks the property is kept in the corpus, once for each way in which it does, so that the tests have it from then
on. With ``--atheris NAME`` one parser is fuzzed under the guidance of what its code reaches (``pip install atheris``).
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_connections import connections
from fuzz_mutations import mutated
from fuzz_parsers import PARSERS, Parser
from fuzz_property import CORPUS, Broken, holds

SMALLER_TRIES = 300


def keep(parser: Parser, data: bytes) -> Path:
    """Puts an input into the corpus."""
    folder = CORPUS / parser.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    return path


def smaller(parser: Parser, data: bytes, way: str) -> bytes:
    """A part of ``data`` that breaks the property in the same way."""
    size, tries = len(data) // 2, 0
    while size and tries < SMALLER_TRIES:
        for start in range(0, len(data), size):
            part, tries = data[:start] + data[start + size :], tries + 1
            if _way(parser, part) == way:
                data = part
                break
        else:
            size //= 2
    return data


def _way(parser: Parser, data: bytes) -> str:
    """In which way the property does not hold; "": it does."""
    try:
        holds(parser, data)
    except Broken as broken:
        return str(broken.args[0])
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
    return ""


def fuzz(parsers: Mapping[str, Parser], seconds: float, seed: int) -> int:
    """How many ways were found in which the property does not hold."""
    found: set[tuple[str, str]] = set()
    until, count = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for name, parser in parsers.items():
            chance = random.Random(f"{seed} {name} {count}")
            seeds = [*parser.seeds, *(path.read_bytes() for path in sorted(CORPUS.glob(f"{name}/*")))]
            for _ in range(20):
                data = mutated(chance.choice(seeds), seeds, chance)
                count += 1
                if (way := _way(parser, data)) and (name, way) not in found:
                    found.add((name, way))
                    print(f"{name}: {way}\n  {keep(parser, smaller(parser, data, way))}", flush=True)
    print(f"{count} inputs of {len(parsers)} parsers in {seconds:g} s from seed {seed}: {len(found)} findings")
    return len(found)


def fuzz_guided(name: str, arguments: Sequence[str]) -> None:
    """Hands one parser to atheris; ``arguments`` are libFuzzer's."""
    import atheris

    parser = PARSERS[name]
    folder = CORPUS.parent / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(parser.seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], str(folder), *arguments], lambda data: holds(parser, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", metavar="NAME", help="parsers; all without one")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--atheris", metavar="NAME")
    given, rest = options.parse_known_args()
    if given.atheris:
        fuzz_guided(given.atheris, rest)
    with connections() as listening:
        known = {**PARSERS, **listening}
        sys.exit(min(fuzz({name: known[name] for name in given.names or known}, given.seconds, given.seed), 1))
