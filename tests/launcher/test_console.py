import contextlib
import fcntl
import io
import os
import re
import sys
import termios
import threading
import time

import pytest

from unicron_elastic.launcher.common.output import Output, stamped
from unicron_elastic.launcher.view.job.console import PlainConsole, SilentConsole, open_console
from unicron_elastic.launcher.view.job.panel import PanelConsole
from unicron_elastic.launcher.view.job.view import LocalJobView, WorkerView


@pytest.fixture
def pipe():
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as reader, open(write, "w") as writer:
        yield reader, writer


@pytest.fixture
def terminal(monkeypatch):
    """A stream to a terminal of 80 x 24."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    _set_size(slave, 24, 80)
    with open(slave, "w") as stream:
        yield stream
    os.close(master)


def _set_size(fd, rows, columns):
    fcntl.ioctl(fd, termios.TIOCSWINSZ, rows.to_bytes(2, sys.byteorder) + columns.to_bytes(2, sys.byteorder) + bytes(4))


def _opened(mode, stream, stdout=None):
    """The kind of console that is opened where stderr is ``stream``, and stdout as well unless told otherwise."""
    with contextlib.redirect_stdout(stdout or stream):
        console = open_console(mode, stream)
    console.close()
    return type(console)


def test_a_plain_sentence_is_one_line_with_the_time_of_day():
    stream = io.StringIO()
    PlainConsole(stream).say("Restart 1 of 3.")
    assert re.fullmatch(r"\[unicron\] \d\d:\d\d:\d\d Restart 1 of 3\.\n", stream.getvalue())


def test_further_lines_of_a_sentence_keep_their_indentation():
    first, second = stamped("No restart.\n    File train.py\n").splitlines()
    assert first.endswith("No restart.")
    assert second == "    File train.py"


def test_escape_sequences_in_a_sentence_do_not_reach_the_terminal():
    assert "\x1b" not in stamped("rank 0 raised \x1b[2J\x07boom")


def test_off_says_nothing(capfd):
    console = open_console("off", sys.stderr)
    console.say("Restart 1 of 3.")
    console.close()
    assert isinstance(console, SilentConsole)
    assert capfd.readouterr() == ("", "")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'loud' is no console mode"):
        open_console("loud", io.StringIO())


def test_a_pipe_gets_plain_lines_also_if_a_panel_was_asked_for(pipe):
    assert _opened("auto", pipe[1]) is PlainConsole
    assert _opened("panel", pipe[1]) is PlainConsole
    assert PlainConsole(pipe[1]).refresh_interval_s is None


def test_a_terminal_gets_a_panel(terminal):
    assert _opened("auto", terminal) is PanelConsole
    assert _opened("plain", terminal) is PlainConsole


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_abilities_gets_plain_lines(terminal, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    assert _opened("auto", terminal) is PlainConsole


@pytest.mark.parametrize(("rows", "console"), [(11, PlainConsole), (12, PanelConsole)])
def test_a_low_terminal_gets_plain_lines(terminal, rows, console):
    _set_size(terminal.fileno(), rows, 80)
    assert _opened("auto", terminal) is console


def test_a_redirected_stdout_gets_plain_lines_unless_a_panel_is_asked_for(terminal):
    assert _opened("auto", terminal, io.StringIO()) is PlainConsole
    assert _opened("panel", terminal, io.StringIO()) is PanelConsole


def test_a_background_job_leaves_the_terminal_to_the_shell(terminal, monkeypatch):
    monkeypatch.setattr(os, "tcgetpgrp", lambda _fd: os.getpgrp() + 1)
    assert _opened("panel", terminal) is PlainConsole


def test_a_reader_that_went_away_is_no_error(pipe):
    reader, writer = pipe
    console = PlainConsole(writer)
    reader.close()
    console.say("one")
    console.say("two")
    before = time.monotonic()
    console.close()
    console.say("three")
    assert time.monotonic() - before < 0.9  # there is nobody to wait for


def test_a_closed_stream_is_no_error():
    stream = io.StringIO()
    console = PlainConsole(stream)
    stream.close()
    console.say("one")
    console.close()


def test_a_reader_that_does_not_read_blocks_nobody_and_loses_nothing(pipe):
    reader, writer = pipe
    output = Output(writer)
    lines = [f"line {number} {'x' * 1000}\n" for number in range(200)]
    for line in lines:
        output.write(line)  # three times what a pipe holds
    received = b""
    while len(received) < sum(map(len, lines)):
        received += reader.read(1 << 16)
    assert received.decode() == "".join(lines)


def test_what_is_kept_for_a_reader_that_never_reads_is_bounded(pipe):
    output = Output(pipe[1])
    for _ in range(100):
        output.write("x" * 100_000)
    assert sum(map(len, output._kept)) < 2_000_000


def test_a_reader_that_never_reads_costs_little_time(pipe):
    output = Output(pipe[1])
    before = time.monotonic()
    for _ in range(1000):
        output.write("x" * 1000)
    assert time.monotonic() - before < 1  # a pause for each line would make 50 s


def test_close_gives_up_on_a_reader_that_never_reads(pipe):
    console = PlainConsole(pipe[1])
    console.say("x" * 1_000_000)
    console.close()
    console.say("y" * 1_000_000)
    console.close()


def test_a_stream_that_somebody_made_nonblocking_gets_everything(pipe):
    reader, writer = pipe
    os.set_blocking(writer.fileno(), False)
    output = Output(writer)
    output.write("x" * 200_000)
    received = 0
    while received < 200_000:
        received += len(reader.read(1 << 16))


def test_the_stream_itself_stays_blocking(pipe):
    Output(pipe[1])
    assert not fcntl.fcntl(pipe[1].fileno(), fcntl.F_GETFL) & os.O_NONBLOCK


def test_a_file_is_appended_to(tmp_path):
    with open(tmp_path / "log", "w") as stream:
        stream.write("before\n")
        stream.flush()
        console = PlainConsole(stream)
        console.say("after")
        console.close()
    assert (tmp_path / "log").read_text().startswith("before\n[unicron] ")


def test_after_close_a_sentence_still_comes(pipe):
    reader, writer = pipe
    console = PlainConsole(writer)
    console.close()
    console.close()
    console.say("The end.")
    assert b"The end." in reader.read(4096)


def test_lines_of_several_threads_stay_whole(pipe):
    reader, writer = pipe
    console = PlainConsole(writer)
    speak = [threading.Thread(target=lambda n=n: [console.say(f"{n} " * 20) for _ in range(50)]) for n in range(4)]
    for thread in speak:
        thread.start()
    received = b""
    while received.count(b"\n") < 200:
        received += reader.read(1 << 16)
    for thread in speak:
        thread.join()
    assert all(re.fullmatch(r"\[unicron\] [\d:]{8} (\d )\1{18}\d", line) for line in received.decode().splitlines())


def _job(*step_times):
    workers = tuple(
        WorkerView(rank=rank, local_rank=rank, pid=rank, state="running", step=None, step_time_s=time)
        for rank, time in enumerate(step_times)
    )
    return LocalJobView(
        job="train.py",
        run_id="r",
        generation=1,
        restarts_used=0,
        max_restarts=3,
        nodes=1,
        world_size=len(workers),
        workers=workers,
        uptime_s=0.0,
        last_incident=None,
    )


def test_the_rate_is_that_of_the_median_worker():
    assert _job(0.25, 10.0, 0.25).steps_per_s == 4.0
    assert _job(None, 0.5).steps_per_s == 2.0
    assert _job(None, 0.0).steps_per_s is None
