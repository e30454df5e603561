"""Every wait of the product without a limit of its own, and what ends it: one thing that is silent must not cost all.

A call that names its limit may stand anywhere. One that does not is here, by its function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
OWN_THREAD = "a daemon thread of its own, of which nobody waits for the end for longer than a limit"
NON_BLOCKING = "the socket or the call does not block: something is there, or it says that nothing is"
ENDED = "only called once it has ended or was killed"
SCRIPT = "the script asked for it, and a step cannot go on without; the agent watches the script's steps"
COLLECTIVE = "the time-out of the process group, and the agent, which breaks the connections when a rank is lost"
# {file: {function: what ends the wait}}
ENDS = {
    "launcher/agent/core/agent.py": {"Agent._invoke_run": "an event; the agent has nothing else to do"},
    "launcher/agent/core/job_teller.py": {"JobTeller._next": OWN_THREAD},
    "launcher/agent/core/node.py": {"NodeWatch.wait_until_gpus_are_free": "MemoryWait's timer, FREE_TIMEOUT_S"},
    "launcher/agent/core/pace_report.py": {"_Writer._next": OWN_THREAD},
    "launcher/agent/held/hold.py": {"hold": NON_BLOCKING},
    "launcher/agent/held/meeting_place.py": {"MeetingPlace.accept": NON_BLOCKING},
    "launcher/agent/hangs/py_spy.py": {"_end": ENDED},
    "launcher/agent/worlds/worlds.py": {
        "Worlds.await_end": "the store's timeout, in a thread that may be left to itself"
    },
    "launcher/commands/etcd.py": {"_wait": "a signal, or the end of etcd"},
    "launcher/commands/services.py": {"coordinator": "a signal: it serves until then"},
    "launcher/common/loop.py": {"Loop._drain": NON_BLOCKING},
    "launcher/common/output.py": {
        "Output.close": "the thread has nothing left to write: that was waited for with a limit",
        "Output._write_kept": OWN_THREAD,
        "Output._write_all": "a reader of the terminal or pipe; in the writing thread, as any program's output",
    },
    "launcher/export/metrics/link.py": {"ChildMetrics._message": "the child's word or its end"},
    "launcher/node/children.py": {
        "Child.start": ENDED,
        "Child.signal": NON_BLOCKING,
        "Child._wait": OWN_THREAD,
    },
    "launcher/node/output_receiver.py": {
        "OutputReceiver.close": "the reading thread, which was woken to end and never blocks",
        "OutputReceiver._write": OWN_THREAD,
        "OutputReceiver._accept": NON_BLOCKING,
        "OutputReceiver._ready": NON_BLOCKING,
        "_write_all": "a reader of the terminal or pipe; in the writing thread, as any program's output",
    },
    "launcher/node/output_sender.py": {
        "_Link.hear": NON_BLOCKING,
        "_greet": "the socket's time-out, set by _line just before",
        "_line": "the socket's time-out, what is left of RETRY_S",
        "_part": "the socket's time-out",
    },
    "launcher/view/job/panel.py": {"PanelConsole._ansi": NON_BLOCKING},
    "rendezvous/cluster/heartbeats.py": {"NodeHeartbeats._work": OWN_THREAD},
    "rendezvous/cluster/links.py": {"Links._accept": NON_BLOCKING, "Links._ready": NON_BLOCKING},
    "rendezvous/plan/planner.py": {"Planner._run": OWN_THREAD},
    "rendezvous/store/server.py": {
        "EmbeddedEtcd._spawn": "the thread that spawns, which says so at once or why it could not",
        "EmbeddedEtcd._own": OWN_THREAD,
    },
    "unicron_elastic/health/gpu/nvml.py": {
        "GpuProbe._use": "a driver that answers; in a probe's thread, which is left"
    },
    "unicron_elastic/health/host/command.py": {"CommandProbe._has_gone": NON_BLOCKING},
    "unicron_elastic/megatron/checkpoint.py": {"Ranks": COLLECTIVE, "_Save.write": SCRIPT},
    "unicron_elastic/state/pull/client.py": {
        "_Pull._serve": "the pull's own decision, whose wait for answers is limited"
    },
    "unicron_elastic/state/pull/link.py": {"SourceLink.fetch": "the answer before this one, or its stream's STALL_S"},
    "unicron_elastic/state/pull/server.py": {"StateServer._accept": OWN_THREAD},
    "unicron_elastic/state/pull/session.py": {"Session._next": "work, the session's end at its limit, or the source's"},
    "unicron_elastic/state/pull/wire.py": {"Stream.try_receive": NON_BLOCKING},
    "unicron_elastic/state/snapshot/writer.py": {
        "SnapshotWriter.begin": SCRIPT,
        "SnapshotWriter.wait": SCRIPT,
        "SnapshotWriter.wait_copied": SCRIPT,
        "SnapshotWriter._work": OWN_THREAD,
    },
    "unicron_elastic/state/storage/folder.py": {
        "Storage.save": SCRIPT,
        "Storage.wait": SCRIPT,
        "Storage._write": COLLECTIVE,
    },
    "unicron_elastic/testing/late/late_inside.py": {
        "LateInside._land": COLLECTIVE,
        "LateInside._stream": OWN_THREAD,
    },
    "unicron_elastic/testing/chaos_hooks.py": {"PhaseWatch.reduce": COLLECTIVE},
    "unicron_elastic/training/run.py": {"Run._wait_kept": SCRIPT, "Run.load_state_dict": SCRIPT},
    "unicron_elastic/training/snapshot/manager.py": {
        "SnapshotManager.snapshot": SCRIPT,
        "SnapshotManager.wait": SCRIPT,
        "SnapshotManager.wait_saved": SCRIPT,
        "SnapshotManager.restore": SCRIPT,
    },
    "unicron_elastic/engine/transport/transport.py": {
        "Transport.all_gather": COLLECTIVE,
        "Transport.broadcast": COLLECTIVE,
        "Transport.sum": COLLECTIVE,
    },
    "unicron_elastic/compat/collectives/gloo_backend.py": {"Kept.is_completed": "nothing: it has ended"},
    "unicron_elastic/engine/group/group_work.py": {
        "GroupWork.result": "nothing: it is asked for once it has ended",
    },
    "unicron_elastic/engine/transport/waiter.py": {"Waiter.wait": COLLECTIVE, "_serve": OWN_THREAD},
    "unicron_elastic/training/group/assembly.py": {"Assembly._finish": COLLECTIVE},
    "unicron_elastic/training/shard/seat_carrier.py": {"SeatCarrier.receive": "nothing: it begins one"},
    "unicron_elastic/training/step/tree_sum.py": {"Summing.follow": COLLECTIVE, "TreeSum.reduce": COLLECTIVE},
    "unicron_elastic/worker/channel.py": {
        "Channel._send_packet": "the channel's time-out; the keeper and the warm process block until the agent reads",
        "Channel._receive_packet": "the channel's time-out; the keeper and the warm process serve until the agent ends",
    },
    "unicron_elastic/worker/control.py": {
        "Control.wait": "the agent's word or its end; in the answering thread, which nobody waits for",
    },
    "unicron_elastic/worker/start/in_between.py": {
        "InBetween.wait_for_all": "the worker's session, which it begins first, or the worker's end",
        "InBetween.wait_readable": "the agent's wish or its end, or the learner's; it has nothing else to do",
    },
    "unicron_elastic/worker/start/learning.py": {"Learning._attempt": ENDED},
    "unicron_elastic/worker/start/warm.py": {
        "_wait": "it has ended, or was killed at its limit",
    },
}


def is_limited(call: ast.Call) -> bool:
    """Whether a call waits for nothing, or not for longer than it says."""
    assert isinstance(call.func, ast.Attribute)
    count, names, text = len(call.args), {each.arg for each in call.keywords}, ast.unparse(call)
    if names & {"timeout", "timeout_s"}:
        return True
    match call.func.attr:
        case "wait" | "join" | "result" | "get":
            return count > 0 or bool(names)
        case "poll":
            return count > 0 or ast.unparse(call.func.value) == "select"  # which makes a poll object
        case "accept":
            return count > 0  # else it is none of a socket
        case "acquire":
            return count > 0 or "blocking" in names
        case "wait_for" | "run_until":
            return count > 1
        case "select":
            at_times = count > 3 and ast.unparse(call.args[3]).endswith("else None")
            return (count > 3 and not at_times) or (count == 1 and ast.unparse(call.func.value) != "select")
        case "waitpid" | "waitid":
            return "WNOHANG" in text
        case "flock" | "lockf":
            return "LOCK_NB" in text or "LOCK_UN" in text
        case "communicate" | "recv" | "recvmsg" | "recv_into" | "recvfrom" | "sendall" | "sendmsg":
            return False
    return True


def unlimited(node: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions that wait without a limit, once for each wait."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*scope, child.name)
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and not is_limited(child):
            yield ".".join(scope)
        yield from unlimited(child, inner)


def waits() -> set[tuple[str, str]]:
    """{(file, function)} of the product; the simulation waits in no time of ours."""
    found = set()
    for top in ("launcher", "rendezvous", "unicron_elastic"):
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            name = path.relative_to(REPOSITORY).as_posix()
            if not name.startswith("unicron_elastic/simulation/"):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                found |= {(name, function) for function in unlimited(tree)}
    return found


def test_each_wait_has_a_limit_or_something_that_ends_it() -> None:
    named = {(name, function) for name, functions in ENDS.items() for function in functions}
    assert sorted(waits() - named) == [], "give it a limit, or say here what ends it"
    assert sorted(named - waits()) == [], "they wait no more"


@pytest.mark.parametrize(
    "call",
    [
        "thread.join()", "event.wait()", "queue.get()", "lock.acquire()", "process.communicate()", "future.result()",
        "select.select([a], [], [])", "selector.select()", "poll.poll()", "sock.recv(1)", "sock.sendmsg([b''])",
        "os.waitpid(pid, 0)", "fcntl.flock(fd, fcntl.LOCK_EX)", "loop.run_until(lambda: done)", "listener.accept()",
    ],
)  # fmt: skip
def test_what_waits_for_ever_is_seen(call: str) -> None:
    assert list(unlimited(ast.parse(f"def works():\n    {call}\n"))) == ["works"]


@pytest.mark.parametrize(
    "call",
    [
        "thread.join(1.0)", "event.wait(timeout=1.0)", "queue.get(timeout=1.0)", "'-'.join(words)", "told.get('key')",
        "lock.acquire(blocking=False)", "select.select([a], [], [], 0.1)", "selector.select(0.1)", "select.poll()",
        "os.waitpid(pid, os.WNOHANG)", "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "loop.run_until(done, at)",
    ],
)  # fmt: skip
def test_what_ends_by_itself_is_not(call: str) -> None:
    assert not list(unlimited(ast.parse(f"def works():\n    {call}\n")))
