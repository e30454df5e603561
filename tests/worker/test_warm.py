"""The warm process, started and asked as the agent does it: keeper, sitecustomize, forks."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from warm_lab import TELL, Warmer

from unicron_elastic.launcher.agent.process.warm import WarmProcess
from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.process.mark import MARK, token_of

if TYPE_CHECKING:
    from conftest import Lab


@pytest.fixture
def warmer(lab: Lab, tmp_path: Path) -> Iterator[Warmer]:
    made = Warmer(lab, tmp_path)
    yield made
    made.close()


def test_a_fork_is_the_worker_that_was_asked_for(warmer: Warmer, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nonexistent/of/the/user")
    monkeypatch.setenv("GOES", "away")
    warm = warmer.begin("colorsys", warmer.command("--rank", "x"))
    assert warm.wait_ready(), warm.refusal
    env = {"RANK": "5", "ODD": "a b\udcff=ü", "PATH": os.environ["PATH"], "PYTHONPATH": "/nonexistent/of/the/user"}
    forked = warmer.fork(warm, warmer.command("--rank", "5"), env, str(warmer.folder))
    stdout, stderr = forked.output()
    ended = lab.exit_of(forked.pid)
    told: dict[str, Any] = json.loads(stdout)
    assert (ended.exit_code, stderr) == (0, "to stderr\n")
    assert told["argv"] == [str(warmer.script), "--rank", "5"]
    assert told["orig_argv"] == [sys.executable, "-u", str(warmer.script), "--rank", "5"]
    assert token_of(told["env"].pop(MARK)) == lab.processes.token
    assert told["env"] == env
    assert told["path"][:2] == [str(warmer.folder), "/nonexistent/of/the/user"]
    assert not any("inject" in entry for entry in told["path"])
    assert told["cwd"] == str(warmer.folder)
    assert told["stdin"] == "from stdin"
    assert told["session"] is True
    assert (told["main"], told["file"]) == ("__main__", str(warmer.script))
    assert told["name"].startswith("python")  # not the warm process's name
    assert told["preloaded"] == ["colorsys"]
    # The pulse page, the folder that is being listed, the control channel, and nothing else of ours.
    assert sorted(fd for fd in told["fds"] if "libffi" not in fd) == ["/memfd", f"/proc/{forked.pid}/fd", "socket"]
    assert forked.said() == []


def test_one_warm_process_makes_many_workers_and_reports_how_each_ended(warmer: Warmer, lab: Lab) -> None:
    warmer.script.write_text("import os, sys\nos._exit(int(sys.argv[1]))\n")
    warm = warmer.begin("colorsys", warmer.command("0"))
    assert warm.wait_ready(), warm.refusal
    for code in (0, 7, 41):
        assert lab.exit_of(warmer.fork(warm, warmer.command(str(code))).pid).exit_code == code
    warmer.script.write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    )  # the script is read by the worker, not by the warm process
    assert lab.exit_of(warmer.fork(warm, warmer.command("0")).pid).exit_code == -signal.SIGTERM


@pytest.mark.parametrize("packet", [b'i{"is": "ForkWorker", "number": 1}', b"i["])
def test_a_warm_process_that_cannot_read_what_it_is_asked_ends(warmer: Warmer, lab: Lab, packet: bytes) -> None:
    warm = warmer.begin("colorsys")
    assert warm.wait_ready(), warm.refusal
    assert warm._channel is not None
    warm._channel._sock.send(packet)
    lab.wait(lambda: warm.is_gone)
    with pytest.raises(ChannelClosed):
        warmer.fork(warm)


def test_workers_die_with_the_keeper(warmer: Warmer, lab: Lab) -> None:
    warmer.script.write_text("import time\nprint('up')\ntime.sleep(600)\n")
    warm = warmer.begin("colorsys")
    assert warm.wait_ready(), warm.refusal
    forked = warmer.fork(warm)
    assert lab.read_line(forked.stdout) == "up"
    os.kill(lab.processes.keeper_pid, signal.SIGKILL)
    lab.wait_for_death(forked.pid)
    assert lab.exit_of(forked.pid).exit_code == -signal.SIGKILL


def test_an_exception_in_a_warm_worker_arrives(warmer: Warmer) -> None:
    warmer.script.write_text("def step():\n    raise ValueError('bad')\nstep()\n")
    warm = warmer.begin("colorsys")
    assert warm.wait_ready(), warm.refusal
    forked = warmer.fork(warm)
    _, stderr = forked.output()
    (message,) = forked.said()
    assert message["is_final"] is True
    assert message["exception"]["location"] == f"{warmer.script}:2 in step"
    assert message["exception"]["stack"] == stderr  # no frame of ours is in it


def test_a_module_run_with_m_starts_warm(warmer: Warmer) -> None:
    warm = warmer.begin("colorsys", [sys.executable, "-u", "-m", "train", "x"])
    assert warm.wait_ready(), warm.refusal
    forked = warmer.fork(warm, [sys.executable, "-u", "-m", "train", "7"], cwd=str(warmer.folder))
    told = json.loads(forked.output()[0])
    assert told["argv"] == [str(warmer.script), "7"]
    assert told["main"] == "__main__"


def test_warnings_of_what_is_preloaded_are_not_said_by_the_warm_process(warmer: Warmer, lab: Lab) -> None:
    # A script may import those modules never, or with filters of its own.
    (warmer.folder / "warns.py").write_text("import warnings\nwarnings.warn('no such thing here')\n")
    warmer.script.write_text("import warnings\nwarnings.warn('of the script')\n")
    env = {"PYTHONPATH": str(warmer.folder)}
    read_end, write_end = os.pipe()
    warm = WarmProcess(lab.loop, lab.processes, "warns")
    before = os.dup(2)
    os.dup2(write_end, 2)
    try:
        warm.begin(warmer.command(), {**os.environ, **env}, str(warmer.folder), [0, 1, 2])
        assert warm.wait_ready(), warm.refusal
    finally:
        os.dup2(before, 2)
        os.close(before)
    os.close(write_end)
    forked = warmer.fork(warm, env={**os.environ, **env})
    assert "UserWarning: of the script" in forked.output()[1]
    warm.end()
    assert lab.read_all(read_end) == ""
    os.close(read_end)


# Counts what is left of its objects when the interpreter ends, as nanobind does.
COUNTS = """
import os
meta = type("nb_meta", (type,), {"__module__": MODULE})
class Instance:
    def __del__(self, write=os.write):
        write(1, b"collected")
class Holder:
    instance = Instance()
"""


@pytest.mark.parametrize(("module", "output"), [("nanobind", "collected"), ("other", "")])
def test_the_end_collects_what_was_preloaded_if_somebody_counts(warmer: Warmer, module: str, output: str) -> None:
    # As in a plain start; where nobody counts, that second is saved.
    (warmer.folder / "counts.py").write_text(COUNTS.replace("MODULE", repr(module)))
    warmer.script.write_text("import counts\n")
    env = {**os.environ, "PYTHONPATH": str(warmer.folder)}
    warm = warmer.begin("counts", PYTHONPATH=str(warmer.folder))
    assert warm.wait_ready(), warm.refusal
    assert warmer.fork(warm, env=env).output() == (output, "")


def test_random_states_differ_between_workers(warmer: Warmer) -> None:
    # What a plain start seeds from the system differs; what a module seeds with a number of its own does not.
    (warmer.folder / "own_generators.py").write_text(
        "import random, numpy\n"
        "python, seeded = random.Random(), random.Random(1)\n"
        "generator, seeded_generator = numpy.random.default_rng(), numpy.random.default_rng(2**100)\n"
        "state, seeded_state = numpy.random.RandomState(), numpy.random.RandomState(3)\n"
        "bits, seeded_bits = numpy.random.PCG64(), numpy.random.PCG64(5)\n"
    )
    warmer.script.write_text(
        "import logging, multiprocessing, os, random, secrets, tempfile, threading, uuid, numpy, torch\n"
        "import own_generators as own\n"
        "draws = [random.random(), numpy.random.random(), next(tempfile._get_candidate_names()), uuid.uuid4(),\n"
        "    uuid.uuid1(), torch.rand(1).item(), torch.initial_seed(), own.python.random(), own.generator.random(),\n"
        "    own.state.random(), multiprocessing.current_process().authkey.hex(), logging._startTime,\n"
        "    own.bits.random_raw()]\n"
        "same = [own.seeded.random(), own.seeded_generator.random(), own.seeded_state.random(),\n"
        "    torch.Generator().initial_seed(), own.seeded_bits.random_raw()]\n"
        "assert threading.main_thread().native_id == os.getpid()\n"
        "assert secrets.randbits is numpy.random.bit_generator.randbits\n"
        "assert random.Random.seed.__module__ == secrets.randbits.__module__ == 'random'\n"
        "print(*draws, *same)\n"
    )
    path = {"PYTHONPATH": str(warmer.folder)}
    warm = warmer.begin("numpy.random,torch,own_generators", **path)
    assert warm.wait_ready(), warm.refusal
    outputs = [warmer.fork(warm, env={**os.environ, **path}).output() for _ in range(2)]
    assert [error for _, error in outputs] == ["", ""]
    one, other = (out.split() for out, _ in outputs)
    assert len(one) == 18
    assert [index for index in range(18) if one[index] == other[index]] == [13, 14, 15, 16, 17]


READS = """
import os, tempfile
os.environ.setdefault("SET_BY_IMPORT", "1")
os.environ["RANK"] = "of the warm process"
os.environ.pop("TAKEN_AWAY", None)
asked = [os.environ.get("READ_BY_GET"), os.getenv("READ_BY_GETENV"), "READ_BY_IN" in os.environ, tempfile.gettempdir()]
"""


def test_what_imports_change_in_the_environment_is_changed_in_workers(warmer: Warmer, tmp_path: Path) -> None:
    (warmer.folder / "reads.py").write_text(READS)
    warmer.script.write_text(
        "import os\nos.environ['TMPDIR'] = os.environ['OTHER']\nimport reads, tempfile\n"
        "print(os.environ.get('SET_BY_IMPORT'), os.environ.get('TAKEN_AWAY'), os.environ['RANK'])\n"
        "print(tempfile.gettempdir())\n"
    )
    path = {"PYTHONPATH": str(warmer.folder), "TAKEN_AWAY": "x", "OTHER": str(tmp_path)}
    warm = warmer.begin("reads", **path)
    assert warm.wait_ready(), warm.refusal
    stdout, stderr = warmer.fork(warm, env={**os.environ, **path, "RANK": "3"}).output()
    assert (stdout, stderr) == (f"1 None 3\n{tmp_path}\n", "")


@pytest.mark.parametrize("name", ["READ_BY_GET", "READ_BY_GETENV", "READ_BY_IN"])
def test_it_refuses_to_serve_a_script_that_sets_what_imports_read(warmer: Warmer, name: str) -> None:
    (warmer.folder / "reads.py").write_text(READS)
    warmer.script.write_text(f"import os\nos.environ['NOT_READ'] = os.environ['{name}'] = '1'\nimport reads\n")
    warm = warmer.begin("reads", PYTHONPATH=str(warmer.folder))
    assert not warm.wait_ready()
    assert warm.refusal == f"the script sets {name}, which is read when what is preloaded is imported"


def test_a_fork_with_torch_computes_and_steps(warmer: Warmer, lab: Lab) -> None:
    warmer.script.write_text(
        textwrap.dedent(
            """
            import sys
            assert "torch" in sys.modules
            import torch
            product = torch.mm(torch.ones(256, 256), torch.ones(256, 256))
            parameter = torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            for _ in range(3):
                parameter.sum().backward()
                optimizer.step()
            print(product.sum().item())
            """
        )
    )
    warm = warmer.begin("?no_such_module,torch")
    assert warm.wait_ready(), warm.refusal
    forked = [warmer.fork(warm) for _ in range(2)]
    for worker in forked:
        assert worker.output() == (f"{256.0**3}\n", "")
        assert lab.exit_of(worker.pid).exit_code == 0
        reading = worker.page.read()
        assert reading is not None
        assert reading.step == 3
        (first,) = worker.said()
        assert first["step"] == 1
        assert isinstance(first["stack_fd"], int)


@pytest.mark.slow
def test_preloading_dynamo_leaves_the_same_holders_of_the_process_group(warmer: Warmer) -> None:
    # torch.distributed.nn holds the group that there is when torch._dynamo is first imported; without a holder, DDP's
    # reducer ends gloo's threads while it has the interpreter, and a script that trains in a function hangs at its end.
    warmer.script.write_text(
        textwrap.dedent(
            """
            import sys, tempfile
            import torch, torch.distributed as dist
            from unicron_elastic.worker.start import late

            print("torch._dynamo" in sys.modules, "torch._dynamo.config" in sys.modules)
            dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
            torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
            print("torch._dynamo" in sys.modules, late._held_groups == [dist.group.WORLD])
            print(torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.__spec__.loader is not None)
            print(any(isinstance(finder, late._HeldBack) for finder in sys.meta_path))
            """
        )
    )
    warm = warmer.begin("torch,torch.distributed,torch._dynamo")
    assert warm.wait_ready(), warm.refusal
    assert warmer.fork(warm).output() == ("False True\nTrue True\nTrue True\nFalse\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch.distributed.nn", "torch.distributed.nn.functional"])
def test_nobody_holds_the_process_group_of_a_script_that_imports_what_does_before_it(warmer: Warmer, name: str) -> None:
    # Gloo's threads would be there when the interpreter ends, which aborts the process if one of them has a tensor.
    warmer.script.write_text(
        textwrap.dedent(
            f"""
            import sys, tempfile
            import torch, torch.distributed as dist
            from unicron_elastic.worker.start import late

            print([each for each in sys.modules if each.startswith("torch.distributed.nn")])
            import {name}
            print(torch.distributed.nn.functional is sys.modules["torch.distributed.nn.functional"])
            dist.init_process_group("gloo", init_method=f"file://{{tempfile.mktemp()}}", rank=0, world_size=1)
            torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
            print("torch._dynamo" in sys.modules, late._held_groups)
            print(any(isinstance(finder, late._HeldBack) for finder in sys.meta_path))
            """
        )
    )
    warm = warmer.begin("torch,torch.distributed,torch._dynamo")
    assert warm.wait_ready(), warm.refusal
    assert warmer.fork(warm).output() == ("[]\nTrue\nTrue []\nFalse\n", "")


def test_it_refuses_to_serve_with_a_thread_running(warmer: Warmer) -> None:
    (warmer.folder / "threaded").mkdir()
    (warmer.folder / "threaded" / "starts_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    warm = warmer.begin("starts_thread", PYTHONPATH=str(warmer.folder / "threaded"))
    assert not warm.wait_ready()
    assert warm.refusal is not None
    assert re.fullmatch(r"starts_thread has started a thread \(.+\), and a fork would lose that", warm.refusal)
    with pytest.raises(ChannelClosed):
        warmer.fork(warm)


# As pyarrow's allocator does, in C.
ALLOCATES = """
import os, threading
if "background_thread:false" not in os.environ.get("JE_ARROW_MALLOC_CONF", ""):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_an_allocator_that_starts_a_thread_of_its_own_is_kept_from_it(warmer: Warmer) -> None:
    (warmer.folder / "allocates.py").write_text(ALLOCATES)
    warmer.script.write_text("import os\nprint(os.environ.get('JE_ARROW_MALLOC_CONF'))\n")
    path = {"PYTHONPATH": str(warmer.folder)}
    warm = warmer.begin("allocates", **path)
    assert warm.wait_ready(), warm.refusal
    assert warmer.fork(warm, env={**os.environ, **path}).output() == ("None\n", "")


def test_what_the_user_tells_an_allocator_counts(warmer: Warmer) -> None:
    (warmer.folder / "allocates.py").write_text(ALLOCATES)
    warm = warmer.begin("allocates", PYTHONPATH=str(warmer.folder), JE_ARROW_MALLOC_CONF="background_thread:true")
    assert not warm.wait_ready()
    assert warm.refusal is not None
    assert warm.refusal.startswith("allocates has started a thread")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_a_module_that_counts_gpus_where_there_are_none_opens_no_cuda(warmer: Warmer) -> None:
    """As Megatron-Core does; without NVML torch asks CUDA itself, unless it is not to see any."""
    (warmer.folder / "counts.py").write_text("import torch\nCOUNT = torch.cuda.device_count()\n")
    warmer.script.write_text("import os, counts\nprint(counts.COUNT, os.environ.get('CUDA_VISIBLE_DEVICES'))\n")
    path = {"PYTHONPATH": str(warmer.folder)}
    warm = warmer.begin("counts", **path)
    assert warm.wait_ready(), warm.refusal
    assert warmer.fork(warm, env={**os.environ, **path}).output() == ("0 None\n", "")


@pytest.mark.parametrize(
    ("preload", "reason"),
    [
        ("no_such_module", "cannot import no_such_module: No module named 'no_such_module'"),
        ("raises_on_import", "importing raises_on_import failed: ValueError: not today"),
        ("exits_on_import", "SystemExit"),
    ],
)
def test_it_says_which_module_it_cannot_import(warmer: Warmer, preload: str, reason: str) -> None:
    modules = warmer.folder / "modules"
    modules.mkdir()
    (modules / "raises_on_import.py").write_text("raise ValueError('not today')\n")
    (modules / "exits_on_import.py").write_text("raise SystemExit(0)\n")
    warm = warmer.begin(preload, PYTHONPATH=str(modules))
    assert not warm.wait_ready()
    assert warm.refusal is not None
    assert reason in warm.refusal


@pytest.mark.parametrize("args", [(), ("-m", "resnet")], ids=["plain", "with an -m of the script's own"])
@pytest.mark.parametrize("name", ["colorsys.py", "colorsys/__init__.py"])
def test_a_users_module_of_a_preloaded_name_is_not_hidden(warmer: Warmer, name: str, args: tuple[str, ...]) -> None:
    scripts = warmer.folder / "scripts"
    warmer.script = scripts / "train.py"
    (scripts / name).parent.mkdir(parents=True)
    (scripts / name).touch()
    warmer.script.write_text(TELL)
    warm = warmer.begin("colorsys", warmer.command(*args))
    assert not warm.wait_ready()
    assert warm.refusal == f"{scripts / 'colorsys'} stands in for a module that was preloaded"


def test_a_folder_of_a_preloaded_name_that_is_no_module_is_no_obstacle(warmer: Warmer) -> None:
    (warmer.folder / "colorsys").mkdir()
    (warmer.folder / "colorsys.txt").touch()
    warm = warmer.begin("colorsys")
    assert warm.wait_ready(), warm.refusal


def test_it_ends_with_its_channel(warmer: Warmer, lab: Lab) -> None:
    warm = warmer.begin("colorsys")
    assert warm.wait_ready(), warm.refusal
    pid = warm.pid
    assert pid is not None
    warm.end()
    assert lab.exit_of(pid).exit_code == 0


def test_its_death_is_noticed(warmer: Warmer, lab: Lab) -> None:
    warm = warmer.begin("colorsys")
    assert warm.wait_ready(), warm.refusal
    assert warm.pid is not None
    os.kill(warm.pid, signal.SIGKILL)
    lab.wait(lambda: warm.is_gone)
    assert warm.refusal == "it died"
