"""The keys of planning in the store. All of them are below ``plan/``, so that who coordinates watches one prefix."""

from __future__ import annotations

from urllib.parse import quote, unquote

from unicron_elastic.base.text import one_line, shown

# In the environment of what runs a job's part for an agent: a file for its word on how the job has ended, as the store
# may be away at that moment.
VERDICT_VARIABLE = "UNICRON_VERDICT"

_RUN_ID_CHARACTERS = 180  # as a part of a key
PLAN = "plan/"
CURRENT = f"{PLAN}current"
FAULTS = f"{PLAN}faults"
NODE_RECORDS = f"{PLAN}nodes/"
ORDERS = f"{PLAN}orders/"
JOB_RECORDS = f"{PLAN}jobs/"


class PlannedJobKeys:
    """The keys of one job that is planned."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = f"{JOB_RECORDS}{quote(name, safe='')}/"
        self.spec = f"{self.prefix}spec"
        self.phase = f"{self.prefix}phase"
        self.rates = f"{self.prefix}rates"  # T(t, x) that plans are made from
        self.measured = f"{self.prefix}measured"  # by the job itself
        self.output = f"{self.prefix}output"  # where its output is wanted, HOST:PORT, bound to who submitted it
        self.refusals = f"{self.prefix}refused/"

    def refused(self, node_id: str) -> str:
        """Why a node does not work for it."""
        return f"{self.refusals}{quote(node_id, safe='')}"


def job_of_key(key: str) -> str:
    """The job's name in a key below ``JOB_RECORDS``."""
    return unquote(key.removeprefix(JOB_RECORDS).partition("/")[0])


def status_key(node_id: str) -> str:
    """Return the key of what an agent says that it does."""
    return f"{NODE_RECORDS}{quote(node_id, safe='')}"


def order_key(node_id: str) -> str:
    """Return the key of what an agent is to do."""
    return f"{ORDERS}{quote(node_id, safe='')}"


def run_of_start(name: str, start: int) -> str:
    """What one start of a planned job is called among the runs in the store, which keep their own records."""
    return f"{name}@{start}"


def start_of_run(run_id: str) -> tuple[str, int]:
    """The planned job whose start this would be, and which start; itself and 0, if it can be none."""
    name, _, start = run_id.rpartition("@")
    number = int(start) if start.isdecimal() and len(start) < 20 else 0
    return (name, number) if number and run_of_start(name, number) == run_id else (run_id, 0)


def check_run_id(run_id: str) -> None:
    """Raises ValueError, with what would be right, for an --rdzv-id that the store cannot keep, or takes for another's.

    A planned job's starts have records of their own under names that nobody else may have.
    """
    name, start = start_of_run(run_id)
    if start:
        right = f"another one, such as {one_line(name, 40)}-{start}"
        raise ValueError(f"--rdzv-id: {shown(run_id)} would be start {start} of a planned job; give {right}")
    if not run_id or not run_id.isprintable() or len(quote(run_id, safe="")) > _RUN_ID_CHARACTERS:
        right = f"1 to {_RUN_ID_CHARACTERS} printable characters, where one that is not ASCII counts several times"
        raise ValueError(f"--rdzv-id: {shown(run_id)} is not valid; give {right}")
