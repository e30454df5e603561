"""What the host, Python and PyTorch write: memory, files, stops by request, plain sockets.

Python's own connection errors are causes, not consequences: torch's transports are C++ and never raise them, so they
come from the user's code (a dataset server, a tracker), which says nothing about another rank.
"""

from __future__ import annotations

from unicron_elastic.base.fault import Status
from unicron_elastic.faults.pattern import Row, row

HOST_ROWS: tuple[Row, ...] = (
    row(
        "torch DataLoader, SIGBUS",
        r"DataLoader worker \(pid \d+\) is killed by signal: Bus error",
        Status.OUT_OF_HOST_MEMORY,
    ),
    row(
        "torch DataLoader", r"DataLoader worker \(pid \d+\) is killed by signal: [^\n.]{0,40}", Status.KILLED_BY_SIGNAL
    ),
    row(
        "torch DataLoader",
        r"DataLoader worker \(pid(?:\(s\))? [^\n)]{1,200}\) exited unexpectedly",
        Status.EXITED_ABNORMALLY,
    ),
    row("torch c10 alloc_cpu", r"DefaultCPUAllocator: (?:can't|not enough) [^\n.]{0,120}", Status.OUT_OF_HOST_MEMORY),
    row("Linux kernel log", r"out of memory: Killed process \d+", Status.OUT_OF_HOST_MEMORY),
    row("Linux kernel log, Slurm, Kubernetes", r"\boom-kill\b|\bOOMKilled\b", Status.OUT_OF_HOST_MEMORY),
    row("strerror 12", r"\[Errno 12\]|Cannot allocate memory", Status.OUT_OF_HOST_MEMORY),
    row("Python, NumPy", r"", Status.OUT_OF_HOST_MEMORY, type_name=r"_?(?:Array)?MemoryError"),
    # Tensors for other processes lie in /dev/shm, which is memory.
    row("torch MapAllocator", r"unable to write to file </torch_[^\n]{1,80}No space left", Status.OUT_OF_HOST_MEMORY),
    row("strerror 28, 122, 30, 5, 116", r"\[Errno (?:28|122|30|5|116)\]", Status.STORAGE_ERROR),
    row("strerror 28", r"No space left on device", Status.STORAGE_ERROR),
    row("torch.save", r"inline_container\.cc:\d+\] [. ]{0,4}unexpected pos \d+ vs \d+", Status.STORAGE_ERROR),
    row("torch.save", r"PytorchStreamWriter failed writing", Status.STORAGE_ERROR),
    # A stop that somebody asked for; during an incident that somebody is the launcher, because another rank failed.
    row("torch elastic", r"", Status.STOPPED_BY_REQUEST, type_name="SignalException", is_consequence=True),
    row("Python", r"", Status.STOPPED_BY_REQUEST, type_name="KeyboardInterrupt", is_consequence=True),
    row("Python", r"", Status.EXITED_ABNORMALLY, type_name="SystemExit"),
)

# Last of all rows, for they are the least precise.
HOST_SOCKET_ROWS: tuple[Row, ...] = (
    row(
        "Python",
        r"",
        Status.CONNECTION_REFUSED_OR_RESET,
        type_name=r"Connection(?:Refused|Reset|Aborted)Error|BrokenPipeError",
    ),
    row(
        "strerror 32, 104, 111, 103",
        r"\[Errno (?:32|103|104|111)\]|Connection (?:refused|reset by peer)|Broken pipe",
        Status.CONNECTION_REFUSED_OR_RESET,
    ),
    row("Python socket", r"", Status.OTHER_NETWORK_ERROR, type_name=r"socket\.(?:gaierror|herror|timeout)|gaierror"),
    row("Python socket", r"^timed out$", Status.OTHER_NETWORK_ERROR, type_name="TimeoutError"),
    row("strerror 98 to 101, 110, 113", r"\[Errno (?:98|99|100|101|110|113)\]", Status.OTHER_NETWORK_ERROR),
)
