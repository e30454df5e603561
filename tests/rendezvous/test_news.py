"""What jobs and nodes tell for people: read with bounds, merged, and gone by itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from unicron_elastic.base.incident import Incident
from unicron_elastic.rendezvous.records.news import (
    INCIDENTS_FOR_S,
    INCIDENTS_MOST,
    JOB_NEWS_FOR_S,
    JobNews,
    incidents_key,
    incidents_text,
    job_news_key,
    job_news_text,
    parse_incidents,
    parse_job_news,
    run_of_news,
    with_incident,
)
from unicron_elastic.rendezvous.records.news_writer import NewsWriter
from unicron_elastic.rendezvous.store.interface import Entry, StoreError
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

NEWS = JobNews(
    at_unix_s=1.8e9,
    step=120,
    step_s=0.4,
    stepped_unix_s=1.8e9 - 0.2,
    world=3,
    nodes=2,
    workers=16,
    restarts_used=1,
    max_restarts=100,
    is_incident_open=True,
)
INCIDENT = Incident(
    number=1,
    run_id="chat",
    job="train.py",
    host="gpu/7",
    time="2027-01-15T07:58:20.120+00:00",
    generation=1,
    rank=None,
    status="lost connection",
    severity=1,
    method="node health",
    reason="gpu/8 is lost.",
    action="go on",
    decision="",
    restarts_used=0,
    max_restarts=3,
    occurred_at=1.0,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _entry(key: str, value: object) -> Entry:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Entry(key=key, value=text, revision=1, created=1, lease_id=None)


def test_news_come_back_as_they_were_told():
    for news in (NEWS, replace(NEWS, step=None, step_s=None, stepped_unix_s=None, is_incident_open=False)):
        assert parse_job_news(_entry("news/jobs/chat", job_news_text(news))) == news
    assert run_of_news(job_news_key("a/b c")) == "a/b c"


@pytest.mark.parametrize("name", ["at_unix_s", "step", "step_s", "nodes", "restarts_used"])
@pytest.mark.parametrize("value", [-1, True, "1", [], 1e300])
def test_news_that_no_job_tells_are_refused(name, value):
    told = {**json.loads(job_news_text(NEWS)), name: value}
    with pytest.raises(ValueError, match="news/jobs/chat holds no news of a job"):
        parse_job_news(_entry("news/jobs/chat", told))


def test_incidents_come_back_without_what_is_long():
    long = replace(INCIDENT, stack="x" * 100_000, message="y" * 100_000, reason="z" * 100_000, consequences=("c",) * 99)
    text = incidents_text([long])
    assert len(text) < 4_000
    found = parse_incidents(_entry(incidents_key(long.host), text))
    assert [(each.host, each.rank, each.stack, each.consequences) for each in found] == [("gpu/7", None, None, ())]
    assert found[0].reason.startswith("zzz")
    assert parse_incidents(_entry(incidents_key("gpu/7"), incidents_text([INCIDENT]))) == (INCIDENT,)


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"[]",
        {},
        {"incidents": {}},
        {"incidents": [1]},
        {"incidents": [{}]},
        b'{"incidents": [{"occurred_at": NaN}]}',
    ],
)
def test_incidents_that_no_node_tells_are_refused(told):
    with pytest.raises(ValueError, match="news/incidents/a holds no"):
        parse_incidents(_entry("news/incidents/a", told))


@pytest.mark.parametrize("name", ["number", "occurred_at", "state_s"])
def test_an_incident_with_more_than_a_float_holds_is_refused(name):
    told = json.loads(incidents_text([INCIDENT]))
    told["incidents"][0][name] = 10**400
    with pytest.raises(ValueError, match=f"holds no incidents: not an incident record: {name} must be "):
        parse_incidents(_entry(incidents_key(INCIDENT.host), told))


def test_a_node_speaks_for_itself_alone():
    assert parse_incidents(_entry(incidents_key("other"), incidents_text([INCIDENT]))) == ()


def test_the_last_incidents_are_kept_and_one_that_grows_is_one():
    known: tuple[Incident, ...] = ()
    for number in range(20):
        known = with_incident(known, replace(INCIDENT, number=number))
    known = with_incident(known, replace(INCIDENT, number=18, first_step_at=3.0))
    assert [each.number for each in known] == [12, 13, 14, 15, 16, 17, 19, 18]
    assert len(known) == INCIDENTS_MOST
    assert known[-1].first_step_at == 3.0


def test_news_of_a_job_go_when_nobody_tells_any():
    clock = Clock()
    store = MemoryStore(MemoryServer(clock))
    writer = NewsWriter(lambda: store, "chat")
    for _ in range(3):
        assert writer.tell_job(NEWS)
        clock.now += JOB_NEWS_FOR_S - 5.0
    assert store.read(job_news_key("chat")).entry is not None
    clock.now += 10.0
    assert store.read(job_news_key("chat")).entry is None
    assert writer.tell_job(NEWS)  # with a new lease
    assert store.read(job_news_key("chat")).entry is not None


def test_jobs_on_one_node_add_to_one_list_that_lasts_a_day_from_the_last():
    clock = Clock()
    store = MemoryStore(MemoryServer(clock))
    for run in ("chat", "code"):
        assert NewsWriter(lambda: store, run).tell_incident(replace(INCIDENT, run_id=run))
        clock.now += INCIDENTS_FOR_S - 10.0
    entry = store.read(incidents_key("gpu/7")).entry
    assert entry is not None
    assert [each.run_id for each in parse_incidents(entry)] == ["chat", "code"]
    clock.now += 20.0
    assert store.read(incidents_key("gpu/7")).entry is None


def test_what_nobody_can_read_is_replaced():
    store = MemoryStore(MemoryServer(Clock()))
    store.put(incidents_key("gpu/7"), b"nonsense")
    assert NewsWriter(lambda: store, "chat").tell_incident(INCIDENT)
    entry = store.read(incidents_key("gpu/7")).entry
    assert entry is not None
    assert parse_incidents(entry) == (INCIDENT,)


def test_a_store_that_is_away_is_no_reason_to_stop(monkeypatch):
    store = MemoryStore(MemoryServer(Clock()))

    def away(*_args: object, **_options: object) -> None:
        raise StoreError("away")

    monkeypatch.setattr(store, "read", away)
    monkeypatch.setattr(store, "put", away)
    writer = NewsWriter(lambda: store, "chat")
    assert not writer.tell_job(NEWS)
    assert not writer.tell_incident(INCIDENT)
    assert not NewsWriter(lambda: None, "chat").tell_job(NEWS)
