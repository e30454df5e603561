"""What several folders of tests need: a keeper to start processes with, and waits that have a deadline."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hang
import hypothesis
import pytest
from times import pytest_runtest_makereport, pytest_terminal_summary  # noqa: F401 - hooks of pytest
from warm_launcher import WarmLaunchers

from unicron_elastic.launcher.agent.process.processes import Exit, Processes
from unicron_elastic.launcher.common.loop import Loop

DEADLINE_S = 30.0
ALONE_S = 80.0
RANKS_S = 120.0
COLLECTIVES = str(Path(__file__).with_name("collective_ranks.py"))

# torch's TCPStore asks DNS for the name of whoever connects; a lost answer is not to cost the tests five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# What tests start hundreds of times is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("unicron", deadline=None)
hypothesis.settings.load_profile("unicron")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of who was started in the background; tests are about Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Lab:
    """A loop and a keeper, every exit that was reported, and waits on what real processes do."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.exits: list[Exit] = []
        self.processes = Processes(self.loop, self.exits.append)

    def begin(self) -> None:
        """Starts the keeper and has it clear away carriers of the mark should this process be killed."""
        self.processes.begin()
        self.processes.remember(token=self.processes.token)

    def wait(self, condition: Callable[[], object]) -> None:
        """Runs the loop until ``condition()``; fails the test at the deadline."""
        assert self.loop.run_until(lambda: bool(condition()), time.monotonic() + DEADLINE_S), "deadline passed"

    def start(
        self,
        argv: Sequence[str],
        fds: Mapping[int, int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
    ) -> int:
        """Starts a program and returns its pid."""
        number = self.processes.request_start(argv, os.environ if env is None else env, cwd, fds or {})
        return self.processes.wait_for_pid(number, argv[0])

    def start_python(self, code: str, fds: Mapping[int, int] | None = None) -> int:
        """Starts Python on ``code``, without the time that ``site`` takes."""
        return self.start([sys.executable, "-S", "-c", code], fds)

    def exit_of(self, pid: int) -> Exit:
        """Waits until the end of ``pid`` is reported."""
        self.wait(lambda: any(ended.pid == pid for ended in self.exits))
        return next(ended for ended in self.exits if ended.pid == pid)

    @staticmethod
    def wait_for_death(pid: int) -> None:
        """Waits until any process, also one that is no child, has ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            assert select.select([pidfd], [], [], DEADLINE_S)[0], f"process {pid} lives"
        finally:
            os.close(pidfd)

    @staticmethod
    def is_alive(pid: int) -> bool:
        """Whether ``pid`` runs; one that has ended and is not yet collected does not."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            return not select.select([pidfd], [], [], 0)[0]
        finally:
            os.close(pidfd)

    @staticmethod
    def read_line(fd: int) -> str:
        """One line from a pipe."""
        line = b""
        end = time.monotonic() + DEADLINE_S
        while not line.endswith(b"\n"):
            assert select.select([fd], [], [], max(0.0, end - time.monotonic()))[0], f"only {line!r} came"
            chunk = os.read(fd, 1)
            assert chunk, f"the pipe ended after {line!r}"
            line += chunk
        return line.decode().rstrip("\n")

    @staticmethod
    def read_all(fd: int) -> str:
        """Everything from a pipe up to its end."""
        text = b""
        end = time.monotonic() + DEADLINE_S
        while True:
            assert select.select([fd], [], [], max(0.0, end - time.monotonic()))[0], f"only {text!r} came"
            chunk = os.read(fd, 65536)
            if not chunk:
                return text.decode()
            text += chunk

    def end(self) -> None:
        """Ends the keeper and all that it started."""
        self.processes.end()
        self.loop.close()


@pytest.fixture(scope="session")
def warm_launchers() -> Iterator[WarmLaunchers]:
    """The process whose forks the launchers and scripts of tests are."""
    made = WarmLaunchers()
    yield made
    made.end()


@pytest.fixture(scope="session")
def alone(warm_launchers: WarmLaunchers) -> Callable[..., None]:
    """Runs a script or a launcher, with its PROBE in a folder, to a good end, in one more process that has torch."""

    def run(folder: Path, *command: str, **env: str) -> None:
        said = folder / "said"
        assert warm_launchers.begin(said, *command, **env).wait(ALONE_S) == 0, said.read_text()

    return run


@pytest.fixture
def ranks(warm_launchers: WarmLaunchers, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a script as several ranks, in a folder of this name, and returns what each says in its last line."""

    def run(size: int, words: Callable[[int, str], list[str]], name: str) -> list[dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        said = [folder / f"said-{rank}" for rank in range(size)]
        begun = [warm_launchers.begin(said[rank], *words(rank, str(folder))) for rank in range(size)]
        try:
            codes = [each.wait(RANKS_S) for each in begun]
        finally:
            for each in begun:
                each.kill()
        texts = [each.read_text() for each in said]
        assert codes == [0] * size, texts
        return [json.loads(text.splitlines()[-1]) for text in texts]

    return run


@pytest.fixture
def collective(ranks: Callable[..., list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    """What each rank finds that does ``what`` over a back end."""

    def run(backend: str, what: str, size: int, *kind: str) -> list[dict[str, Any]]:
        def words(rank: int, folder: str) -> list[str]:
            return [COLLECTIVES, backend, what, str(rank), str(size), f"{folder}/store", *kind]

        return ranks(size, words, "-".join((backend, *kind)))

    return run


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A running keeper."""
    made = Lab()
    try:
        made.begin()
        yield made
    finally:
        made.end()


def pytest_configure(config: pytest.Config) -> None:
    """Have all that the tests start put their temporary files into one folder, which goes when the tests have ended.

    The folders that pytest gives to tests stay where they are, for who looks at what failed.
    """
    config.pluginmanager.register(hang)
    if not hasattr(config, "workerinput"):  # those that xdist starts inherit it
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix="unicron-tests-")
        os.chmod(folder, 0o1777)  # as that of the host: some tests start programs as other users
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from what is there for as long as the tests: ten thousand of them, and torch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes ``-n auto`` starts: one more than cores, as tests wait for a third of their time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update``, by which golden files are written anew."""
    parser.addoption("--update", action="store_true", help="write golden files anew from what the code says now")
