"""How loaded the host is, as lines for a report."""

from __future__ import annotations

from unicron_elastic.health.host.files import read


def host_lines() -> list[str]:
    """Load, memory, and how long processes wait for each (proc_loadavg(5), proc_meminfo(5), the kernel's psi.rst)."""
    memory = (read("/proc/meminfo") or "").splitlines()
    wanted = [" ".join(line.split()) for line in memory if line.startswith(("MemTotal", "MemAvailable", "SwapFree"))]
    lines = [f"load of the host: {(read('/proc/loadavg') or '').strip()}", f"memory of the host: {', '.join(wanted)}"]
    for resource in ("cpu", "io", "memory"):
        pressure = (read(f"/proc/pressure/{resource}") or "").splitlines()
        lines += [f"pressure on {resource}: {line}" for line in pressure[:1]]
    return lines
