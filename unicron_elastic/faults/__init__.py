"""Faults: what a worker's end means, how bad it is, which of several came first, and whether it is the same again.

Pure: no sockets, processes, threads, clocks or torch.
"""

from unicron_elastic.base.fault import SEVERITY_OF, Failure, Fault, HangKind, Severity, Status
from unicron_elastic.faults.classify import classify, left_early
from unicron_elastic.faults.root_cause import RootCause, root_cause
from unicron_elastic.faults.signature import signature

__all__ = [
    "SEVERITY_OF",
    "Failure",
    "Fault",
    "HangKind",
    "RootCause",
    "Severity",
    "Status",
    "classify",
    "left_early",
    "root_cause",
    "signature",
]
