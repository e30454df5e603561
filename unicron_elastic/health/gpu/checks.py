"""What is asked of each GPU at every check, and what the answers mean.

Sources: NVIDIA's "NVML API Reference Guide"; "GPU Memory Error Management" for remapped rows, containment and the
recovery action; the limits of DCGM's health watches (NVIDIA/DCGM, dcgm_gpu_hardware_limits: one NVLink error, 100 CRC
errors a second, 8 PCIe replays a minute).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import GPU_DEGRADED, Finding, Level, finding
from unicron_elastic.health.gpu.session import RESET_REQUIRED, Gpu, GpuGone, NvmlSession
from unicron_elastic.health.gpu.state import throttle_words

_UNCORRECTED = 1
_VOLATILE, _AGGREGATE = 0, 1

# The load, in percent of the time, from which a GPU has no reason to save power on PCIe.
_BUSY_PERCENT = 50
_MAX_CRC_ERRORS_PER_S = 100.0
_MAX_PCIE_REPLAYS_PER_S = 8 / 60

# Fields of nvmlDeviceGetFieldValues: their names in pynvml, the errors' name, and how many a second are too many.
_COUNTERS = (
    ("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVLink replays", 0.0),
    ("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVLink recoveries", 0.0),
    ("NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLink CRC errors", _MAX_CRC_ERRORS_PER_S),
    ("NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLink data CRC errors", _MAX_CRC_ERRORS_PER_S),
    ("NVML_FI_DEV_NVLINK_ECC_DATA_ERROR_COUNT_TOTAL", "NVLink ECC errors", 0.0),
    ("NVML_FI_DEV_PCIE_REPLAY_COUNTER", "PCIe replays", _MAX_PCIE_REPLAYS_PER_S),
)
# From NVLink 5 on the totals above are gone, and these are counted for each link.
_LINK_COUNTERS = (
    ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS", "NVLink recoveries"),
    ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS", "failed NVLink recoveries"),
)
_RECOVERY_ACTION = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"

# nvmlDeviceGpuRecoveryAction_t. "Drain and reset" lets present work go on; all others stop it.
_RECOVERIES = {
    1: (Level.CRITICAL, "the GPU has to be reset"),
    2: (Level.CRITICAL, "the node has to be restarted"),
    3: (Level.CRITICAL, "all processes that use peer-to-peer traffic have to end"),
    4: (Level.WARN, "the GPU has to be reset once its present work is done"),
    5: (Level.CRITICAL, "the IMEX domain has to be recovered"),
    6: (Level.CRITICAL, "the GPU's PCIe bus has to be reset"),
    7: (Level.CRITICAL, "the whole system has to be restarted"),
}


@dataclass(slots=True, kw_only=True)
class GpuHistory:
    """What earlier checks of one GPU saw. `at` is the monotonic time of the last one."""

    at: float | None = None
    ecc: dict[str, int] = field(default_factory=dict)
    first_ecc: dict[str, int] = field(default_factory=dict)
    counters: dict[tuple[int, int], int] = field(default_factory=dict)
    links: dict[int, bool] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    seen_before: set[str] = field(default_factory=set)

    def lasts(self, condition: str) -> bool:
        """Notes that `condition` holds now, and says whether it held at the last check too."""
        self.seen.add(condition)
        return condition in self.seen_before


def check_gpu(session: NvmlSession, gpu: Gpu, history: GpuHistory, now: float) -> list[Finding]:
    """Everything that is wrong with one GPU; `now` is monotonic seconds."""
    history.seen_before, history.seen = history.seen, set()
    found: list[Finding] = []
    try:
        for check in (_ecc, _sram, _remapped_rows, _retired_pages, _links, _fields, _pcie, _throttling):
            found.extend(check(session, gpu, history, now))
    except GpuGone as gone:
        return [gone_finding(gpu, gone.code, now)]
    finally:
        history.at = now
    complaint = session.take_complaint(gpu)
    if complaint is not None:
        reason = f"The driver has trouble with {gpu.label}: {complaint}."
        found.append(
            finding(
                "gpu.driver", Level.WARN, Status.GPU_DRIVER_ERROR, gpu.label, reason, at=now, severity=Severity.SEV2
            )
        )
    return found


def gone_finding(gpu: Gpu, code: int, now: float) -> Finding:
    """The GPU does not answer, or will not before it was reset."""
    if code == RESET_REQUIRED:
        reason = f"{gpu.label} has to be reset before it can be used again."
    elif gpu.handle is None:
        reason = f"{gpu.label} cannot be opened by the driver (NVML error {code})."
    else:
        reason = f"{gpu.label} is lost: it has fallen off the bus or does not answer the driver."
    return finding("gpu.lost", Level.CRITICAL, Status.GPU_DRIVER_ERROR, gpu.label, reason, at=now)


def _ecc(session: NvmlSession, gpu: Gpu, history: GpuHistory, now: float) -> Iterator[Finding]:
    """Uncorrected errors: critical if they came while we watched, a warning if the driver remembers older ones."""
    counts = {}
    for name, kind in (("volatile", _VOLATILE), ("aggregate", _AGGREGATE)):
        count = session.ask(gpu, "nvmlDeviceGetTotalEccErrors", _UNCORRECTED, kind)
        if count is not None:
            counts[name] = count
    if counts.get("volatile", 0) < history.ecc.get("volatile", 0):
        history.first_ecc = counts  # the GPU was reset, and with it what this counter remembers
    history.ecc = counts
    grown = max((count - history.first_ecc.setdefault(name, count) for name, count in counts.items()), default=0)
    if grown:
        reason = f"{gpu.label} has met {grown} uncorrectable ECC error{_s(grown)} since it is watched."
        yield finding("gpu.ecc", Level.CRITICAL, Status.ECC_ERROR, gpu.label, reason, at=now)
    elif old := counts.get("volatile", 0):
        reason = f"{gpu.label} has met {old} uncorrectable ECC error{_s(old)} since its driver was loaded."
        yield finding("gpu.ecc", Level.WARN, Status.ECC_ERROR, gpu.label, reason, at=now)


def _sram(session: NvmlSession, gpu: Gpu, _history: GpuHistory, now: float) -> Iterator[Finding]:
    status = session.fill(gpu, "nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")
    if status is not None and status.bThresholdExceeded:
        reason = f"{gpu.label} has more uncorrectable errors in its caches than NVIDIA allows: it should be replaced."
        yield finding("gpu.sram", Level.CRITICAL, Status.ECC_ERROR, gpu.label, reason, at=now)


def _remapped_rows(session: NvmlSession, gpu: Gpu, _history: GpuHistory, now: float) -> Iterator[Finding]:
    answer = session.ask(gpu, "nvmlDeviceGetRemappedRows")
    if answer is None:
        return
    _, _, is_pending, has_failed = answer
    if has_failed:
        reason = f"{gpu.label} could not replace a row of bad memory: it should be replaced."
        yield finding("gpu.row-remap", Level.CRITICAL, Status.ECC_ERROR, gpu.label, reason, at=now)
    elif is_pending:
        reason = f"{gpu.label} will replace a row of bad memory at its next reset; work on it may go on."
        yield finding("gpu.row-remap", Level.WARN, Status.ECC_ERROR, gpu.label, reason, at=now)


def _retired_pages(session: NvmlSession, gpu: Gpu, _history: GpuHistory, now: float) -> Iterator[Finding]:
    if session.ask(gpu, "nvmlDeviceGetRetiredPagesPendingStatus"):
        reason = f"{gpu.label} will retire a page of bad memory when its driver is loaded anew; work on it may go on."
        yield finding("gpu.retired-pages", Level.WARN, Status.ECC_ERROR, gpu.label, reason, at=now)


def _links(session: NvmlSession, gpu: Gpu, history: GpuHistory, now: float) -> Iterator[Finding]:
    """A link that was up and is down: a warning at first, for it may be training, critical if it stays down."""
    for link in range(session.constant("NVML_NVLINK_MAX_LINKS") or 18):
        state = session.ask(gpu, "nvmlDeviceGetNvLinkState", link)
        if state is None:
            continue
        was_up = history.links.get(link, False)
        history.links[link] = was_up or bool(state)
        if state or not was_up:
            continue
        level = Level.CRITICAL if history.lasts(f"link {link} down") else Level.WARN
        reason = f"NVLink {link} of {gpu.label} is down."
        yield finding("gpu.nvlink", level, Status.NVLINK_ERROR, f"{gpu.label} NVLink {link}", reason, at=now)


def _fields(session: NvmlSession, gpu: Gpu, history: GpuHistory, now: float) -> Iterator[Finding]:
    """All that NVML can tell in one call: the recovery action, and errors that are corrected but should not grow."""
    limits = _counters_of(session, history)
    action_field = session.constant(_RECOVERY_ACTION)
    wanted = [*limits, *([] if action_field is None else [(action_field, 0)])]
    values = session.field_values(gpu, wanted)
    if action_field is not None:
        yield from _recovery(gpu, values.pop((action_field, 0), 0), now)
    elapsed_s = 0.0 if history.at is None else now - history.at
    for counter, value in values.items():
        grown = value - history.counters.get(counter, value)
        history.counters[counter] = value
        words, limit_per_s, subject, status = limits[counter]
        if grown > 0 and elapsed_s > 0 and grown / elapsed_s > limit_per_s:
            subject = f"{gpu.label}{subject}"
            reason = f"{subject} had {grown} {words} in the last {elapsed_s:.0f} seconds."
            severity = Severity.SEV3 if status is GPU_DEGRADED else None
            yield finding(f"gpu.{words}", Level.WARN, status, subject, reason, at=now, severity=severity)


def _counters_of(session: NvmlSession, history: GpuHistory) -> dict[tuple[int, int], tuple[str, float, str, Status]]:
    limits: dict[tuple[int, int], tuple[str, float, str, Status]] = {}
    for name, words, limit_per_s in _COUNTERS:
        number = session.constant(name)
        if number is not None:
            status = Status.NVLINK_ERROR if "NVLINK" in name else GPU_DEGRADED
            limits[(number, 0)] = (words, limit_per_s, "", status)
    for name, words in _LINK_COUNTERS:
        number = session.constant(name)
        if number is not None:
            limits |= {(number, link): (words, 0.0, f" NVLink {link}", Status.NVLINK_ERROR) for link in history.links}
    return limits


def recovery_finding(session: NvmlSession, gpu: Gpu, now: float) -> Finding | None:
    """What the driver (R565 or newer) says has to be done for this GPU to recover, if anything.

    Raises GpuGone.
    """
    action_field = session.constant(_RECOVERY_ACTION)
    if action_field is None:
        return None
    value = session.field_values(gpu, [(action_field, 0)]).get((action_field, 0), 0)
    return next(_recovery(gpu, value, now), None)


def _recovery(gpu: Gpu, action: int, now: float) -> Iterator[Finding]:
    if action == 0:
        return
    level, words = _RECOVERIES.get(action, (Level.WARN, f"a recovery action of number {action}, unknown here, is due"))
    reason = f"The driver says of {gpu.label}: {words}."
    yield finding("gpu.recovery", level, Status.GPU_DRIVER_ERROR, gpu.label, reason, at=now)


def _pcie(session: NvmlSession, gpu: Gpu, history: GpuHistory, now: float) -> Iterator[Finding]:
    """Fewer lanes than the slot has, and a lower speed under load; idle GPUs lower their speed on purpose."""
    width = session.ask(gpu, "nvmlDeviceGetCurrPcieLinkWidth")
    best_width = session.ask(gpu, "nvmlDeviceGetMaxPcieLinkWidth")
    if width and best_width and width < best_width and history.lasts("narrow"):
        reason = f"{gpu.label} uses {width} PCIe lanes where {best_width} are possible."
        yield _degraded("gpu.pcie-width", gpu, reason, now)
    generation = session.ask(gpu, "nvmlDeviceGetCurrPcieLinkGeneration")
    best = session.ask(gpu, "nvmlDeviceGetMaxPcieLinkGeneration")
    if generation and best and generation < best and _is_busy(session, gpu) and history.lasts("slow"):
        reason = f"{gpu.label} is busy and uses PCIe generation {generation} where {best} is possible."
        yield _degraded("gpu.pcie-generation", gpu, reason, now)


def _is_busy(session: NvmlSession, gpu: Gpu) -> bool:
    rates = session.ask(gpu, "nvmlDeviceGetUtilizationRates")
    return rates is not None and rates.gpu >= _BUSY_PERCENT


def _throttling(session: NvmlSession, gpu: Gpu, history: GpuHistory, now: float) -> Iterator[Finding]:
    """Slowed down at two checks in a row: the reasons are those of one moment, and a moment is no matter."""
    words = throttle_words(session, gpu)
    if words and history.lasts("throttled"):
        reason = f"{gpu.label} is not at full speed: {' and '.join(words)}."
        yield _degraded("gpu.throttled", gpu, reason, now)


def compare_links(gpus: Sequence[Gpu], histories: dict[int, GpuHistory], now: float) -> Iterator[Finding]:
    """Warns of a GPU that never had as many NVLinks up as others of its model on this node."""
    counts = {gpu.index: sum(histories[gpu.index].links.values()) for gpu in gpus}
    for gpu in gpus:
        best = max((counts[other.index] for other in gpus if other.model == gpu.model), default=0)
        if 0 < counts[gpu.index] < best:
            reason = f"{gpu.label} has {counts[gpu.index]} NVLinks up where others of its kind have {best}."
            yield finding("gpu.nvlink-count", Level.WARN, Status.NVLINK_ERROR, gpu.label, reason, at=now)


def _degraded(probe: str, gpu: Gpu, reason: str, now: float) -> Finding:
    return finding(probe, Level.WARN, GPU_DEGRADED, gpu.label, reason, at=now, severity=Severity.SEV3)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
