"""What a script can observe of its start is what torchrun gives it, started warm or plainly."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cold

PROBE = """
import sys
early = {"modules": sorted(sys.modules), "cache": sorted(sys.path_importer_cache), "path_hooks": len(sys.path_hooks),
         "finders": [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path],
         "main": {name: repr(value).split(" at ")[0] for name, value in dict(globals()).items()}}
import atexit, builtins, decimal, faulthandler, gc, json, linecache, locale, logging, multiprocessing, os, resource
import signal, site, socket, tempfile, threading, time, warnings
def kind(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").split("/")[-1].split("-")[0].split(":")[0]
    except OSError:
        return None
def stream(of):
    return [of.isatty(), of.encoding, of.errors, of.line_buffering, of.write_through, of.fileno(), of.name, of.mode]
def text(path):
    with open(f"/proc/self/{path}") as file:
        return file.read()
status = dict(line.split(":\t", 1) for line in text("status").splitlines())
names = ("Umask Uid Gid Groups SigPnd ShdPnd SigBlk SigIgn SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs "
         "Seccomp Cpus_allowed Mems_allowed Threads CoreDumping TracerPid").split()
hooks = {name: getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")}
fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if kind(fd)]
seen = {
    "early": early, "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "cwd": [os.getcwd(), os.readlink("/proc/self/cwd"), os.readlink("/proc/self/root")],
    "interpreter": [sys.executable, sys._base_executable, sys.prefix, sys.base_prefix, os.readlink("/proc/self/exe")],
    "main": [__file__, __name__, __package__, __cached__, __spec__ and (__spec__.name, __spec__.origin), __doc__],
    "env": dict(os.environ), "cmdline": text("cmdline"), "comm": text("comm"),
    "parent": text(f"../{os.getppid()}/comm"),
    "status": {name: status.get(name) for name in names},
    "limits": text("limits"), "cgroup": text("cgroup"), "oom": [text("oom_score_adj"), text("coredump_filter")],
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
    "scheduling": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0)), os.nice(0)],
    "timers": [signal.getitimer(which) for which in range(3)], "wakeup_fd": signal.set_wakeup_fd(-1),
    "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
    "masked": [sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), sorted(signal.sigpending())],
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), text("stat").rpartition(") ")[2].split()[4]],
    "streams": {name: stream(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
    "own_streams": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
    "stdio": [link.split("-")[0] for link in (os.readlink(f"/proc/self/fd/{fd}") for fd in range(3))],
    "fds": sorted(kind(fd) for fd in fds if fd > 2), "inherited": [fd for fd in fds if os.get_inheritable(fd)],
    "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False), sys.getfilesystemencoding()],
    "lines": sorted(linecache.cache), "threads": [(each.name, each.daemon) for each in threading.enumerate()],
    "thread_id": threading.main_thread().native_id == threading.get_native_id() == os.getpid(),
    "filters": [(action, str(words), kind.__name__, str(module), line)
                for action, words, kind, module, line in warnings.filters],
    "warnings": [warnings.showwarning.__module__, sys.warnoptions, sys._xoptions],
    "loggers": sorted(logging.Logger.manager.loggerDict),
    "logging": [logging.root.level, logging.root.handlers, logging.getLoggerClass().__name__, logging._levelToName],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)], "frozen": gc.get_freeze_count() > 0,
    "interpreter_settings": [sys.getswitchinterval(), sys.getrecursionlimit(), faulthandler.is_enabled(),
        repr(decimal.getcontext()), sys.getdlopenflags(), sys.dont_write_bytecode, sys.pycache_prefix,
        socket.getdefaulttimeout(), tempfile.tempdir, time.tzname, os.umask(0),
        sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()],
    "hooks": {name: f"{hook.__module__}.{hook.__qualname__}" for name, hook in hooks.items()},
    "own_hooks": {name: hook is getattr(sys, f"__{name}__") for name, hook in hooks.items()},
    "names": [sorted(vars(builtins)), sorted(vars(sys))], "site": [site.ENABLE_USER_SITE, site.PREFIXES],
    "multiprocessing": [multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True),
        repr(multiprocessing.parent_process()), multiprocessing.active_children()],
    "at_exit": atexit._ncallbacks(), "cpu_time": time.process_time() < 5,
}
with open(os.environ["PROBE"] + "/seen-" + os.environ["RANK"], "w") as file:
    json.dump(seen, file, default=repr)
"""
# Differ from run to run.
OWN = {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TMPDIR", "TEST_RUN"}
# What differs from torchrun's worker, and the words in docs/differences.md that say so. A set may have more members.
ALLOWED = {
    "/early/modules": "`sys.modules`",
    "/early/cache": "`sys.path_importer_cache`",
    "/early/finders": "`sys.meta_path`",
    "/env/UNICRON_RUN_TOKEN": "`UNICRON_RUN_TOKEN`",
    "/parent": "the keeper, a child of the agent",
    "/fds": "descriptors",
    "/hooks/excepthook": "`sys.excepthook` is not `sys.__excepthook__`",
    "/own_hooks/excepthook": "`sys.excepthook` is not `sys.__excepthook__`",
    "/lines": "`linecache`",
    "/loggers": "loggers",
    "/frozen": "`gc.freeze`",
    "/at_exit": "`atexit`",
}
MORE = ("/early/modules", "/early/cache", "/lines", "/loggers")  # with what there was
PAGE = Path(__file__).parents[2] / "docs" / "differences.md"


def observe(launcher: Any, tool: str, arguments: list[str], options: list[str], **how: Any) -> list[Any]:
    run = launcher.run(*options, "--nproc-per-node=2", *arguments, tool=tool, **how)
    assert run.process.returncode == 0, run.err
    assert "--unicron-warm=on" not in options or "without the warm process" not in run.err, run.err
    return looked_at(launcher)


def looked_at(launcher: Any) -> list[Any]:
    """What the two ranks have seen."""
    found = []
    for rank in range(2):
        path = Path(launcher.folder) / f"seen-{rank}"
        seen = json.loads(path.read_text())
        path.unlink()
        seen["env"] = {key: value for key, value in seen["env"].items() if key not in OWN}
        seen["cmdline"] = seen["cmdline"].replace("${local_rank}", str(rank))  # as docs/differences.md says
        found.append(seen)
    return found


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Where two observations differ and may not."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name in sorted(expected.keys() | found.keys()):
            yield from differences(expected.get(name), found.get(name), f"{path}/{name}")
    elif path in MORE and not set(expected) <= set(found):
        yield f"{path}: without {set(expected) - set(found)}"
    elif expected != found and path not in ALLOWED:
        yield f"{path}: {found!r} for {expected!r}"


WITH_ARGUMENTS = ["./sub/probe.py", "--x", "${local_rank}", "", "a b", "ü"]
OF_PYTHON = {"PYTHONPATH": "lib", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONDEVMODE": "1"}


def test_what_may_differ_is_told_to_users() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [words for words in ALLOWED.values() if words not in text] == []


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        pytest.param(["probe.py"], {}, marks=pytest.mark.slow),
        (WITH_ARGUMENTS, OF_PYTHON),
        pytest.param(WITH_ARGUMENTS, {}, marks=pytest.mark.slow),
        pytest.param(["-m", "pkg.probe", "arg"], {}, marks=pytest.mark.slow),
        pytest.param(["probe.py"], OF_PYTHON, marks=pytest.mark.slow),
        pytest.param(
            ["probe.py"], {"PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "BIG": "x" * 100_000}, marks=pytest.mark.slow
        ),
    ],
    ids=["script", "both", "arguments", "module", "python-options", "empty-pythonpath-big-env"],
)
def test_script_sees_what_torchrun_shows(launcher: Any, arguments: list[str], env: dict[str, str]) -> None:
    for folder in ("sub", "pkg", "lib"):
        (launcher.folder / folder).mkdir()
    launcher.script("pkg/__init__.py", "")
    for name in ("probe.py", "sub/probe.py", "pkg/probe.py"):
        launcher.script(name, PROBE)
    expected = observe(launcher, "torchrun", arguments, [], env=env)
    for options in (["--unicron-warm=on"], ["--unicron-warm=off"]):
        found = observe(launcher, "unicron-run", arguments, options, env=env)
        for one, other in zip(expected, found, strict=True):
            assert list(differences(one, other)) == [], options
            assert other["fds"] == ["memfd", "socket"]


@pytest.mark.parametrize(
    ("ignored", "handled"),
    [
        ("HUP", []),  # as by nohup
        pytest.param("INT QUIT USR1", ["--signals-to-handle=SIGTERM,SIGUSR1"], marks=pytest.mark.slow),
    ],
)
def test_what_the_launcher_ignored_or_handles_is_ignored_as_with_torchrun(
    launcher: Any, ignored: str, handled: list[str]
) -> None:
    launcher.script("probe.py", PROBE)
    wrap = f"trap '' {ignored}; exec \"$@\""
    expected = observe(launcher, "torchrun", ["probe.py"], handled, wrap=wrap)
    for options in (["--unicron-warm=on"], ["--unicron-warm=off"]):
        found = observe(launcher, "unicron-run", ["probe.py"], [*handled, *options], wrap=wrap)
        assert [each["signals"] for each in found] == [each["signals"] for each in expected], options


# Begins again once what it imports is imported for the next start, which is then the one that is looked at.
LEARNED = """
AGAIN = os.environ["PROBE"] + "/again"
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.path.exists(AGAIN):  # nobody learns
        sys.exit(1)
    import asyncio, email.mime.text, http.client, mailbox, sqlite3, unittest.mock, logging.config, ftplib, tarfile
    import xml.dom.minidom, xmlrpc.client
    import torch
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    while not os.path.exists(AGAIN):
        time.sleep(0.02)
    sys.exit(1)
"""


def test_script_sees_what_torchrun_shows_when_its_imports_were_learned(launcher: Any) -> None:
    launcher.script("probe.py", PROBE + LEARNED)
    go_on = launcher.folder / "again"
    go_on.touch()
    restarts = "--max-restarts=1"
    (expected, other) = observe(launcher, "torchrun", ["probe.py"], [restarts])
    go_on.unlink()
    run = launcher.start("--nproc-per-node=2", restarts, "probe.py", tool="unicron-run", fast=False)
    run.until(lambda: "The next start finds" in run.err, "what was learned")
    go_on.touch()
    assert run.wait() == 0, run.err
    found = looked_at(launcher)
    assert "Left to each worker" not in run.err, run.err
    for one, learned in zip((expected, other), found, strict=True):
        # What torch adds to the filters of warnings is not learned: it is there in any warm worker.
        assert [each for each in differences(one, learned) if not each.startswith("/filters:")] == []
        assert {"mailbox", "sqlite3"} <= set(learned["early"]["modules"])
        assert learned["fds"] == ["memfd", "socket"]


def test_script_sees_what_torchrun_shows_when_the_warm_process_was_held(launcher: Any) -> None:
    launcher.script("probe.py", PROBE)
    env = {"UNICRON_WARM_FOR_NEXT": "60", "TMPDIR": str(launcher.folder), "TEST_RUN": uuid.uuid4().hex}
    arguments = ["probe.py", *WITH_ARGUMENTS[1:]]
    expected = observe(launcher, "torchrun", arguments, [], env=env)
    observe(launcher, "unicron-run", ["probe.py", "--other"], ["--unicron-warm=on"], env=env)
    try:
        found = observe(launcher, "unicron-run", arguments, ["--unicron-warm=on"], env=env)
        assert "The workers start from a warm process that is held since" in launcher.runs[-1].err
    finally:
        launcher.runs[-1].mark = env["TEST_RUN"]
        for pid in launcher.runs[-1].carriers():
            os.kill(pid, signal.SIGKILL)
    for one, other in zip(expected, found, strict=True):
        assert list(differences(one, other)) == []
        assert other["fds"] == ["memfd", "socket"]


def test_variables_set_before_importing_torch_count(launcher: Any) -> None:
    launcher.script(
        "early.py",
        "import os\nos.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\nos.environ['PYTORCH_JIT'] = '0'\n"
        "import torch.distributed as dist\nimport torch.jit\n"
        "print(dist.get_debug_level(), torch.jit._state._enabled.enabled, flush=True)\n",
    )
    expected = launcher.run("--nproc-per-node=1", "early.py", tool="torchrun").out
    assert launcher.run("--nproc-per-node=1", "early.py", fast=False).out == expected


def test_users_sitecustomize_knows_its_rank(launcher: Any) -> None:
    (launcher.folder / "lib").mkdir()
    launcher.script("lib/sitecustomize.py", "import os\nSAW = os.environ.get('RANK')\n")
    launcher.script("saw.py", "import os, sitecustomize\nos.write(1, f'SAW {sitecustomize.SAW}\\n'.encode())\n")
    run = launcher.run("--nproc-per-node=2", "saw.py", env={"PYTHONPATH": str(launcher.folder / "lib")})
    assert sorted(run.out.split("\n")) == ["", "SAW 0", "SAW 1"]


@pytest.mark.slow
def test_a_script_that_trains_in_a_function_ends(launcher: Any) -> None:
    launcher.script(
        "function.py",
        textwrap.dedent(
            """
            import torch, torch.distributed as dist

            def main():
                dist.init_process_group("gloo")
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
                optimizer = torch.optim.AdamW(model.parameters())
                for _ in range(20):
                    model(torch.randn(8, 64)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                dist.destroy_process_group()

            main()
            """
        ),
    )
    for _ in range(3):
        run = launcher.run("--nproc-per-node=2", "--unicron-warm=on", "function.py", fast=False)
        assert run.process.returncode == 0, run.err
