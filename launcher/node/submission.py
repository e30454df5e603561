"""``unicron-run --cluster``: the job runs on the cluster's nodes, and looks as if it ran here.

Its output comes here, its exit code is this command's, and Ctrl-C stops it as it would here. With ``--detach`` it goes
on by itself. This process may be lost without harm to the job: `unicron cancel` ends it then.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.output import stamped
from unicron_elastic.launcher.config.checks import STDIN
from unicron_elastic.launcher.config.forwarded import (
    OF_SUBMISSION,
    SPEC_VARIABLE,
    environment,
    left_behind,
    sets_threads,
)
from unicron_elastic.launcher.config.options import UNNAMED
from unicron_elastic.launcher.node.output_receiver import OutputReceiver
from unicron_elastic.launcher.node.planned import decided_elsewhere, parsed, shared_options
from unicron_elastic.launcher.node.planned_records import ENDED_FOR_S, phase_of, puts_of_end
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import JobSpec, parse_job
from unicron_elastic.rendezvous.records.cluster import SECRET
from unicron_elastic.rendezvous.records.plan import PhaseRecord, parse_spec, phase_text, spec_text
from unicron_elastic.rendezvous.records.plan_keys import CURRENT, PlannedJobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import (
    MAX_OPERATIONS,
    Change,
    Entry,
    LeaseGoneError,
    Put,
    Snapshot,
    Store,
    StoreError,
    StoreReplacedError,
)
from unicron_elastic.rendezvous.store.open import store_opener
from unicron_elastic.rendezvous.store.options import address_from_options
from unicron_elastic.rendezvous.store.own_address import own_address
from unicron_elastic.rendezvous.store.session import SAY_AGAIN_S, Presence

FAILED = 1
LEASE_TTL_S = 5.0
CONNECT_TIMEOUT_S = 10.0
LOOK_S = 1.0
DRAIN_S = 10.0  # for the last of the output
STOP_S = 120.0  # for the nodes to stop the job after Ctrl-C
_SAME_SPEED = ("command", "directory", "nproc_per_node", "unit_nodes", "max_nodes", "throughput")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MOST_DELETES = MAX_OPERATIONS - 10  # in one commit, beside what it writes
SOURCE_CHARACTERS = 1_000_000  # of a script that are looked at
NAME_BYTES = 300  # as it stands in the store's keys


class CannotSubmit(Exception):
    """The text says what is wrong, as one sentence without a full stop."""


def spec_of(
    args: argparse.Namespace,
    argv: Sequence[str],
    *,
    weight: str,
    spec_file: str,
    environ: Mapping[str, str] = os.environ,
) -> JobSpec:
    """The job that a command line describes, with what ``spec_file`` adds. Raises CannotSubmit."""
    low, _, high = str(args.nnodes).partition(":")
    told: dict[str, Any] = {"min_nodes": int(low), "max_nodes": int(high or low)}
    if not args.nproc_per_node.strip().isdecimal():
        raise CannotSubmit(
            f"--nproc-per-node: {args.nproc_per_node!r} is not possible with --cluster; it takes the number of workers "
            "on each node, which may be another one here"
        )
    if args.training_script == STDIN and not (args.no_python or args.module):
        raise CannotSubmit("the script '-' is standard input, which a job of a cluster does not have; give a file")
    name = args.rdzv_id if args.rdzv_id != UNNAMED else f"{_stem(args.training_script)}-{secrets.token_hex(2)}"
    told |= {
        "name": name,
        "env": environment(environ),
        "nproc_per_node": int(args.nproc_per_node),
    }
    try:
        told["directory"] = os.getcwd()
        _, options, script = parsed(("unicron-run", *argv), environ)
        if option := decided_elsewhere(options):
            raise ValueError(
                f"{option} and --cluster exclude each other: where the nodes of the job meet, and which they are, the "
                "cluster decides"
            )
        told["command"] = ["unicron-run", *shared_options(options), *script]
        from_file = _from_file(spec_file)
        if isinstance(more := from_file.get("env"), dict):
            from_file["env"] = {**told["env"], **more}
        told |= from_file
        if weight:
            told["weight"] = _number(weight)
        spec = parse_job(told)
        _check_name(spec.name)
        parsed(spec.command, {**environ, **spec.env})
        spec_text(spec)
    except (ValueError, OSError) as error:
        raise CannotSubmit(str(error)) from None
    return spec


def not_taken(args: argparse.Namespace, spec: JobSpec, environ: Mapping[str, str] = os.environ) -> str:
    """Say which variables the script names that are set here, and that the nodes do not get; "" for none."""
    try:
        with open(args.training_script, encoding="utf-8", errors="replace") as file:
            source = file.read(SOURCE_CHARACTERS)
    except (OSError, ValueError):  # a module, say
        return ""
    names = left_behind(environ, spec.env, source)
    if not names:
        return ""
    script, is_one = os.path.basename(args.training_script), len(names) == 1
    are, them = ("is", "it") if is_one else ("are", "them")
    sent = f"but {are} not sent to the nodes; {SPEC_VARIABLE} takes the names of what is to be"
    return f"{', '.join(names)} {are} set here, and {script} names {them}, {sent}"


def threads_told(nproc_per_node: str, spec: JobSpec) -> str:
    """Say once, for all nodes, what torchrun says on each: how many threads a process has; "" where it says nothing."""
    if "OMP_NUM_THREADS" in spec.env or not sets_threads(nproc_per_node):
        return ""
    return (
        "OMP_NUM_THREADS is not set: each process of the job gets 1, as torchrun gives it, unless its node says "
        "otherwise; another number may suit it better"
    )


def submit(spec: JobSpec, cluster: str, *, detach: bool) -> int:
    """Runs the job on the cluster whose etcd is at ``cluster``; the exit code. Raises CannotSubmit."""
    try:
        where = address_from_options(cluster, {})
        opener = store_opener(where, timeout_s=CONNECT_TIMEOUT_S)
    except (ValueError, ImportError) as error:
        raise CannotSubmit(f"--cluster: {error}") from None
    try:
        with opener() as store:
            if detach:
                _write(store, spec, None)
                _say(f"The job {spec.name} is submitted; `unicron jobs` shows it and `unicron cancel` ends it.")
                return 0
            return _Attached(store, opener, where, spec).run()
    except (StoreError, LeaseGoneError, OSError) as error:
        raise CannotSubmit(f"the job cannot be submitted: {error}") from None


class _Mirror:
    """The job's keys."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.odd: dict[str, str] = {}
        self.entries = {entry.key: entry for entry in snapshot.entries}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.entry is None:
                self.entries.pop(change.key, None)
            else:
                self.entries[change.key] = change.entry

    def get(self, key: str) -> Entry | None:
        return self.entries.get(key)


class _Attached:
    """One job and this terminal, until the job is over."""

    def __init__(self, store: Store, open_store: Callable[[], Store], where: StoreAddress, spec: JobSpec) -> None:
        self._store = store
        self._open_store = open_store
        self._where = where
        self._spec = spec
        self._keys = PlannedJobKeys(spec.name)
        self._stop_signal = 0
        self._stops = 0
        self._said = {_submitted(spec)}
        self._woken = threading.Event()
        self._receivers: list[tuple[str, OutputReceiver]] = []  # by the cluster's secret; the last one is in use
        self._is_blind = False  # since the store was last asked whether it is the same
        self._has_lost_data = False  # the store, and the job is not seen there yet
        self._lost_data_at = 0.0

    def run(self) -> int:
        """Raises StoreError, OSError and CannotSubmit while nothing has begun."""
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's SIGHUP
        before = {number: signal.signal(number, self._signalled) for number in heeded}
        presence = Presence(self._open_store, self._keys.prefix, _Mirror, LEASE_TTL_S)
        presence.tells_sight = False
        try:
            _write(self._store, self._spec, None)
            self._receive(presence)
            presence.on_change = self._woken.set
            presence.enter(CONNECT_TIMEOUT_S)
            _say(f"The job {self._spec.name} is submitted to the cluster.")
            return self._follow(presence)
        finally:
            presence.leave()
            for _, receiver in self._receivers:
                receiver.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: object) -> None:
        self._stop_signal = self._stop_signal or number
        self._stops += 1
        self._woken.set()

    def _receive(self, presence: Presence[_Mirror]) -> None:
        """Receive the output here. Raises StoreError, OSError."""
        secret = _secret(self._store)
        if self._receivers and self._receivers[-1][0] == secret:
            return
        receiver = OutputReceiver(secret, sys.stdout.buffer, sys.stderr.buffer)
        self._receivers.append((secret, receiver))
        presence.say(self._keys.output, receiver.address_for(own_address(self._where)))

    def _drain(self, timeout_s: float) -> bool:
        drained = [receiver.drain(timeout_s) for _, receiver in self._receivers]
        return all(drained)

    def _follow(self, presence: Presence[_Mirror]) -> int:
        while True:
            self._woken.wait(LOOK_S)
            self._woken.clear()
            if self._stop_signal:
                return self._stop()
            mirror = presence.mirror
            if presence.blind or mirror is None:
                if not self._is_blind:
                    _say("The cluster's store cannot be seen; what runs goes on.")
                self._is_blind = True
            elif self._is_blind:
                self._is_blind = not self._sees_again(presence)
            elif (code := self._look(mirror)) is not None:
                return code

    def _look(self, mirror: _Mirror) -> int | None:
        """Tells what is new; the exit code if the job is over."""
        if mirror.get(self._keys.spec) is None:
            if self._submits_again():
                return None
            _say(f"The job {self._spec.name} is gone from the cluster's store.")
            return FAILED
        self._has_lost_data = False
        self._tell_refusals(mirror)
        record = phase_of(mirror.get(self._keys.phase))
        if record is not None and record.phase in (JobPhase.FINISHED, JobPhase.CANCELLED):
            self._drain(DRAIN_S)
            self._tell(record.reason)
            return FAILED if record.exit_code is None else record.exit_code
        if record is not None:
            self._tell(record.reason)
        if record is None or record.phase is JobPhase.SUBMITTED:
            self._tell_why_it_waits()
        return None

    def _sees_again(self, presence: Presence[_Mirror]) -> bool:
        """Whether all is as it should be with a store that can be seen again, which may have lost its data."""
        try:
            try:
                self._receive(presence)
            except StoreReplacedError:
                self._renew()
                self._receive(presence)
        except (StoreError, OSError):
            return False
        return True

    def _renew(self) -> None:
        self._store.close()
        self._store = self._open_store()
        self._said.clear()
        self._lost_data_at = time.monotonic()
        self._has_lost_data = self._is_blind = True

    def _submits_again(self) -> bool:
        """Resubmit if the store lost its data; a deliberate deletion is not undone."""
        try:
            if self._store.read(self._keys.spec).entry is not None:
                return True  # it is there by now
            if not self._has_lost_data:
                return False
            if time.monotonic() - self._lost_data_at < SAY_AGAIN_S:
                return True  # who runs it knows more of it, and tells it first
            self._store.create(self._keys.spec, spec_text(self._spec))
        except StoreReplacedError:
            self._renew()
        except StoreError:
            pass  # the next look does it again
        else:
            _say(f"The cluster's store has lost its data: the job {self._spec.name} is submitted again.")
        return True

    def _stop(self) -> int:
        """Stop as torchrun is stopped: the workers get the same signal, and a second one is the last word."""
        name, stops = signal.Signals(self._stop_signal).name, self._stops
        _say(f"{name}: the job {self._spec.name} is stopped on all its nodes; once more leaves at once.")
        record = PhaseRecord(
            phase=JobPhase.CANCELLED,
            reason=f"It was stopped by {name} where it was submitted.",
            signal=self._stop_signal,
        )
        try:
            try:
                _cancel(self._store, self._keys, record)
            except StoreReplacedError:
                self._renew()
                _cancel(self._store, self._keys, record)
        except (StoreError, LeaseGoneError) as error:
            _say(f"The cluster could not be told: {error}. `unicron cancel {self._spec.name}` does it again.")
            return FAILED
        end = time.monotonic() + STOP_S
        while time.monotonic() < end and self._stops == stops and not self._drain(LOOK_S / 4):
            pass
        print(f"unicron-run: stopped: it got signal {self._stop_signal}", file=sys.stderr)
        return FAILED

    def _tell_refusals(self, mirror: _Mirror) -> None:
        for key, entry in list(mirror.entries.items()):
            if key.startswith(self._keys.refusals):
                self._tell(one_line(entry.value))

    def _tell_why_it_waits(self) -> None:
        try:
            entry = self._store.read(CURRENT).entry
            published = None if entry is None else Published.from_json(entry.value, entry.revision)
        except (StoreError, ValueError):
            return
        for wait in () if published is None else published.plan.waits:
            if wait.task == self._spec.name:
                self._tell(wait.reason)

    def _tell(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            _say(sentence)


def _write(store: Store, spec: JobSpec, lease_id: int | None) -> None:
    """Writes the job, if no other has its name. Raises CannotSubmit and StoreError."""
    keys = PlannedJobKeys(spec.name)
    while True:
        snapshot = store.read_prefix(keys.prefix)
        known, phase = snapshot.get(keys.spec), snapshot.get(keys.phase)
        record = phase_of(phase)
        is_over = record is not None and record.phase in (JobPhase.FINISHED, JobPhase.CANCELLED)
        if known is not None and not is_over:
            raise CannotSubmit(
                f"a job called {spec.name} is in the cluster already; give another name with --rdzv-id, or end that "
                f"one with `unicron cancel {spec.name}`"
            )
        guards = {keys.spec: 0 if known is None else known.revision, keys.phase: 0 if phase is None else phase.revision}
        kept = _still_true(snapshot, keys, spec)
        new = (keys.spec, keys.phase, *(put.key for put in kept))
        old = [entry.key for entry in snapshot.entries if entry.key not in new]
        while len(old) > MOST_DELETES and store.commit(guards, [], old[-MOST_DELETES:]) is not None:
            del old[-MOST_DELETES:]
        # Its phase is told from the beginning on: where there is none, the store has lost its data.
        submitted = PhaseRecord(
            phase=JobPhase.SUBMITTED,
            reason=_submitted(spec),
            start=0 if record is None else record.start,
            submission=secrets.randbits(40),
        )
        puts = [Put(keys.spec, spec_text(spec), lease_id), Put(keys.phase, phase_text(submitted), lease_id), *kept]
        if store.commit(guards, puts, old[:MOST_DELETES]) is not None:
            return


def _submitted(spec: JobSpec) -> str:
    return f"{spec.name} was submitted."


def _still_true(snapshot: Snapshot, keys: PlannedJobKeys, spec: JobSpec) -> list[Put]:
    """What was measured of a job that runs the same again."""
    entry = snapshot.get(keys.spec)
    try:
        before = None if entry is None else parse_spec(entry)
    except ValueError:
        return []
    if before is None or any(getattr(before, each) != getattr(spec, each) for each in _SAME_SPEED):
        return []
    found = (snapshot.get(key) for key in (keys.measured, keys.rates))
    return [Put(entry.key, entry.value) for entry in found if entry is not None]


def _cancel(store: Store, keys: PlannedJobKeys, record: PhaseRecord) -> None:
    """Unless the job is over. Raises StoreError, LeaseGoneError."""
    while True:
        snapshot = store.read_prefix(keys.prefix)
        spec, phase = snapshot.get(keys.spec), snapshot.get(keys.phase)
        known = phase_of(phase)
        if spec is None or (known is not None and known.phase in (JobPhase.FINISHED, JobPhase.CANCELLED)):
            return
        guards = {keys.spec: spec.revision, keys.phase: 0 if phase is None else phase.revision}
        lease = store.grant(ENDED_FOR_S)
        if known is not None:
            record = replace(record, start=known.start, submission=known.submission)
        if store.commit(guards, puts_of_end(snapshot, keys, record, lease.lease_id)) is not None:
            return


def _secret(store: Store) -> str:
    """What all agents of the cluster know; made if this is the first to ask. Raises StoreError."""
    while (entry := store.read(SECRET).entry) is None:
        store.create(SECRET, secrets.token_hex(32).encode())
    return entry.value.decode(errors="replace")


def _from_file(path: str) -> dict[str, Any]:
    """What a file says of the job. Raises ValueError."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--job-spec: {path} cannot be read as JSON: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f'--job-spec: {path} must hold an object, such as {{"unit_nodes": 2}}')
    return told


def _check_name(name: str) -> None:
    """Raises ValueError for one that no key in the store can hold."""
    try:
        is_short = len(PlannedJobKeys(name).prefix) <= NAME_BYTES
    except UnicodeEncodeError:
        is_short = False
    if not is_short:
        raise ValueError(f"--rdzv-id: {name[:80]!a} cannot be kept; give a shorter name, of plain letters and digits")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--weight: {text!r} is not valid; give a number, 0 or more") from None


def _stem(script: str) -> str:
    return os.path.splitext(os.path.basename(script))[0] or "job"


def _say(sentence: str) -> None:
    try:
        sys.stderr.write(stamped(sentence))
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


assert {"UNICRON_CLUSTER", "UNICRON_DETACH"} <= set(OF_SUBMISSION)
