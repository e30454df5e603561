"""Snapshots in memory files: whole or not there, and which one all ranks go on from."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from warm_launcher import WarmLaunchers

from unicron_elastic.state.layout import flatten, rebuild
from unicron_elastic.state.snapshot import file as snapshot_file
from unicron_elastic.state.snapshot.exchange import Servers, SnapshotExchange, copy_of, parse_remotes
from unicron_elastic.state.snapshot.file import SnapshotFile, read_header
from unicron_elastic.state.snapshot.header import HEADER_BYTES, Header
from unicron_elastic.state.snapshot.newest_common import (
    best_for,
    is_borrowed,
    newest_common,
    newest_unfit,
    that_count,
    victim,
    why_back,
    why_behind,
)
from unicron_elastic.state.snapshot.offers import Local, Offers, Remote
from unicron_elastic.state.snapshot.writer import SnapshotWriter
from unicron_elastic.worker.instructions import RemoteSnapshot, SnapshotOffers
from unicron_elastic.worker.notices import SnapshotMade

DEADLINE_S = 30.0
ABOUT = {"lineage": 7, "rank": 1, "world_size": 4, "is_replicated": False, "has_own_parts": True, "is_for_peer": False}


def state(step: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(300, 1000, generator=draw),
        "bias": torch.randn(7, generator=draw).bfloat16(),
        "empty": torch.empty(0, 3),
        "steps": step,
    }


def write(file: SnapshotFile, step: int, **more: Any) -> Header:
    layout, tensors = flatten(state(step))
    return file.write(layout, tensors, step=step, **{**ABOUT, **more})


def assert_holds(file: SnapshotFile, step: int) -> None:
    _, layout, tensors = file.read()
    found, wanted = rebuild(layout, tensors), state(step)
    assert found["steps"] == step
    assert all(torch.equal(found[name], wanted[name]) for name in ("weight", "bias", "empty"))


@pytest.fixture
def file() -> Iterator[SnapshotFile]:
    made = SnapshotFile.create()
    yield made
    made.close()


def test_what_was_written_is_read(file: SnapshotFile) -> None:
    header = write(file, 3)
    assert read_header(file.fd) == header
    assert (header.step, header.rank, header.key) == (3, 1, (3, 7))
    assert file.is_whole()
    assert_holds(file, 3)


def test_a_file_is_written_again_also_with_a_larger_state(file: SnapshotFile) -> None:
    layout, tensors = flatten({"small": torch.zeros(3)})
    file.write(layout, tensors, step=1, **ABOUT)
    write(file, 4)
    assert_holds(file, 4)


def test_its_pages_come_when_they_are_written_as_the_interpreter_would_be_locked_for_so_long(
    file: SnapshotFile,
) -> None:
    room = file.room(8_000_000)
    assert mapped_kib() < 100
    room[:4_000_000] = bytes(4_000_000)
    assert 3900 < mapped_kib() < 4200


def mapped_kib() -> int:
    """How much of snapshots' files is in the memory of this process, in KiB."""
    pages = Path("/proc/self/smaps").read_text().partition("memfd:unicron-snapshot")[2]
    return int(re.search(r"^Rss: +(\d+) kB$", pages, re.MULTILINE)[1])  # type: ignore[index]


def test_nobody_can_make_the_file_smaller(file: SnapshotFile) -> None:
    write(file, 3)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 100)
    assert_holds(file, 3)


def test_a_file_that_could_be_made_smaller_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(ValueError, match="a memory file that cannot be made smaller"):
            SnapshotFile(fd)
        fcntl.fcntl(fd, snapshot_file._F_ADD_SEALS, snapshot_file._F_SEAL_SHRINK)
        SnapshotFile(fd)
    finally:
        os.close(fd)


def test_every_spoiled_part_is_noticed(file: SnapshotFile) -> None:
    header = write(file, 3)
    room = file.room(header.total_bytes)
    for place in (3, 12, 30, HEADER_BYTES + 5, header.data_at, header.data_at + 600_000, header.total_bytes - 70):
        room[place] ^= 4
        assert not file.is_whole(), place
        with pytest.raises(ValueError, match="snapshot"):
            file.read()
        room[place] ^= 4
    assert_holds(file, 3)


def test_no_random_header_is_anything_but_refused() -> None:
    page = bytearray(header().pack())
    page += bytes(HEADER_BYTES - len(page))
    assert Header.parse(bytes(page)).step == 3
    draw = torch.Generator().manual_seed(0)
    for _ in range(500):
        spoiled = bytearray(page)
        spoiled[int(torch.randint(300, (), generator=draw))] ^= 1 + int(torch.randint(255, (), generator=draw))
        with contextlib.suppress(ValueError):
            assert Header.parse(bytes(spoiled)) == Header.parse(bytes(page))  # what follows the text does not count


@pytest.mark.parametrize(
    "wrong",
    [{"step": -1}, {"step": True}, {"rank": "1"}, {"data_bytes": 2**60}, {"is_replicated": 1}, {"data_sum": "x" * 33},
     {"layout_bytes": 8000}, {"more": 1}],
)  # fmt: skip
def test_a_malformed_header_of_another_node_is_one_sentence(wrong: dict[str, Any]) -> None:
    told = asdict(header())
    assert Header.from_message(told).step == 3
    with pytest.raises(ValueError, match="of a snapshot"):
        Header.from_message(told | wrong)


def write_and_die(file: SnapshotFile, moves: int) -> None:
    """In a process of its own, which is killed after so many tensors."""
    pid = os.fork()
    if pid == 0:
        move, count = snapshot_file._move, itertools.count()

        def dying(*arguments: int) -> None:
            if next(count) == moves:
                os.kill(os.getpid(), signal.SIGKILL)
            move(*arguments)

        snapshot_file._move = dying
        write(file, 2)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_writer_that_is_killed_leaves_the_other_file_whole() -> None:
    files = [SnapshotFile.create(), SnapshotFile.create()]
    write(files[0], 1)
    for moves in range(3):
        write_and_die(files[1], moves)
        assert files[1].header() is None
        assert_holds(files[0], 1)
        write(files[1], 2)
        assert_holds(files[1], 2)


# -- the writer -------------------------------------------------------------------------------------------------------


class Agent:
    """Hears what a writer tells."""

    def __init__(self) -> None:
        self.files: dict[int, SnapshotFile] = {}
        self.told: list[int] = []

    def tell(self, made: SnapshotMade) -> None:
        self.told.append(made.slot)
        for fd in made.fds:
            self.files[made.slot] = SnapshotFile(os.dup(fd))

    def steps(self) -> list[int]:
        return sorted(header.step for file in self.files.values() if (header := file.header()) is not None)


def begin(writer: SnapshotWriter, agent: Agent, step: int, **more: Any) -> None:
    writer.begin(*flatten(state(step)), {"step": step, **ABOUT, **more}, agent.tell)
    writer.wait()


def test_the_newest_two_are_there() -> None:
    writer, agent = SnapshotWriter(files=2), Agent()
    for step in range(1, 6):
        begin(writer, agent, step)
        assert agent.steps() == list(range(max(1, step - 1), step + 1))
    assert agent.told == [0, 1, 0, 1, 0]


def test_what_a_neighbour_copies_stays_until_the_next_such_is_there() -> None:
    writer, agent = SnapshotWriter(files=3), Agent()
    for step in range(1, 13):
        begin(writer, agent, step, is_for_peer=step % 5 == 0)
        kept = {step // 5 * 5 or step, max(1, step - 1), step}
        assert kept <= set(agent.steps())
    assert agent.steps() == [10, 11, 12]


def test_the_state_may_change_as_soon_as_it_is_copied() -> None:
    writer, agent = SnapshotWriter(files=2), Agent()
    wanted = state(1)
    layout, tensors = flatten(wanted)
    writer.begin(layout, tensors, {"step": 1, **ABOUT}, agent.tell)
    writer.wait_copied()
    wanted["weight"].zero_()
    writer.wait()
    assert_holds(agent.files[0], 1)


@pytest.mark.parametrize("is_written_first", [True, False])
def test_what_is_written_and_looked_at_may_be_freed(is_written_first: bool) -> None:
    writer, agent = SnapshotWriter(files=2), Agent()
    layout, tensors = flatten(state(1))
    there = ref(tensors[0])
    writer.begin(layout, tensors, {"step": 1, **ABOUT}, agent.tell)
    del tensors
    for wait in (writer.wait, lambda: writer.before_step(None))[:: 1 if is_written_first else -1]:
        wait()
    end = time.monotonic() + 20
    while there() is not None:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert_holds(agent.files[0], 1)


def test_what_changes_while_it_is_copied_is_not_kept_and_later_states_are_copied_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer, agent = SnapshotWriter(files=2), Agent()
    begin(writer, agent, 1)
    for step in (2, 3):
        changing = state(step)
        layout, tensors = flatten(changing)
        writer.begin(layout, tensors, {"step": step, **ABOUT}, agent.tell)
        changing["weight"].add_(1.0)  # as for one micro-batch
        changing["weight"].sub_(1.0)
        writer.wait_copied()
        changing["weight"].zero_()  # as an optimizer step does, of which there may be two
        writer.wait_copied()
        writer.wait()
    assert agent.steps() == [1, 3]
    assert_holds(next(file for file in agent.files.values() if file.header().step == 3), 3)
    assert capsys.readouterr().err.count("the snapshot after 2 steps is not kept") == 1


def test_where_python_starts_no_threads_any_more_nothing_is_kept_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    writer, agent = SnapshotWriter(files=2), Agent()
    begin(writer, agent, 1)
    writer.wait_copied()
    assert writer.is_off
    assert agent.told == []


def test_a_new_process_goes_on_in_the_files_and_forgets_what_came_later() -> None:
    agent = Agent()
    first = SnapshotWriter(files=2)
    for step in (5, 10):
        begin(first, agent, step)
    second = SnapshotWriter(files=2)
    second.adopt(dict(agent.files), 5)
    assert agent.steps() == [5]
    begin(second, agent, 6)
    assert agent.steps() == [5, 6]
    assert len(agent.told) == 3
    assert set(agent.files) == {0, 1}


def test_a_script_that_ends_while_a_copy_is_made_ends_well_and_has_it(
    tmp_path: Path, warm_launchers: WarmLaunchers
) -> None:
    script = tmp_path / "ends.py"
    script.write_text(
        "import os, torch\n"
        "from unicron_elastic.state.layout import flatten\n"
        "from unicron_elastic.state.snapshot.writer import SnapshotWriter\n"
        "layout, tensors = flatten({'weight': torch.ones(20_000_000)})\n"
        "writer = SnapshotWriter(files=2)\n"
        f"writer.begin(layout, tensors, {ABOUT | {'step': 3}}, lambda made: print(made.message(), flush=True))\n"
    )
    ended = warm_launchers.script(script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "{'is': 'SnapshotMade', 'slot': 0, 'is_for_peer': False}\n"


def test_no_memory_is_said_once_and_ends_nothing(monkeypatch: Any, capfd: Any) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    writer = SnapshotWriter(files=2)
    begin(writer, Agent(), 1)
    assert writer.is_off
    assert capfd.readouterr().err == (
        "unicron: this worker keeps no more snapshots: OSError: [Errno 28] No space left on device\n"
    )


# -- which one --------------------------------------------------------------------------------------------------------


def test_all_go_on_from_the_newest_that_everyone_has() -> None:
    assert newest_common([[(5, 1), (10, 1)], [(10, 1), (15, 1)]]) == (10, 1)
    assert newest_common([[(5, 1), (10, 1)], [(10, 2), (5, 1)]]) == (5, 1)
    assert newest_common([[(5, 1)], []]) is None
    assert newest_common([[(10, 0, 0), (10, 1, 3)], [(10, 1, 3), (10, 0, 0)]]) == (10, 1, 3)  # memory before storage


def test_who_has_to_go_back_is_told_why() -> None:
    said = [[(5, 1), (10, 1)], [(5, 1)], [(5, 1), (10, 1)]]
    assert why_back(said, (5, 1)) == (
        "All ranks go back to step 5, the newest that everyone has: rank 1 has no state of step 10."
    )
    assert why_back([[(10, 1)], [], []], None) == "All ranks go back to step 0: ranks 1, 2 have no state of step 10."
    assert why_back([[(10, 1)], [(10, 2)]], None) == (
        "The states of step 10 are of different runs: all ranks go back to step 0."
    )
    assert why_back([[(10, 1)], [(10, 1)]], (10, 1)) == ""
    assert why_back([[(5, 1), (10, 1)], [(5, 1), (10, 1)]], (5, 1)) == "All ranks go back to step 5."
    assert why_back([[], []], None) == why_back([[(7, 1)], [(7, 1)]], None, 7) == ""
    assert why_back([[(10, 1)], []], None, 7) == "All ranks go back to step 7: rank 1 has no state of step 10."


def test_what_the_job_had_come_to_is_told_if_nothing_is_left_of_it() -> None:
    said = [[(5, 1), (10, 1)], [(5, 1), (10, 1)]]
    told = "The job had come to step 14, of which no snapshot was made."
    assert why_behind(said, (10, 1), [13, 14], is_restart=True) == told
    assert why_behind(said, (5, 1), [13, 14], is_restart=False) == told
    assert why_behind(said, (10, 1), [10, 0], is_restart=True) == ""
    assert why_behind(said, (5, 1), [7, 0], is_restart=True) == "", "what is wrong with step 10 was told"
    nothing = "All ranks begin at step 0: no state of the job was kept."
    assert why_behind([[], []], None, [0, 0], is_restart=True) == nothing
    assert why_behind([[(0, 1)], []], None, [0, 0], is_restart=True) == nothing
    assert why_behind([[], []], None, [0, 0], is_restart=False) == ""
    assert why_behind([[(10, 1)], []], None, [0, 0], is_restart=True) == "", "it was told who lacks it"
    none = "All ranks begin at step 0: the job had come to step 9, of which no snapshot was made."
    assert why_behind([[], []], None, [9, 8], is_restart=False) == none


def test_of_snapshots_in_other_parts_than_this_world_has_is_told_why_they_are_of_no_use() -> None:
    unfit = [(9, 3), (8, 3)]
    parts = "the snapshots of step 9 are of 3 ranks, each with a state of its own, and not of 2"
    assert why_behind([[], []], None, [9, 9], is_restart=True, unfit=unfit) == f"All ranks begin at step 0: {parts}."
    told = f"T{parts[1:]}."
    assert why_behind([[(5, 0)], [(5, 0)]], (5, 0), [9, 9], is_restart=True, unfit=unfit) == told
    assert why_behind([[(9, 1)], [(9, 1)]], (9, 1), [9, 9], is_restart=True, unfit=unfit) == ""


def test_what_all_ranks_have_alike_fits_any_number_of_them() -> None:
    def found(step: int, world_size: int, *, is_replicated: bool) -> Any:
        return SimpleNamespace(header=SimpleNamespace(step=step, world_size=world_size, is_replicated=is_replicated))

    of_others = [found(7, 3, is_replicated=False), found(8, 4, is_replicated=False), found(9, 3, is_replicated=True)]
    assert newest_unfit([*of_others, found(9, 2, is_replicated=False)], 2) == (8, 4)
    assert newest_unfit([], 2) == (0, 0)


def test_a_file_tells_what_the_job_has_come_to_beside_its_snapshot(file: SnapshotFile) -> None:
    assert file.reached() == 0
    file.note_reached(7)  # nothing has been written yet
    assert (file.reached(), file.header()) == (0, None)
    header = write(file, 5)
    file.note_reached(17)
    assert file.reached() == 17
    assert file.header() == header
    assert file.is_whole()
    write(file, 6)
    assert file.reached() == 17
    os.pwrite(file.fd, b"\xff" * 8, HEADER_BYTES - 8)
    assert file.reached() == 0


def header(**fields: Any) -> Header:
    told = {"step": 3, "layout_bytes": 9, "layout_sum": "a", "data_at": 8192, "data_bytes": 64, "data_sum": "b"}
    return Header(**{**told, **ABOUT, **fields})


def found(**fields: Any) -> Any:
    return Remote(header(**fields), {}, "")


def test_a_rank_takes_its_own_or_an_equal_one() -> None:
    own, other = found(rank=1), found(rank=2)
    assert best_for([other, own], 1, 4) == {(3, 7): own}
    assert best_for([own], 1, 3) == {}
    same = found(rank=2, is_replicated=True)
    assert best_for([same], 1, 3) == {(3, 7): same}
    mine = found(rank=1, is_replicated=True)
    assert best_for([same, mine, found(rank=3, is_replicated=True)], 1, 3) == {(3, 7): mine}


def test_what_a_rank_has_not_made_itself_lacks_what_is_of_the_rank() -> None:
    assert not is_borrowed(header(rank=1), 1, 4)
    assert is_borrowed(header(rank=2), 1, 4)
    assert is_borrowed(header(rank=1), 1, 3), "the job does not go on as it was"
    assert not is_borrowed(header(rank=2, has_own_parts=False), 1, 4)


def test_no_state_of_another_rank_goes_before_one_that_each_rank_has_of_its_own() -> None:
    both, borrowed = [(10, 1), (15, 1)], [(15, 1)]
    assert newest_common(that_count([both, both], [[], borrowed])) == (10, 1)
    assert newest_common(that_count([both, both], [[], []])) == (15, 1)
    assert newest_common(that_count([both, both], [[], both])) == (15, 1), "a node is lost"
    stored = [(5, 0), (10, 1)]
    assert newest_common(that_count([stored, stored], [[], [(10, 1)]])) == (10, 1), "what is stored lacks it as well"
    stored = [(12, 0), *both]
    assert newest_common(that_count([stored, stored], [[], borrowed])) == (15, 1), "where what is stored is newer"
    first = [(0, 1)]
    assert newest_common(that_count([first, first], [[], first])) is None, "to begin anew loses nothing"
    assert newest_common(that_count([first, first], [[], []])) == (0, 1)


@pytest.mark.parametrize("files", [2, 3])
def test_the_newest_is_never_overwritten(files: int) -> None:
    steps = [None, 1, 2, 3, 5]
    for held in itertools.product(steps, repeat=files):
        headers = [None if step is None else header(step=step, is_for_peer=step == 1) for step in held]
        number = victim(headers)
        if len(set(held)) == files and None not in held:
            assert held[number] != max(step for step in held if step is not None)
            assert files == 2 or held[number] != 1
        if None in held:
            assert held[number] is None


@pytest.mark.parametrize("files", [2, 3])
def test_the_one_that_the_latest_step_was_made_from_is_never_overwritten(files: int) -> None:
    """Ranks that run ahead of each other until the next step have it in common."""
    for held in itertools.permutations([1, 2, 3, 5], files):
        headers = [header(step=step, is_for_peer=step == 1) for step in held]
        for stepped_from in held:
            number = victim(headers, stepped_from)
            assert held[number] != stepped_from
            assert files == 2 or held[number] != 1, "nor is that which a neighbour copies"
        assert victim(headers, 4) == victim(headers)


def test_ranks_that_run_ahead_have_the_snapshot_of_the_latest_step_in_common() -> None:
    writer, tensor = SnapshotWriter(files=2), torch.zeros(4)
    layout, tensors = flatten({"tensor": tensor})
    for step in range(1, 9):
        about = {"step": step, "lineage": 1, "rank": 0, "world_size": 2, "is_for_peer": False}
        writer.begin(layout, list(tensors), about | {"is_replicated": False, "has_own_parts": True}, lambda _: None)
        writer.wait()
        if step == 3:
            writer.before_step(None)
    assert [found.step for file in writer._files if (found := file.header()) is not None] == [3, 8]


# -- to other nodes ---------------------------------------------------------------------------------------------------


class Store:
    """As torch's, without a network."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def remote_of(servers: Servers, file: SnapshotFile) -> Remote:
    written = file.header()
    assert written is not None
    (made,) = parse_remotes(json.dumps([servers.told(file, written, "127.0.0.1")]).encode())
    return made


def test_who_reads_the_store_and_does_not_know_the_cluster_s_secret_gets_no_snapshot(
    file: SnapshotFile, servers: Servers
) -> None:
    write(file, 3)
    servers.use("the cluster's")
    written = file.header()
    assert written is not None
    told = json.dumps([servers.told(file, written, "127.0.0.1")]).encode()
    copy = SnapshotFile.create()
    for known in ("", "another cluster's"):
        (remote,) = parse_remotes(told, known)
        assert "the key of the state server is another one" in copy_of(remote, copy)
        assert copy.header() is None
    (remote,) = parse_remotes(told, "the cluster's")
    assert copy_of(remote, copy) == ""
    assert copy.header() == written
    servers.use("the cluster's next one")  # after the store has lost its data
    assert copy_of(remote, copy) != ""


def test_a_snapshot_is_copied_to_another_node(file: SnapshotFile, servers: Servers) -> None:
    write(file, 3)
    remote, copy = remote_of(servers, file), SnapshotFile.create()
    assert copy_of(remote, copy) == ""
    assert_holds(copy, 3)
    layout, tensors = remote.read()
    assert rebuild(layout, tensors)["steps"] == 3
    copy.close()


def test_a_snapshot_that_is_replaced_while_it_is_copied_is_not_taken(file: SnapshotFile, servers: Servers) -> None:
    write(file, 3)
    remote, copy = remote_of(servers, file), SnapshotFile.create()
    write(file, 4)
    assert "could not be copied" in copy_of(remote, copy)
    assert copy.header() is None
    write(file, 3)
    file.room(HEADER_BYTES * 4)[-1] ^= 1  # in its data
    assert "was overtaken while it was copied" in copy_of(remote, copy)
    assert copy.header() is None
    file.clear()
    with pytest.raises(OSError, match=r"could not be copied: .*the snapshot is being replaced"):
        remote.read()
    copy.close()


def test_agents_hear_of_each_others_snapshots(file: SnapshotFile, servers: Servers) -> None:
    write(file, 3)
    store, heard, all_heard = Store(), {}, threading.Semaphore(0)

    def hear(rank: int) -> Callable[[list[Remote], bool, str], None]:
        def then(remotes: list[Remote], does_one_go_on: bool, note: str) -> None:
            assert not does_one_go_on
            heard[rank] = (remotes, note)
            all_heard.release()

        return then

    written = file.header()
    assert written is not None
    held = [servers.told(file, written, "127.0.0.1"), {"header": "malformed"}]
    for rank in range(3):
        SnapshotExchange(store, rank, 3).tell_and_hear(held if rank == 1 else [], hear(rank))
    assert all(all_heard.acquire(timeout=DEADLINE_S) for _ in range(3))
    assert {rank: len(remotes) for rank, (remotes, _) in heard.items()} == {0: 1, 1: 0, 2: 1}
    assert all(note == "" for _, note in heard.values())


def test_who_joins_workers_that_train_on_hears_of_it_and_waits_for_no_snapshot_of_theirs() -> None:
    store, heard, is_heard = Store(), [], threading.Event()

    def then(remotes: list[Remote], does_one_go_on: bool, note: str) -> None:
        heard.append((remotes, does_one_go_on, note))
        is_heard.set()

    SnapshotExchange(store, 1, 2).tell_going_on()
    SnapshotExchange(store, 0, 2).tell_and_hear([], then)
    assert is_heard.wait(DEADLINE_S)
    assert heard == [([], True, "")]


def test_an_agent_copies_what_the_next_one_offers(file: SnapshotFile, servers: Servers) -> None:
    write(file, 3, is_for_peer=True)
    written = file.header()
    assert written is not None
    store, taken, done = Store(), [], []
    is_done = threading.Event()
    before, after = SnapshotExchange(store, 1, 2), SnapshotExchange(store, 0, 2)

    def take(remote: Remote) -> None:
        taken.append(remote.header)

    def told(ranks: set[int]) -> None:
        done.append(ranks)
        is_done.set()

    before.copy_neighbour(lambda header: header in taken, take, told)
    after.offer([servers.told(file, written, "127.0.0.1")])
    assert is_done.wait(DEADLINE_S)
    before.stop()
    assert (taken, done) == ([written], [{written.rank}])


def test_offers_of_the_agent_are_looked_at(file: SnapshotFile) -> None:
    write(file, 3)
    other = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    beyond = os.memfd_create("of no slot", os.MFD_CLOEXEC)
    far = RemoteSnapshot(header={}, address={}, key="")
    offers = Offers.of(SnapshotOffers(slots=(0, None), remote=(far,), fds=(os.dup(file.fd), other, beyond)))
    assert list(offers.own) == [0]
    assert [type(each) for each in offers.found] == [Local]
    assert offers.found[0].header == file.header()
    for closed in (other, beyond):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(closed)
