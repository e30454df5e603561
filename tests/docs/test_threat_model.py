"""The threat model names all that listens, all that unpickles, and the bounds as they are."""

from __future__ import annotations

import re

from doc_pages import REPOSITORY, Page

from unicron_elastic.launcher.config import forwarded as lending
from unicron_elastic.launcher.export.metrics import server as metrics_server
from unicron_elastic.launcher.node import output_receiver
from unicron_elastic.rendezvous.cluster import heartbeat_wire, links
from unicron_elastic.rendezvous.records import cluster as cluster_records
from unicron_elastic.state.pull import server, wire
from unicron_elastic.worker import channel

PAGE = Page("docs/security.md").text
FILES = [
    path for folder in ("launcher", "rendezvous", "unicron_elastic") for path in (REPOSITORY / folder).rglob("*.py")
]
SOURCES = {str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8") for path in FILES}

# Who opens a listening socket, and what of "What listens" it is.
LISTENERS = {
    "rendezvous/cluster/heartbeat_wire.py": "heartbeats",
    "launcher/node/output_receiver.py": "output of a submitted job",
    "rendezvous/cluster/links.py": "heartbeats",
    "unicron_elastic/state/pull/server.py": "state for newcomers",
    "launcher/agent/held/meeting_place.py": "a warm process held for the next launch, if asked for",
    "launcher/export/metrics/server.py": "metrics, if asked for",
    "launcher/export/web/server.py": "the web page, if asked for",
    "rendezvous/job/bound_store.py": "stores of rounds and worlds",
    "rendezvous/job/rounds.py": "stores of rounds and worlds",
    "unicron_elastic/training/group/meeting.py": "stores of rounds and worlds",  # a client of them
}


def test_all_that_listens_is_on_the_page() -> None:
    pattern = r"create_server\(|BoundedServer\)|TCPStore\(|(?<![.\w])listen\(|_listener\.listen\(|_unix\.listen\("
    found = {path for path, text in SOURCES.items() if re.search(pattern, text)}
    assert found == set(LISTENERS), "look at docs/security.md, What listens"
    assert [what for what in LISTENERS.values() if f"| {what}" not in PAGE] == []


def test_what_unpickles_is_on_the_page() -> None:
    pattern = r"\bpickle\.|torch\.load\(|_object\(\w|_object_list\("
    of_plan = "planning/allocate/plan"
    ours = r"(?:def |self\._engine\.|self\._run\.|run\.)broadcast_object\("  # of a run: it packs, and pickles nothing
    texts = {path: re.sub(ours, "", text) for path, text in SOURCES.items()}
    found = {path for path, text in texts.items() if re.search(pattern, text) and of_plan not in path}
    assert found == {
        "unicron_elastic/compat/loaded.py",  # of what torch has pickled in the same process
        "unicron_elastic/compat/meeting_state.py",  # by an unpickler that finds six names
        "unicron_elastic/worker/rank_monitor/measured.py",
        "unicron_elastic/megatron/checkpoint.py",
        *(path for path in found if "ctypes.py_object(" in SOURCES[path]),
    }
    for word in ("all_gather_object", "broadcast_object_list", "a pickle of ours"):
        assert word in PAGE


def test_bounds_are_those_of_the_code() -> None:
    assert (heartbeat_wire.LINE_BYTES_MAX, wire.FRAME_BYTES_MAX) == (16 * 1024, 16 * 1024)
    assert output_receiver.FRAME_BYTES_MAX == 64 * 1024
    assert (links.LinkLimits().greeting_s, server.GREETING_S, server.CONNECTIONS_MAX) == (2.0, 5.0, 64)
    assert (channel.BODY_BYTES_MAX, channel.FDS_MAX) == (16 * 1024 * 1024, 16)
    assert (metrics_server.REQUESTS_MOST, metrics_server.REQUEST_S) == (8, 5.0)
    assert cluster_records.SPEC_MAX_BYTES == 256 * 1024


def test_what_keeps_secrets_out_of_etcd_is_as_told() -> None:
    secret = {f"UNICRON_{word}": "x" for word in ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")}
    assert lending.environment({**secret, "UNICRON_ETCD_PASSWORD": "x", "NCCL_DEBUG": "INFO"}) == {"NCCL_DEBUG": "INFO"}
    assert lending.environment({"UNICRON_SPEC_ENV": "MY_TOKEN", "MY_TOKEN": "x"})["MY_TOKEN"] == "x"
    for word in ("`TOKEN`", "`SECRET`", "`PASSWORD`", "`CREDENTIAL`", "`API_KEY`", "`UNICRON_SPEC_ENV`"):
        assert word in PAGE
