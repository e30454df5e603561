"""Histories from files: what is written is read again, and what is malformed is refused with file, line and reason."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unicron_elastic.faults import Status
from unicron_elastic.simulation.history.events import (
    Event,
    FaultStruck,
    History,
    JobArrives,
    JobEnds,
    NodeJoins,
    NodeLeaves,
)
from unicron_elastic.simulation.history.generate import generate
from unicron_elastic.simulation.history.replay import read_bamboo, read_csv, read_history, write_csv

HEAD = "# nodes: 4\n# duration_s: 100\nat_s,event,node,kind,repair_s,notice_s,job\n"
DOCS = Path(__file__).parent.parent.parent / "docs" / "simulation.md"


def written(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as raised:
        read_history(path)
    return str(raised.value)


def test_our_format_says_everything(tmp_path: Path) -> None:
    text = """# a comment
    # name: tuesday
    # source: the operators' notebook: page 7
    # nodes: 4
    # duration_s: 3600

    at_s, event, node, kind, repair_s, notice_s, job
    10.5,fault,1,ECC Error,86400,,
    20,fault,2,task hang,,,
    5,arrive,,,,,chat
    30,leave,0,,,120,
    31,leave,3
    40,JOIN,0,,,,
    50,end,,,,,"chat"
    """
    history = read_history(written(tmp_path, text))
    assert history == History(
        name="tuesday",
        duration_s=3600.0,
        nodes=4,
        source="the operators' notebook: page 7",
        events=(
            JobArrives(at_s=5.0, job="chat"),
            FaultStruck(at_s=10.5, node=1, kind=Status.ECC_ERROR, repair_s=86400.0),
            FaultStruck(at_s=20.0, node=2, kind=Status.TASK_HANG),
            NodeLeaves(at_s=30.0, node=0, notice_s=120.0),
            NodeLeaves(at_s=31.0, node=3),
            NodeJoins(at_s=40.0, node=0),
            JobEnds(at_s=50.0, job="chat"),
        ),
    )


def test_columns_may_be_left_out_and_be_in_any_order(tmp_path: Path) -> None:
    text = "\ufeff# nodes: 2\n# duration_s: 9\nevent,at_s,node\njoin,1,1\nleave,2,1\n"
    history = read_history(written(tmp_path, text))
    assert history.absent == frozenset({1})
    assert history.events == (NodeJoins(at_s=1.0, node=1), NodeLeaves(at_s=2.0, node=1))
    assert history.name == "trace"


def test_the_example_in_the_documentation_is_read(tmp_path: Path) -> None:
    (example_text,) = re.findall(r"```csv\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    history = read_history(written(tmp_path, example_text))
    assert len(history.events) >= 5


@pytest.mark.parametrize(
    ("rows", "line", "problem"),
    [
        ("x,fault,0,ECC error\n", 4, "at_s is 'x': it must be a number, at least 0"),
        ("1,fault,0,ECC error\n-1,fault,0,ECC error\n", 5, "at_s is '-1'"),
        ("nan,fault,0,ECC error\n", 4, "at_s is 'nan'"),
        ("1e999,fault,0,ECC error\n", 4, "at_s is '1e999'"),
        ("101,fault,0,ECC error\n", 4, "after the end of the history at 100 s"),
        ("\n\n1,explode,0\n", 6, "event is 'explode': it must be one of fault, join, leave, arrive, end"),
        ("1,fault,,ECC error\n", 4, "node is '': it must be a whole number"),
        ("1,fault,4,ECC error\n", 4, "node is 4: there are nodes 0 to 3"),
        ("1,fault,1.0,ECC error\n", 4, "node is '1.0'"),
        ("1,fault,٣,ECC error\n", 4, "node is '٣'"),
        ("1,fault,99999999999999999999999,ECC error\n", 4, "node is"),
        ("1,fault,0,ECC eror\n", 4, "kind is 'ECC eror': did you mean 'ECC error'?"),
        ("1,fault,0,zzzz\n", 4, "kind is 'zzzz': known are collective time-out"),
        ("1,fault,0,\n", 4, "kind is ''"),
        ("1,fault,0,ECC error,-5\n", 4, "repair_s is '-5'"),
        ("1,join,0,,60\n", 4, "repair_s is '60': a join has none"),
        ("1,fault,0,ECC error,,,chat\n", 4, "job is 'chat': a fault has none"),
        ("1,arrive,,,,,\n", 4, "no job is named"),
        ("1,end,3,,,,chat\n", 4, "node is '3': an end has none"),
        ("1,join,0\n2,join,0\n", 5, "node 0 joins, but it is there"),
        ("1,leave,0\n2,leave,0\n", 5, "node 0 leaves, but it is away"),
        ("5,leave,0\n5,join,0\n", 5, "node 0 joins, but it is there"),
        ("1,fault,0,ECC error,,,,,\n", 4, "9 cells, but the header has 7"),
        ('1,fault,0,"ECC error\n', 4, "not a line of CSV"),
        ("1,fault,0,ECC\0error\n", 4, "kind is"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path, rows: str, line: int, problem: str) -> None:
    path = written(tmp_path, HEAD + rows)
    said = refused(path)
    assert said.startswith(f"{path}:{line}: ")
    if "\0" not in rows:  # how the csv module names that differs between versions of Python
        assert problem in said


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "the file is empty"),
        ("\n \n", 1, "the file is empty"),
        ("# nodes: 4\n# duration_s: 9\n", 1, "there is no header"),
        ("at_s,event,node\n", 1, '"# nodes: N" and "# duration_s: SECONDS" are needed'),
        ("# nodes: 0\n", 1, "nodes is 0"),
        ("# nodes: 1e6\n", 1, "nodes is '1e6'"),
        ("# nodes: 999999999999\n", 1, "nodes is '999999999999': it must be a whole number from 0 to 1,000,000"),
        ("# ok\n# duration_s: soon\n", 2, "duration_s is 'soon'"),
        ("# duration_s: 0\n", 1, "duration_s is '0'"),
        ("# nodes: 4\nat_s,evnt,node\n", 2, "there is no column 'evnt': did you mean event?"),
        ("# nodes: 4\nat_s,event,zzzzzz\n", 2, "there is no column 'zzzzzz': known are at_s, event"),
        ("at_s,event,event\n", 1, "a column is named twice"),
        ("at_s,node\n", 1, "the header has no column event"),
        ("hello\n", 1, "neither a history (at_s,event,node,...), nor a spot trace"),
        (b"# nodes: 4\n\xff\xfe\n", 2, "not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n", 1, "not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_history_is_refused(tmp_path: Path, text: str | bytes, line: int, problem: str) -> None:
    path = written(tmp_path, text)
    said = refused(path)
    assert said.startswith(f"{path}:{line}: ")
    assert problem in said


def test_a_file_that_is_not_there_is_the_callers_to_tell(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read_history(tmp_path / "nowhere.csv")


BAMBOO = "0,add,node1\n0,add,node2\n1000,add,node3\n1500,remove,node1\n2500,add,node4\n3000,remove,node2\n"


def test_a_spot_trace_becomes_joins_and_leaves(tmp_path: Path) -> None:
    path = written(tmp_path, BAMBOO, "p3.csv")
    history = read_history(path)
    assert (history.name, history.nodes, history.duration_s, history.absent) == ("p3", 3, 3.0, frozenset({2}))
    assert history.events == (
        NodeJoins(at_s=1.0, node=2),
        NodeLeaves(at_s=1.5, node=0),
        NodeJoins(at_s=2.5, node=0),  # node4 takes the number that is free
        NodeLeaves(at_s=3.0, node=1),
    )
    leaves = [event for event in read_bamboo(path, notice_s=120.0).events if isinstance(event, NodeLeaves)]
    assert [event.notice_s for event in leaves] == [120.0, 120.0]


def test_a_machine_that_comes_as_another_goes_does_not_take_its_number(tmp_path: Path) -> None:
    text = "0,add,a\n0,add,b\n0,remove,b\n1000,remove,a\n1000,add,c\n1000,remove,c\n1000,add,d\n2000,add,e\n"
    history = read_history(written(tmp_path, text))
    assert history.absent == frozenset({1, 2})
    assert history.nodes == 3
    joins = [(event.at_s, event.node) for event in history.events if isinstance(event, NodeJoins)]
    assert joins == [(1.0, 1), (1.0, 2), (2.0, 0)]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("0,add,a\n1,grow,b\n", 2, "'1,grow,b' is not milliseconds,add|remove,node"),
        ("0,add,a\n-1,add,b\n", 2, "is not milliseconds"),
        ("0,add,a\n1,add\n", 2, "is not milliseconds"),
        ("5,add,a\n4,add,b\n", 2, "4 ms comes after 5 ms"),
        ("0,add,a\n1,add,a\n", 2, "a is added, but it is there"),
        ("0,add,a\n1,remove,b\n", 2, "b is removed, but it is not there"),
        ("0,add,a\n99999999999999999999,add,b\n", 2, "milliseconds is"),
        ("0,add,a\n", 1, "nothing happens after 0 ms"),
    ],
)
def test_a_malformed_spot_trace_is_refused_with_its_line(tmp_path: Path, text: str, line: int, problem: str) -> None:
    path = written(tmp_path, text)
    said = refused(path)
    assert said.startswith(f"{path}:{line}: ")
    assert problem in said


moments = st.floats(0, 1000, allow_subnormal=False)
names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=12)
loose = st.one_of(
    st.builds(
        FaultStruck,
        at_s=moments,
        node=st.integers(0, 7),
        kind=st.sampled_from(Status),
        repair_s=st.none() | st.floats(0, 1e6),
    ),
    st.builds(JobArrives, at_s=moments, job=names),
    st.builds(JobEnds, at_s=moments, job=names),
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    events: list[Event] = draw(st.lists(loose, max_size=12))
    absent = set()
    for node in range(8):
        times = sorted(draw(st.sets(moments, max_size=4)))
        comes = draw(st.booleans()) and bool(times)
        if comes:
            absent.add(node)
        for at_s in times:
            leaves = NodeLeaves(at_s=at_s, node=node, notice_s=draw(st.floats(0, 600)))
            events.append(NodeJoins(at_s=at_s, node=node) if comes else leaves)
            comes = not comes
    return History.of(
        events, name=draw(names), duration_s=1000.0, nodes=8, source=draw(names), absent=frozenset(absent)
    )


@settings(max_examples=50, deadline=None)
@given(history=histories())
def test_what_is_written_is_read_again(history: History) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert read_csv(written(Path(folder), write_csv(history))) == history


def test_a_generated_history_is_read_again(tmp_path: Path) -> None:
    history = generate("trace-a", 0)
    assert read_history(written(tmp_path, write_csv(history))) == history


WORDS = st.sampled_from(
    [
        *("# nodes: 4", "# duration_s: 100", "at_s,event,node,kind", "1,fault,0,ECC error", "2,join,1", "0,add,a"),
        *("5,add,b", "9,remove,a", '{"run_id": "x"}', "{}", "1,leave,1", ",,,,", '"', "\0", "\x1c", "\x85", "# nodes:"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(text=st.binary(max_size=200) | st.lists(WORDS | st.text(max_size=20), max_size=8).map("\n".join))
@example(text="[" * 100_000)
@example(text="{" + '"a":[' * 50_000)
@example(text="# nodes: 1\n# duration_s: 1\nat_s,event\n1," + "x" * 200_000)
def test_nothing_breaks_the_readers(text: str | bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        path = written(Path(folder), raw)
        try:
            read_history(path)
        except ValueError as error:
            said = str(error)
            assert re.match(rf"{re.escape(str(path))}:\d+: \S", said), said
