"""A cluster to show: made values, for what a page looks like, in the place of a store."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.server import PageSource
from unicron_elastic.launcher.export.web.watcher import Body, body
from unicron_elastic.launcher.view.cluster.overview import (
    ClusterVerdict,
    CoordinatorLine,
    IncidentLine,
    JobLine,
    NodeLine,
    Overview,
    PlanLine,
)
from unicron_elastic.launcher.view.cluster.verdict import verdict_of

SECRET = "5e" * 32
TERA = 1e12
HOSTILE = (
    '<img src=x onerror="window.hacked=1">',
    '"><script>window.hacked=2</script>',
    "javascript:window.hacked=3",
    "</td></table><svg onload=window.hacked=4>",
    "\u202egnorw yaw eht\u0000\u0007\n\r\t{{7*7}}${window.hacked=5}",
    "&lt;b&gt; %s \\u003cscript\\u003e '; DROP TABLE jobs; --",
    "x" * 5000,
    "é字\ud83e\udd84\u0301" * 20,
)


def stamp(unix_s: float) -> str:
    """As incidents have it."""
    return datetime.fromtimestamp(unix_s, timezone.utc).isoformat(timespec="milliseconds")


def cluster(now_s: float) -> Overview:
    """chat on n1 to n3, code on n4 and n5 of three, n6 idle, n9 broken; three incidents, of which one is open."""
    hosts = {"n1": "chat", "n2": "chat", "n3": "chat", "n4": "code", "n5": "code", "n6": ""}
    nodes = [
        NodeLine(
            host=host, node_id=f"{host}/a", health="well", state="working" if job else "idle", job=job,
            rank=None if not job else index % 3,
        )
        for index, (host, job) in enumerate(hosts.items())
    ]  # fmt: skip
    nodes.append(NodeLine(host="login1", node_id="login1/c", health="well", state="", is_coordinator=True))
    kept_out = NodeLine(
        host="n9", node_id="", health="broken", state="absent", reason="GPU 3 fell off the bus (XID 79).",
        by="unicron-run", since_unix_s=now_s - 3000,
    )  # fmt: skip
    chat = JobLine(
        job="chat", run_id="chat@1", state="training", is_planned=True, has_run=True, generation=3, start=1, step=1842,
        steps_per_s=2.43, stepped_unix_s=now_s - 0.4, told_unix_s=now_s, weight=1.5, weighted_flops=12.7 * TERA,
        expected_flops=12.8 * TERA, of_expected=12.7 / 12.8, nodes=3, wanted_nodes=3, min_nodes=1, workers=24,
        restarts_used=1, max_restarts=100, hosts=("n1", "n2", "n3"),
    )  # fmt: skip
    code = replace(
        chat, job="code", run_id="code@2", start=2, generation=1, step=96_310, steps_per_s=0.71, weight=1.0, nodes=2,
        weighted_flops=3.4 * TERA, expected_flops=5.6 * TERA, of_expected=3.4 / 5.6, wanted_nodes=3, workers=16,
        restarts_used=0, is_incident_open=True, hosts=("n4", "n5"),
    )  # fmt: skip
    old = JobLine(job="eval", run_id="eval@1", state="finished", why="eval is finished.", is_planned=True, weight=0.5)
    killed = IncidentLine(
        run_id="chat@1", number=1, host="n2", time=stamp(now_s - 1500), rank=9, severity=2, status="killed by signal",
        method="process supervision", reason="rank 9 was killed by signal 9 (SIGKILL) after 1402 steps.",
        action="restart", decision="1 of 100 restarts used.", is_open=False, total_ms=3900.0, micro_batches_reused=14,
        micro_batches_recomputed=2,
        phases_ms=(("noticed", 4.0), ("stopped", 46.0), ("regrouped", 1150.0), ("first_step", 2700.0)),
    )  # fmt: skip
    lost = replace(
        killed, run_id="code@2", number=1, host="n4", time=stamp(now_s - 40), rank=None, severity=1, status="lost node",
        method="lost connection", reason="n9 is lost: its process has ended.", is_open=True, total_ms=None,
        phases_ms=(("noticed", 12.0), ("stopped", 310.0)), micro_batches_reused=None, micro_batches_recomputed=None,
    )  # fmt: skip
    plan = PlanLine(
        revision=13, made_unix_s=now_s - 600,
        reason="Job code lost a node; code keeps 2 of its 3 nodes, as none is idle that is well.",
        overtaken="", waf_flops=18.4 * TERA, achieved_waf_flops=16.1 * TERA, next_fault_s=2e6,
    )  # fmt: skip
    found = Overview(
        where="etcd1:2379", at_unix_s=now_s, verdict=ClusterVerdict(level="fine", reason=""), plan=plan,
        coordinator=CoordinatorLine(host="login1", node_id="login1/c", is_dedicated=True, since_unix_s=now_s - 7200),
        jobs=(chat, code, old), nodes=(*nodes, kept_out), incidents=(lost, killed),
    )  # fmt: skip
    return replace(found, verdict=verdict_of(found))


def waf(now_s: float, guessed_flops: float = 18.4 * TERA) -> dict[str, Any]:
    """The hour of that cluster; of its beginning nothing is known. ``guessed_flops``: what was promised at first."""
    points: list[list[float | None]] = []
    for number in range(720):
        at = now_s - 5.0 * (719 - number)
        plan = 18.4 * TERA if at < now_s - 40 or at > now_s - 35 else 16.0 * TERA
        achieved = plan * (0.97 + 0.015 * math.sin(number / 9))
        if now_s - 1500 < at < now_s - 1490:
            achieved = 5.6 * TERA
        if at > now_s - 40:
            achieved = 16.1 * TERA
        if number < 150:
            plan = guessed_flops
        points.append([at, None, None] if number < 120 else [at, plan, achieved])
    return {"span_s": 3600.0, "apart_s": 5.0, "points": points}


class Shown(PageSource):
    """Shows what a test sets."""

    def __init__(self) -> None:
        self.place = CoordinatorPlace(leads=True)
        self.overview = cluster(time.time())
        self.trouble = ""
        self.guessed_flops = 18.4 * TERA

    def secret(self) -> str:
        return SECRET

    def whereabouts(self) -> CoordinatorPlace:
        return self.place

    def state(self) -> Body:
        return body({"state": replace(self.overview, at_unix_s=time.time()).to_json(), "trouble": self.trouble})

    def waf(self, span: str) -> Body:
        assert span in ("hour", "day")
        return body(waf(time.time(), self.guessed_flops))


def hostile_cluster(now_s: float) -> Overview:
    """Every text of it is somebody's who wishes the page ill."""
    found = cluster(now_s)
    bad = HOSTILE
    jobs = [
        replace(found.jobs[0], job=text, run_id=text, state=text if index % 2 else "training", why=text, hosts=(text,))
        for index, text in enumerate(bad)
    ]
    nodes = [
        replace(found.nodes[0], host=f"{text}{kind}", node_id=text, health=kind, state=text, job=text, towards=text,
                label=text, reason=text, by=text)
        for text in bad for kind in ("well", "broken", text)
    ]  # fmt: skip
    incidents = [
        replace(found.incidents[1], run_id=text, number=index, host=text, time=text if index % 2 else stamp(now_s),
                status=text, method=text, reason=text, action=text, decision=text)
        for index, text in enumerate(bad)
    ]  # fmt: skip
    assert found.plan is not None
    assert found.coordinator is not None
    overview = replace(
        found, where=bad[0], plan=replace(found.plan, reason=bad[1], overtaken=bad[3]), jobs=tuple(jobs),
        nodes=tuple(nodes), coordinator=replace(found.coordinator, host=bad[1]), incidents=tuple(incidents), odd=bad,
    )  # fmt: skip
    return replace(overview, verdict=verdict_of(overview))
