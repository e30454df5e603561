"""Every metric that is served, defined once: name, kind, labels and meaning. docs/metrics.md has its table from here.

Names follow Prometheus: the prefix ``unicron_``, base units, units last, ``_total`` for counters. A job is known by the
label ``run_id``, which is its --rdzv-id, as ``job`` is Prometheus's own label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram", "info"]

JOB_PHASES = ("idle", "running", "stopping", "leaving", "finished")  # recovery.state.Phase
NODE_STATES = ("idle", "joining", "working", "leaving")  # planning.snapshot.NodeState
RECOVERY_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

OF_PROCESS = "Of every process"
OF_JOB = "Of a job, by each of its nodes"
OF_CLUSTER = "Of the cluster, by each of its agents and coordinators"
OF_PLAN = "Of the cluster, by the one that coordinates it"
_SECTIONS = (OF_PROCESS, OF_JOB, OF_CLUSTER, OF_PLAN)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``name`` is what an expression says, that of a histogram without ``_bucket``, ``_sum``, ``_count``.

    ``unit`` is set where the name ends with it.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    section: str

    @property
    def unit(self) -> str:
        """What OpenMetrics calls the unit; "" where the name has none."""
        return "seconds" if self.name.removesuffix("_total").endswith("_seconds") else ""

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        return (
            tuple(f"{self.name}{part}" for part in ("_bucket", "_sum", "_count")) if self.is_histogram else (self.name,)
        )

    @property
    def is_histogram(self) -> bool:
        """Whether its value is a distribution."""
        return self.kind == "histogram"


def _metric(kind: Kind, section: str, name: str, text: str, *labels: str) -> Metric:
    own = ("run_id",) if section is OF_JOB else ()
    return Metric(f"unicron_{name}", kind, text, (*own, *labels), section)


BUILD_INFO = _metric("info", OF_PROCESS, "build_info", "The version that runs.", "version")

JOB_INFO = _metric(
    "info", OF_JOB, "job_info", "The script or command of the job, and the node that tells it.", "script", "node"
)
JOB_START = _metric(
    "gauge", OF_JOB, "job_start_timestamp_seconds", "When unicron-run began on this node, in unix seconds."
)
JOB_PHASE = _metric(
    "gauge",
    OF_JOB,
    "job_phase",
    "1 for the phase of the job on this node, 0 for the others; idle is before and between generations.",
    "phase",
)
GENERATION = _metric("gauge", OF_JOB, "generation", "How often workers were started on this node, all together.")
RESTARTS_USED = _metric("gauge", OF_JOB, "restarts_used", "Restarts that count, as --max-restarts counts them.")
RESTARTS_LIMIT = _metric("gauge", OF_JOB, "restarts_limit", "--max-restarts.")
NODES = _metric("gauge", OF_JOB, "nodes", "Nodes that have met, as this node last saw it.")
WORLD_SIZE = _metric("gauge", OF_JOB, "world_size", "Ranks of those nodes.")
STEP = _metric(
    "gauge",
    OF_JOB,
    "step",
    "Optimizer steps of the worker of this node that has made most since its process began; a new one begins at 0.",
)
LAST_STEP = _metric(
    "gauge",
    OF_JOB,
    "last_step_timestamp_seconds",
    "When a worker of this node last ended an optimizer step, in unix seconds. It stays while workers restart.",
)
ITERATION_TIME = _metric(
    "gauge", OF_JOB, "iteration_time_seconds", "Seconds of the latest step, the median of this node's workers."
)
WORKER_UP = _metric(
    "gauge", OF_JOB, "worker_up", "1 for a worker of this node that runs, 0 for one that ended.", "rank"
)
WORKER_STEP = _metric("gauge", OF_JOB, "worker_step", "Optimizer steps of a worker since its process began.", "rank")
WORKER_ITERATION_TIME = _metric(
    "gauge", OF_JOB, "worker_iteration_time_seconds", "Seconds of the latest step of a worker.", "rank"
)
INCIDENT_OPEN = _metric("gauge", OF_JOB, "incident_open", "1 from a fault to the first step after it, else 0.")
INCIDENTS = _metric(
    "counter",
    OF_JOB,
    "incidents_total",
    "Incidents of this node by severity, 1 is worst, and status, as they were when it was decided what to do.",
    "severity",
    "status",
)
LOST_GPU_SECONDS = _metric(
    "counter",
    OF_JOB,
    "lost_gpu_seconds_total",
    "Seconds between a fault and the first step after it, times the workers of this node, by the phase that they were "
    "spent in. That step itself is in it, and what those who go on in place do for it.",
    "phase",
)
RECOVERY_TIME = _metric(
    "histogram", OF_JOB, "recovery_time_seconds", "Seconds from a fault to the end of the first step after it."
)
REUSED = _metric(
    "counter",
    OF_JOB,
    "reused_micro_batches_total",
    "Micro-batches of failed steps that members on this node had computed and did not compute again.",
)
RECOMPUTED = _metric(
    "counter",
    OF_JOB,
    "recomputed_micro_batches_total",
    "Micro-batches of failed steps that lost ranks of this node had computed, and that were computed again.",
)

NODE_STATE = _metric(
    "gauge",
    OF_CLUSTER,
    "node_state",
    "1 for what an agent does, 0 for the rest; not served by coordinators without a node.",
    "node",
    "state",
)
COORDINATES = _metric("gauge", OF_CLUSTER, "coordinates", "1 if this process coordinates the cluster, else 0.")
COORDINATOR_KNOWN = _metric(
    "gauge", OF_CLUSTER, "coordinator_known", "1 if this process knows who coordinates the cluster, else 0."
)
STORE_VISIBLE = _metric("gauge", OF_CLUSTER, "store_visible", "1 if this process can read the cluster's etcd, else 0.")
LOST_NODES = _metric(
    "counter",
    OF_CLUSTER,
    "lost_nodes_total",
    "Agents that this process, while it coordinated, removed from the cluster, as their process or host was gone.",
)

CLUSTER_NODES = _metric("gauge", OF_PLAN, "cluster_nodes", "Nodes of the cluster for which is planned.", "state")
QUARANTINED = _metric(
    "gauge", OF_PLAN, "node_quarantined", "1 for each node that is in the cluster's quarantine.", "node"
)
PLAN_TIMESTAMP = _metric("gauge", OF_PLAN, "plan_timestamp_seconds", "When the plan was made, in unix seconds.")
PLAN_WAF = _metric(
    "gauge", OF_PLAN, "plan_waf", "Weighted FLOP/s that all jobs are to achieve together, as the plan was made."
)
ACHIEVED_WAF = _metric(
    "gauge", OF_PLAN, "achieved_waf", "Weighted FLOP/s that all jobs achieve together, by their latest steps."
)
JOB_PLAN_WAF = _metric(
    "gauge", OF_PLAN, "job_plan_waf", "Weighted FLOP/s that a job is to achieve on the nodes that the plan gives it.",
    "run_id",
)  # fmt: skip
JOB_ACHIEVED_WAF = _metric(
    "gauge", OF_PLAN, "job_achieved_waf", "Weighted FLOP/s that a job achieves; 0 if nothing was heard of it for 30 s.",
    "run_id",
)  # fmt: skip
JOB_PLAN_NODES = _metric("gauge", OF_PLAN, "job_plan_nodes", "Nodes that the plan gives a job.", "run_id")
JOB_NODES = _metric(
    "gauge", OF_PLAN, "job_nodes", "Nodes of a job by what they do.", "run_id", "state"
)  # joining, working, leaving

METRICS = tuple(each for each in globals().values() if isinstance(each, Metric))


def reference() -> str:
    """All metrics as tables in Markdown, a section for each process that serves them."""
    return "\n".join(_section(name, [each for each in METRICS if each.section is name]) for name in _SECTIONS)


def _section(name: str, metrics: Sequence[Metric]) -> str:
    rows = [("metric", "type", "labels", "meaning"), ("---",) * 4, *map(_row, metrics)]
    return f"### {name}\n\n{_lines(rows)}"


def _row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"`{metric.name}`", metric.kind, labels, metric.help


def _lines(rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
