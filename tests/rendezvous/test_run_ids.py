"""What a run and a node are called is looked at where it enters: one sentence says what would be right."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from unicron_elastic.base.node_name import node_name
from unicron_elastic.compat.workers import DefaultLogsSpecs, folder_name, keep_in_log_folder
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.rendezvous.records.plan import spec_text
from unicron_elastic.rendezvous.records.plan_keys import check_run_id, run_of_start, start_of_run
from unicron_elastic.rendezvous.torch.create_handler import create_handler


@pytest.mark.parametrize("run_id", ["job1", "none", "a/b", "../x", "a b", "job@", "@17x", "job1@0", "job@017", "日本"])
def test_ids_that_the_store_can_keep(run_id: str) -> None:
    check_run_id(run_id)
    assert start_of_run(run_id) == (run_id, 0)


@pytest.mark.parametrize("run_id", ["job1@17", "@1", "x" * 5000, "日" * 100, "\udc80", "a\nb", ""])
def test_others_are_refused_before_anything_is_opened(run_id: str) -> None:
    if run_id:
        parameters = RendezvousParameters("unicron", "localhost:1", run_id, 1, 1)
        with pytest.raises(ValueError, match=r"^--rdzv-id: .* give ") as raised:
            create_handler(parameters)
    else:
        with pytest.raises(ValueError, match=r"^--rdzv-id: .* give ") as raised:
            check_run_id(run_id)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300


def test_no_planned_job_is_called_as_the_start_of_another() -> None:
    with pytest.raises(ValueError, match="@ and a number"):
        spec_text(JobSpec(name=run_of_start("job1", 17), command=("train.py",), directory="/"))


@pytest.mark.parametrize("name", ["x" * 5000, "a\n[unicron] 12:00:00 forged", "\x1b[2J", "\udc80", "日" * 100])
def test_a_node_name_that_cannot_be_shown_or_kept_is_refused(name: str) -> None:
    for given, environ, what in ((name, {}, "--name"), ("", {"UNICRON_NODE_NAME": name}, "UNICRON_NODE_NAME")):
        with pytest.raises(ValueError, match=f"^{what}: .* give ") as raised:
            node_name(given, environ)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 300


@pytest.mark.parametrize("label", ["x" * 5000, "a\n[unicron] 12:00:00 forged", "\x1b[2J"])
def test_a_label_that_cannot_be_shown_or_kept_is_refused(label: str) -> None:
    parameters = RendezvousParameters("unicron", "localhost:1", "job", 1, 1, label=label)
    with pytest.raises(ValueError, match=r"^--rdzv-conf label: .* give ") as raised:
        create_handler(parameters)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 300


def test_a_node_goes_by_what_was_given_else_by_its_variable_else_by_its_host() -> None:
    assert node_name("a", {"UNICRON_NODE_NAME": "b"}) == "a"
    assert node_name("", {"UNICRON_NODE_NAME": " b "}) == "b"
    assert node_name("", {}) == socket.gethostname()


@pytest.mark.parametrize("run_id", ["a/b", "../x", "../../tmp/x", "/etc/x", "..", ".", "x" * 400, "日" * 200, "job@1"])
def test_logs_stay_in_their_folder_whatever_a_run_is_called(run_id: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    specs = DefaultLogsSpecs(log_dir=str(logs))
    keep_in_log_folder(specs)
    envs = {0: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"}}
    found = specs.reify(envs)
    (folder,) = logs.iterdir()
    assert found.error_files[0] == str(folder / "attempt_0" / "0" / "error.json")
    assert list(tmp_path.iterdir()) == [logs]
    assert envs[0]["TORCHELASTIC_RUN_ID"] == run_id  # which the worker gets as it is


@pytest.mark.parametrize("run_id", ["job1", "none", "a b", "job@1", "..", "a\nb", "\udc80"])
def test_folders_are_called_as_under_torchrun_where_it_has_any(run_id: str) -> None:
    assert folder_name(run_id) == run_id
