#!/usr/bin/env python3
"""Makes events of what Slurm says of nodes: one that is to be drained, or is down, leaves the training jobs.

    slurm_events.py --job 4711       # beside a job, in its batch script: the nodes of that job
    slurm_events.py --node n1        # ... of one node
    slurm_events.py                  # for a whole cluster (unicron agent on its nodes), from anywhere

It compares the states of ``scontrol show node`` with the quarantine of ``unicron nodes``, and makes the second follow
the first with ``unicron drain`` and ``unicron undrain``. It remembers nothing, and may be killed and started at will.
It lifts only what it has put there, which it knows by the words "Slurm:". With ``--job``, a node that Slurm drains and
that has left the training is given back, so that Slurm need not wait for the end of the job; the batch script's node is
not.

etcd is found as by ``unicron nodes``: UNICRON_ETCD_ENDPOINT. It needs Python 3.10 and the two programs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

OURS = "Slurm:"  # how the reasons begin that this program gives
TIMEOUT_S = 30.0  # for one command

# From scontrol(1), NODE STATES; a state is one word with flags behind it, such as ALLOCATED+DRAIN or DOWN*.
_OUT = frozenset({"DOWN", "ERROR", "DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "POWER_DOWN", "POWERING_DOWN"})
_LOST = frozenset({"DOWN", "ERROR", "POWER_DOWN", "POWERING_DOWN"})
_REASON = re.compile(r"\bReason=(.*?)(?= [A-Z][A-Za-z]*=|$)")


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node as Slurm sees it; ``flags``: the words of its state; ``reason``: with its author and time, or ""."""

    name: str
    flags: frozenset[str]
    reason: str

    @property
    def is_out(self) -> bool:
        """Whether no job is to be there."""
        return bool(self.flags & _OUT)


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as the training cluster sees it; ``kept_out``: why it is in quarantine, or ""."""

    name: str
    has_agent: bool
    kept_out: str


@dataclass(frozen=True, slots=True)
class Drain:
    """The node is to leave its jobs, and to stay out."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """The node may be used again."""

    node: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Slurm need not wait for the job any longer on this node."""

    node: str


Action = Drain | Undrain | GiveBack


def parse_nodes(text: str) -> list[SlurmNode]:
    """The nodes in what ``scontrol --oneliner show node`` prints."""
    found = []
    for line in text.splitlines():
        told = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if "NodeName" not in told or "State" not in told:
            continue
        flags = frozenset(word.rstrip("*~#!%$@^-") for word in told["State"].split("+"))
        reason = _REASON.search(line)
        found.append(SlurmNode(told["NodeName"], flags, reason.group(1).strip() if reason else ""))
    return found


def parse_cluster(text: str) -> list[ClusterNode]:
    """The nodes in what ``unicron nodes --json`` prints. Raises ValueError for anything else."""
    found: dict[str, ClusterNode] = {}
    try:
        for told in json.loads(text):
            before = found.get(told["host"])
            has_agent = bool(told["node_id"]) or (before is not None and before.has_agent)
            kept_out = told["quarantine"]["reason"] if told["quarantine"] else ""
            found[told["host"]] = ClusterNode(told["host"], has_agent, kept_out)
    except (TypeError, KeyError) as error:
        raise ValueError(f"unicron nodes --json does not say what it should: {error!r}") from None
    return list(found.values())


def decide(slurm: Iterable[SlurmNode], cluster: Iterable[ClusterNode], job_nodes: Sequence[str] = ()) -> list[Action]:
    """What is to be done so that the cluster agrees with Slurm.

    ``job_nodes``: the nodes that a job of Slurm has now, the batch script's first; of those a node may be given back.
    """
    known = {node.name: node for node in cluster}
    actions: list[Action] = []
    for node in slurm:
        seen = known.get(node.name, ClusterNode(node.name, False, ""))
        if not node.is_out:
            if seen.kept_out.startswith(OURS):
                actions.append(Undrain(node.name))
        elif not seen.kept_out:
            state = "+".join(sorted(node.flags & _OUT))
            actions.append(Drain(node.name, f"{OURS} {node.reason or 'no reason is given'} ({state})"))
        elif not seen.has_agent and node.name in job_nodes[1:] and not node.flags & _LOST:
            actions.append(GiveBack(node.name))
    return actions


class CommandError(Exception):
    """A command did not do what it should; the text is one sentence."""


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{' '.join(words[:3])} cannot be run: {error}") from None
    if done.returncode != 0 and not (words[:2] == ("unicron", "nodes") and done.stdout):  # which has found no node
        why = (done.stderr.strip() or done.stdout.strip() or "it says nothing").splitlines()[-1]
        raise CommandError(f"{' '.join(words[:3])} ended with exit code {done.returncode}: {why}")
    return done.stdout


def _job_nodes(job: str) -> list[str]:
    told = dict(word.partition("=")[::2] for word in _run("scontrol", "--oneliner", "show", "job", job).split())
    names = _run("scontrol", "show", "hostnames", told.get("NodeList", "")).split()
    first = told.get("BatchHost", "")
    return sorted(names, key=lambda name: name != first)


def _look(nodes: Sequence[str], job: str) -> list[Action]:
    words = [",".join(nodes)] if nodes else []
    slurm = parse_nodes(_run("scontrol", "--oneliner", "show", "node", *words))
    return decide(slurm, parse_cluster(_run("unicron", "nodes", "--json")), _job_nodes(job) if job else ())


def _act(action: Action, job: str) -> str:
    """Does it, and says what was done."""
    match action:
        case Drain(node, reason):
            return _run("unicron", "drain", node, "--absent", "--reason", reason)
        case Undrain(node):
            return _run("unicron", "undrain", node)
        case GiveBack(node):
            rest = ",".join(each for each in _job_nodes(job) if each != node)
            _run("scontrol", "update", f"JobId={job}", f"NodeList={rest}")
            return f"node {node} has left job {job} and is given back to Slurm."


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Looks again and again; what goes wrong is said once, and tried again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", default="", metavar="ID", help="the nodes of this job of Slurm")
    which.add_argument("--node", default="", metavar="NAME", help="this node; else all that Slurm has")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between looks (default: 5)")
    parser.add_argument("--once", action="store_true", help="look once; exit code 1 if that goes wrong")
    given = parser.parse_args(arguments)
    if not 0.1 <= given.every <= 3600:
        parser.error(f"--every takes 0.1 to 3600 seconds, not {given.every:g}")
    if not environ.get("UNICRON_ETCD_ENDPOINT") and not environ.get("PET_RDZV_ENDPOINT"):
        parser.error("UNICRON_ETCD_ENDPOINT is to name the cluster's etcd, as in host:2379")
    nodes = [given.node] if given.node else []
    trouble = ""
    while True:
        try:
            if given.job and not nodes:
                nodes = _job_nodes(given.job)  # also those that it has lost meanwhile
            for action in _look(nodes, given.job):
                print(f"[slurm] {_act(action, given.job).strip()}", flush=True)
            trouble = ""
        except (CommandError, ValueError) as error:
            if str(error) != trouble:
                trouble = str(error)
                print(f"[slurm] {trouble}", file=sys.stderr, flush=True)
        if given.once:
            return 1 if trouble else 0
        time.sleep(given.every)


if __name__ == "__main__":
    sys.exit(main())
