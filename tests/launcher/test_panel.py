"""The panel on a real pty, read by a terminal emulator: what people would see."""

import os
import re
import subprocess
import sys
import termios
import threading
import time
from dataclasses import replace

import pytest
from emulated_terminal import MARK, Terminal

from unicron_elastic.launcher.view.job.panel import RESTORE_SEQUENCE, PanelConsole, panel_lines
from unicron_elastic.launcher.view.job.view import LocalJobView, WorkerView


def _worker(rank, state="running", step=1200, step_time_s=0.25):
    return WorkerView(rank=rank, local_rank=rank, pid=rank, state=state, step=step, step_time_s=step_time_s)


PANEL_ROWS = 5
DEADLINE_S = 30.0
VIEW = LocalJobView(
    job="train.py",
    run_id="0b3c",
    generation=2,
    restarts_used=1,
    max_restarts=3,
    nodes=1,
    world_size=8,
    workers=tuple(_worker(rank) for rank in range(8)),
    uptime_s=3661.5,
    last_incident="rank 1 was killed.",
)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def console(terminal):
    console = PanelConsole(terminal.stream, patience_s=30.0)  # what was shown has been written, on a busy machine too
    yield console
    console.close()


def _texts(view, width=79):
    return [line.plain for line in panel_lines(view, width)]


def _is_panel(rows):
    return "unicron train.py" in rows[0] and rows[PANEL_ROWS - 1] == "last incident: rank 1 was killed."


def test_the_lines_tell_the_job_the_rate_the_workers_and_the_last_incident():
    title, *lines = _texts(VIEW)
    assert title.startswith("── unicron train.py ── run 0b3c ──")
    assert lines == [
        "generation 2  restarts 1 of 3  1 node  world size 8  up 1:01:01",
        "step 1,200  4 steps/s",
        "8 workers running  ranks 0-7",
        "last incident: rank 1 was killed.",
    ]


def test_workers_are_counted_by_state_and_rare_states_share_a_line():
    states = ["running"] * 5 + ["waiting"] * 2 + ["ended (1)", "ended (-9)"]
    lines = _texts(replace(VIEW, workers=tuple(_worker(rank, state) for rank, state in enumerate(states))))
    assert lines[3:6] == ["5 workers running  ranks 0-4", "2 workers waiting  ranks 5-6", "1 ended (-9), 1 ended (1)"]


def test_a_straggler_is_named_and_slow_steps_are_told_in_seconds():
    workers = (_worker(0, step_time_s=2.0), _worker(1, step_time_s=2.0), _worker(2, step_time_s=3.0))
    assert "step 1,200  2 s a step  slowest: rank 2, 1.5x the median" in _texts(replace(VIEW, workers=workers))


def test_a_job_that_has_not_begun_has_lines_too():
    lines = _texts(replace(VIEW, workers=(), last_incident=None))
    assert lines[2:] == ["no step yet", "no workers", "no incident"]


@pytest.mark.parametrize("width", [19, 40, 200])
def test_no_line_is_wider_than_asked_or_holds_a_control_character(width):
    view = replace(VIEW, job="训练" * 40, run_id="\x1b[2J" * 9, last_incident="boom\n\x1b[2J" * 40)
    lines = panel_lines(view, width)
    assert max(line.cell_len for line in lines) <= width
    assert all(line.plain.isprintable() for line in lines)


def test_the_script_scrolls_above_the_panel(terminal, console):
    for number in range(100):
        terminal.script_prints(f"line {number}\n")
        console.show(replace(VIEW, uptime_s=float(number)))
        terminal.update()
    assert _is_panel(terminal.rows()[-PANEL_ROWS:])
    assert terminal.text_above(PANEL_ROWS) == [f"line {number}" for number in range(100)] + [""]


def test_a_half_printed_line_goes_on_where_it_was(terminal, console):
    terminal.script_prints("\n" * 30 + "load")
    console.show(VIEW)
    terminal.script_prints("ing")
    console.show(replace(VIEW, generation=3))
    assert terminal.text_above(PANEL_ROWS)[-1] == "loading"


def test_the_scripts_colour_does_not_reach_the_panel_nor_the_panels_the_script(terminal, console):
    terminal.script_prints("\x1b[41m")
    console.show(VIEW)
    terminal.script_prints("red")
    terminal.update()
    assert terminal.screen.buffer[0][0].bg == "red"
    assert {cell.bg for row in range(19, 24) for cell in terminal.screen.buffer[row].values()} == {"default"}


def test_a_sentence_is_a_line_of_its_own_above_the_panel(terminal, console):
    console.show(VIEW)
    console.say("One.")
    terminal.script_prints("loading")
    console.say("Two.\n    its stack")
    terminal.script_prints("on")
    texts = [re.sub(r" \d\d:\d\d:\d\d", "", line) for line in terminal.text_above(PANEL_ROWS)]
    assert texts[:6] == ["[unicron] One.", "loading", "[unicron] Two.", "    its stack", "on", ""]
    assert _is_panel(terminal.rows()[-PANEL_ROWS:])


def test_nothing_is_written_when_nothing_changed(terminal, console):
    console.show(VIEW)
    assert terminal.update()
    console.show(VIEW)
    assert terminal.update() == b""
    console.show(replace(VIEW, generation=3))
    assert terminal.update()


def test_a_refresh_is_one_write(console, monkeypatch):
    written = []
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: written.append(data) or real(fd, data))
        console.show(VIEW)
    assert len(written) == 1


@pytest.mark.parametrize(("rows", "columns"), [(16, 60), (40, 120), (24, 50), (12, 20)])
def test_after_a_resize_one_whole_panel_stands_at_the_bottom(terminal, console, rows, columns):
    lines = [f"line {number}" for number in range(50)]
    terminal.script_prints("\n".join(lines[:30]) + "\n")
    console.show(VIEW)
    terminal.resize(rows, columns)
    console.show(VIEW)
    terminal.script_prints("\n".join(lines[30:]) + "\n")
    screen = terminal.rows()
    assert "unicron" in screen[-PANEL_ROWS]
    assert sum("unicron" in row for row in screen) == 1
    seen = [line for line in terminal.text_above(PANEL_ROWS) if line]
    assert seen[-20:] == lines[30:]


def test_a_terminal_made_too_low_gets_all_its_rows_back_and_the_panel_when_it_grows(terminal, console):
    console.show(VIEW)
    terminal.resize(10, 80)
    console.show(VIEW)
    assert not any(terminal.rows())
    assert terminal.screen.margins is None
    terminal.resize(24, 80)
    console.show(VIEW)
    assert _is_panel(terminal.rows()[-PANEL_ROWS:])


def test_the_panel_grows_with_its_lines_and_does_not_shrink(terminal, console):
    terminal.script_prints("\n" * 30 + "last")
    console.show(VIEW)
    mixed = tuple(_worker(rank, "running" if rank else "ended (1)") for rank in range(8))
    console.show(replace(VIEW, workers=mixed))
    rows = terminal.rows()
    assert rows[-7] == "last"
    assert "unicron" in rows[-6]
    console.show(VIEW)
    assert terminal.rows()[-7:-5] == rows[-7:-5]


@pytest.mark.parametrize("resized", [False, True])
def test_close_leaves_the_terminal_as_it_was(terminal, console, resized):
    terminal.script_prints("\n".join(map(str, range(40))) + "\n")
    console.show(VIEW)
    if resized:
        terminal.resize(30, 70)
    console.close()
    console.close()
    console.show(VIEW)
    rows = terminal.rows()
    row, column = terminal.cursor()
    assert column == 0
    assert rows[row - 1] == "39"
    assert not any(rows[row:])
    assert terminal.screen.margins in (None, (0, terminal.screen.lines - 1))
    console.say("The end.")
    assert terminal.rows()[row].endswith("The end.")


def test_another_process_can_clean_up_after_a_launcher_that_was_killed(terminal, console):
    terminal.script_prints("\n".join(map(str, range(40))) + "\nhalf")
    console.show(VIEW)
    before = terminal.cursor()
    os.write(terminal.stream.fileno(), RESTORE_SEQUENCE.encode())
    rows = terminal.rows()
    assert terminal.cursor() == before
    assert rows[before[0]] == "half"
    assert not any(rows[before[0] + 1 :])
    assert terminal.screen.margins in (None, (0, terminal.screen.lines - 1))


def test_lines_of_other_processes_are_never_broken(terminal, console):
    """Three processes print while the panel is redrawn as fast as it can be."""
    code = "import os,sys\nfor i in range(300): os.write(1, b'%s:%d %s\\n' % (sys.argv[1].encode(), i, b'x' * 30))"
    received = []

    def read_until_mark():
        while MARK not in b"".join(received[-2:]):  # a read may have cut it in two
            received.append(os.read(terminal.master, 1 << 16))

    reader = threading.Thread(target=read_until_mark)
    reader.start()
    scripts = [subprocess.Popen([sys.executable, "-c", code, name], stdout=terminal.stream) for name in "abc"]
    shown = 0
    while any(script.poll() is None for script in scripts):
        console.show(replace(VIEW, generation=shown))
        shown += 1
    console.show(VIEW)
    os.write(terminal.stream.fileno(), MARK)
    reader.join()
    terminal.emulator.feed(b"".join(received))
    wanted = {f"{name}:{number} {'x' * 30}" for name in "abc" for number in range(300)}
    assert shown > 10
    assert {line for line in terminal.text_above(PANEL_ROWS) if line} == wanted
    assert _is_panel(terminal.rows()[-PANEL_ROWS:])


def test_a_terminal_stopped_with_ctrl_s_blocks_nobody(terminal):
    console = PanelConsole(terminal.stream, patience_s=0.01)
    show_in_time(console, terminal, 2)
    termios.tcflow(terminal.stream.fileno(), termios.TCOOFF)
    console.say("One.")
    console.show(replace(VIEW, generation=7))
    termios.tcflow(terminal.stream.fileno(), termios.TCOON)
    console.say("Two.")
    while "Two." not in terminal.rows()[1]:  # its writer needs a moment to wake up
        pass
    assert terminal.rows()[-PANEL_ROWS + 1].startswith("generation 2 ")  # stale frames do not queue up
    show_in_time(console, terminal, 8)
    assert terminal.rows()[0].endswith("One.")
    console.close()


def show_in_time(console, terminal, generation):
    """Shows it again until the terminal has it, as what waits for a terminal is not shown."""
    deadline = time.monotonic() + DEADLINE_S
    while not terminal.rows()[-PANEL_ROWS + 1].startswith(f"generation {generation} "):
        assert time.monotonic() < deadline
        console.show(replace(VIEW, generation=generation))


def test_a_terminal_that_went_away_is_no_error():
    terminal = Terminal()
    console = PanelConsole(terminal.stream)
    console.show(VIEW)
    os.close(terminal.master)
    console.say("One.")
    console.show(replace(VIEW, generation=3))
    console.close()
    terminal.stream.close()
    console.say("Two.")


def test_the_panel_goes_when_the_job_goes_to_the_background(terminal, console, monkeypatch):
    console.show(VIEW)
    with monkeypatch.context() as patch:
        patch.setattr(os, "tcgetpgrp", lambda _fd: os.getpgrp() + 1)
        console.show(VIEW)
    assert not any(terminal.rows())
    console.show(VIEW)
    assert _is_panel(terminal.rows()[-PANEL_ROWS:])


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_respected(terminal, monkeypatch, no_color, coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    console = PanelConsole(terminal.stream)
    console.show(VIEW)
    console.close()
    assert bool(re.search(rb"\x1b\[(\d+;)*3[0-7]m", terminal.update())) is coloured
