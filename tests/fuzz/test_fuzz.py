"""Every reader of bytes takes what is valid, refuses what is not as its module says, and goes on as before.

Here with what was worth keeping (``corpus/``) and a few changed inputs each; ``-m slow`` has many, and ``run_long.py``
more.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_connections import connections
from fuzz_mutations import DEEPEST, mutated
from fuzz_parsers import PARSERS, Parser
from fuzz_property import CORPUS, Broken, holds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

REPOSITORY = Path(__file__).parent.parent.parent
CONNECTIONS = ("connection-stranger", "connection-heartbeats", "connection-output", "connection-state", "channel")
EXAMPLES, MANY = 4, 1500

# What reads bytes and is no parser of its own here, and why.
ELSEWHERE = {
    "launcher/node/output_sender.py": "counts of the receiver, of 8 sealed bytes; a size that the kernel tells",
    "launcher/agent/held/meeting_place.py": "what the kernel says of who is at the other end",
    "launcher/agent/process/kernel_lines.py": "an argument of a worker's system call, of the size that is asked for",
    "launcher/agent/worlds/worlds.py": "what a round's agents tell each other in its store, whose loss is theirs",
    "launcher/export/web/server.py": "tests/launcher/test_web_server.py",
    "rendezvous/store/server.py": "what our own etcd process says",
    "unicron_elastic/megatron/members.py": "what the ranks of one job tell each other by a collective",
    "unicron_elastic/engine/protocol/said.py": "the same",
    "unicron_elastic/training/group/collective_order.py": "the same",
    "unicron_elastic/training/engine.py": "the same",
    "unicron_elastic/training/shard/unison.py": "the same",
    "unicron_elastic/training/step/comparison.py": "the same",
    "unicron_elastic/training/snapshot/manager.py": "the same",
    "unicron_elastic/training/snapshot/replication.py": "the same",
    "unicron_elastic/state/storage/folder.py": "the same",
    "unicron_elastic/transformers/trainer_progress.py": "what the ranks of one job give each other as state",
    "unicron_elastic/lightning/logged_values.py": "the same",
    "unicron_elastic/attach/attached_trainer.py": "what this rank has kept itself, behind a checksum",
    "unicron_elastic/training/step/randomness.py": "what a rank of the job has written, behind a checksum",
    "unicron_elastic/training/group/servant.py": "a key that the agent gives over the worker's channel",
    "unicron_elastic/state/pull/link.py": "credentials that the kernel tells",
    "unicron_elastic/state/snapshot/offers.py": "a key that was read by snapshot_exchange",
    "unicron_elastic/compat/loaded.py": "what torch says in the same process",
    "unicron_elastic/testing/traffic.py": "what the kernel says of a socket",
    "unicron_elastic/simulation/history/ledgers.py": "a ledger, through replay.py",
}


@pytest.fixture(scope="module")
def parsers() -> Iterator[dict[str, Parser]]:
    """All, by name."""
    with connections() as listening:
        yield {**PARSERS, **listening}


NAMES = (*PARSERS, *CONNECTIONS)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_valid_and_what_was_worth_keeping(parsers: dict[str, Parser], name: str) -> None:
    parser = parsers[name]
    assert parser.complaint(parser.seeds[0]) == ""
    for path in sorted(CORPUS.glob(f"{name}/*")):
        holds(parser, path.read_bytes())


def _fuzz(parser: Parser, examples: int) -> None:
    is_quick = examples == EXAMPLES  # the same ones each time
    checks = list(HealthCheck)

    @settings(max_examples=examples, deadline=None, database=None, derandomize=is_quick, suppress_health_check=checks)
    @given(st.sampled_from(parser.seeds), st.integers(0, 2**32))
    def run(seed: bytes, number: int) -> None:
        holds(parser, mutated(seed, parser.seeds, random.Random(number)))

    run()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_almost_valid(parsers: dict[str, Parser], name: str) -> None:
    _fuzz(parsers[name], EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_much_of_what_is_almost_valid(parsers: dict[str, Parser], name: str) -> None:
    _fuzz(parsers[name], MANY)


# -- the harness itself ------------------------------------------------------------------------------------------------


def _crashes(data: bytes) -> None:
    if b"boom" in data:
        raise KeyError("boom")


def _grows(data: bytes) -> None:
    bytearray(50_000_000 if b"boom" in data else 1)


def _mumbles(data: bytes) -> None:
    if b"boom" in data:
        raise ValueError("not\nthis \x1b[2J")


@pytest.mark.parametrize(("read", "seen"), [(_crashes, KeyError), (_grows, Broken), (_mumbles, Broken)])
def test_what_breaks_the_property_is_seen(read: object, seen: type[Exception]) -> None:
    parser = Parser("made-up", "nowhere", read, (b"fine",))  # type: ignore[arg-type]
    holds(parser, b"fine as well")
    with pytest.raises(seen):
        holds(parser, b"boom")


def test_the_changes_reach_what_they_are_to_reach() -> None:
    """Else the fuzzing would be of the same few inputs, or of JSON that is broken at its first character."""
    seed = b'{"a": 1, "b": ["x", {"c": null}]}'
    made = {mutated(seed, (seed,), random.Random(number)) for number in range(2000)}
    assert len(made) > 1000
    assert any(data.count(b"[") > DEEPEST - 100 for data in made)
    assert any(b"\xed\xa0\x80" in data or b"\\ud800" in data for data in made)
    assert sum(data.startswith(b"{") and data.endswith(b"}") for data in made) > 500
    assert all(len(data) <= 64 * 1024 for data in made)


def test_all_that_reads_bytes_is_fuzzed_or_said_why_not() -> None:
    pattern = r"\bjson\.loads?\(|\.unpack(?:_from)?\(|csv\.reader\(|safe_load\(|bytes\.fromhex\("
    found = set()
    for folder in ("launcher", "rendezvous", "unicron_elastic"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if re.search(pattern, path.read_text(encoding="utf-8")):
                found.add(str(path.relative_to(REPOSITORY)))
    named = {
        "rendezvous/store/records.py",
        "unicron_elastic/planning/coordinate/published.py",
    }  # through the records of the store
    for parser in PARSERS.values():
        module = parser.where.removeprefix("unicron_elastic.").replace(".", "/")
        named.add(parser.where if parser.where.endswith(".py") else f"{module}.py")
    named |= {
        "launcher/node/output_receiver.py",
        "unicron_elastic/worker/channel.py",
    }  # with connections behind them
    assert sorted(found - named - set(ELSEWHERE)) == [], "fuzz them, or say here why not"
    assert sorted(set(ELSEWHERE) - found) == [], "they read no bytes any more"
