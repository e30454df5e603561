"""What each XID means and what to do about it: one table.

An XID is the number under which NVIDIA's driver reports an error of a GPU. The source is NVIDIA's document "XID Errors"
(docs.nvidia.com/deploy/xid-errors), chapter "Analyzing Xid Errors with the Xid Catalog", whose spreadsheet gives each
XID an immediate action; "GPU Memory Error Management" (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt) explains those
about memory. Numbers that the catalogue calls unused are left out. How its actions become severities:

- The application is to be restarted: SEV2. The GPU is good; only the process that met the error has lost its context.
- The GPU, the virtual machine or the node is to be reset, or the power or seating checked: SEV1.
- Nothing is to be done: level WARN, told and no more; the severity says how bad the fault is of which it tells.

Where the number alone does not decide:

- 94 is SEV2 although it is an ECC error: the GPU has contained it, other processes are unharmed, and new ones may run
  until a reset is convenient. 95 is the same error not contained, so SEV1.
- 63 and 92 are at WARN: a row was remapped, or single-bit errors were corrected, and no work was harmed. 64 is a remap
  that failed: SEV1.
- 45 is at WARN: the driver cleans up after any process that was killed, also by us; its cause has a number of its own.
- 48 is SEV1 alone and together with 63 or 64; the catalogue wants a reset in either case.
- 109 is SEV1, for the catalogue wants a reset; NVIDIA's Kubernetes device plugin, which serves GPUs that are shared by
  time, leaves such a GPU in service.
- 144 to 148 are decoded from registers that NVML does not hand out: WARN, for when the GPU is lost with them, 154 says
  so. 149 (link down) and 150 (fabric engine) always need a reset.
- 154 announces that the driver's recovery action has changed; the action itself is asked for, see `nvml_checks`.
- 159 needs a reset only where memory is virtualised, which the number does not tell: WARN.
- 167 and 169 have no action in the catalogue yet; their names, and 62 beside 169, say that the GPU does not go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Finding, Level, finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One row: what the number means (`words`) and what NVIDIA recommends (`action`), both as fragments."""

    number: int
    level: Level
    status: Status
    severity: Severity
    words: str
    action: str


_RESTART = "the process that used it has to be restarted"
_RESET = "the GPU has to be reset before it is used again"
_REBOOT = "the node has to be restarted"
_NOTHING = "nothing has to be done at once"
_SUPPORT = "the GPU goes on, and NVIDIA's support should look at it if this comes again"


def _restart(numbers: Iterable[int], status: Status, words: str, action: str = _RESTART) -> Iterator[Xid]:
    return _rows(numbers, (Level.CRITICAL, status, Severity.SEV2), words, action)


def _isolate(numbers: Iterable[int], status: Status, words: str, action: str = _RESET) -> Iterator[Xid]:
    return _rows(numbers, (Level.CRITICAL, status, Severity.SEV1), words, action)


def _tell(numbers: Iterable[int], status: Status, severity: Severity, words: str, action: str) -> Iterator[Xid]:
    return _rows(numbers, (Level.WARN, status, severity), words, action)


def _rows(numbers: Iterable[int], verdict: tuple[Level, Status, Severity], words: str, action: str) -> Iterator[Xid]:
    level, status, severity = verdict
    for number in numbers:
        yield Xid(number=number, level=level, status=status, severity=severity, words=words, action=action)


_CUDA, _MEMORY, _ECC = Status.CUDA_ERROR, Status.ILLEGAL_MEMORY_ACCESS, Status.ECC_ERROR
_LINK, _DRIVER = Status.NVLINK_ERROR, Status.GPU_DRIVER_ERROR
_SEV1, _SEV2 = Severity.SEV1, Severity.SEV2

# What the application did, or what only its process has to pay for.
_APPLICATION = (
    _restart([8], _CUDA, "the GPU stopped working on a channel"),
    _restart([11, 25], _CUDA, "an invalid stream of commands"),
    _restart([13], _MEMORY, "an exception in the graphics engine, most often an access out of bounds"),
    _restart([31], _MEMORY, "a page fault in GPU memory, most often an illegal access"),
    _restart([32], _CUDA, "a corrupted stream of commands, most often from trouble on PCIe"),
    _restart([39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)], _CUDA, "an exception in a copy engine"),
    _restart([60], _CUDA, "an exception in the security processor"),
    _restart([68, 83, 84, 88, 89, 96, 97, 98], _CUDA, "an exception in the video decoder"),
    _restart([69], _CUDA, "a class error in the graphics engine"),
    _restart([80], _CUDA, "corrupted data sent to the GPU"),
    _restart([82, *range(99, 106)], _CUDA, "an exception in the JPEG decoder"),
    _restart([86, 139], _CUDA, "an exception in the optical flow engine"),
    _tell([43], _CUDA, _SEV2, "a process met a software fault and must end", "the GPU is healthy"),
    _tell([44], _CUDA, _SEV2, "a fault while switching contexts", _SUPPORT),
    _tell([45], Status.EXITED_ABNORMALLY, _SEV2, "cleaning up after a process that was ended", _NOTHING),
    _tell([137], _MEMORY, _SEV2, "an illegal access over NVLink", "the application is the likely cause"),
    _tell([141], _CUDA, _SEV2, "an error on CUDA's fast path", _SUPPORT),
    _tell([142], _CUDA, _SEV2, "an exception in the video encoder", "NVIDIA's support should look at it"),
)

_MEMORY_HARDWARE = (
    _isolate([48], _ECC, "an ECC error of two bits, which cannot be corrected"),
    _isolate([64], _ECC, "a row or page of bad memory could not be replaced"),
    _isolate([95], _ECC, "a memory error that was not contained, so that every process on the GPU may be harmed"),
    _isolate([140], _ECC, "an ECC error from which the driver could not recover"),
    _isolate([156], _ECC, "a broken part of the GPU was retired"),
    _restart([94], _ECC, "a memory error that was contained", f"{_RESTART}; a reset may wait until it is convenient"),
    _tell([63], _ECC, _SEV1, "a row or page of bad memory will be replaced", "the next reset makes it so"),
    _tell([92], _ECC, _SEV1, "many corrected ECC errors", _SUPPORT),
    _tell([157], _ECC, _SEV1, "a broken part could not be retired", "the same error may come again"),
    _tell([160, 161], _ECC, _SEV1, "a memory channel was retired, or could not be", _SUPPORT),
    _tell([168], _ECC, _SEV1, "bad memory in a protected region", "ECC should be switched on"),
    _tell([171, 172], _ECC, _SEV1, "details of an ECC error that could not be corrected", "XID 48 says what to do"),
)

_LINKS = (
    _isolate([74], _LINK, "an NVLink error"),
    _isolate([136], _LINK, "an NVLink could not be trained"),
    _isolate([149], _LINK, "an NVLink went down"),
    _isolate([150], _LINK, "the NVLink management engine failed"),
    _isolate([155], _LINK, "an NVLink was taken down by software"),
    _tell(range(144, 149), _LINK, _SEV1, "an error inside NVLink", "XID 154 follows if the GPU needs a reset"),
    _tell([108], _LINK, _SEV2, "an NVLink address could not be translated", "the application is the likely cause"),
    _tell([121], _LINK, _SEV1, "corrected errors on the link to the CPU", "a reset trains the link anew"),
    _tell([159], _LINK, _SEV1, "an error on the coherent link", "a reset is needed only with virtualised memory"),
    _tell([166, 170], _LINK, _SEV1, "encrypted NVLink was not set up properly", _SUPPORT),
)

_DRIVER_AND_BOARD = (
    _isolate([46, 158], _DRIVER, "the GPU stopped working and did not answer"),
    _isolate([54], _DRIVER, "auxiliary power is not connected", "cables and seating have to be checked"),
    _isolate([62, 169], _DRIVER, "a micro-controller of the GPU has halted"),
    _isolate([78], _DRIVER, "a virtual GPU could not start", "driver and firmware have to be updated"),
    _isolate([79], _DRIVER, "the GPU has fallen off the bus", _REBOOT),
    _isolate([109], _DRIVER, "switching contexts took too long"),
    _isolate([110], _DRIVER, "a security fault, which hardware failures cause"),
    _isolate([119], _DRIVER, "the GPU's system processor did not answer"),
    _isolate([120], _DRIVER, "an error in the GPU's system processor"),
    _isolate([143], _DRIVER, "the GPU could not be initialised"),
    _isolate([151], _DRIVER, "keys could not be exchanged", "the virtual machine has to be restarted"),
    _isolate([167], _DRIVER, "PCIe did not answer"),
    _tell([14, 106, 107], _DRIVER, _SEV2, "a test message", _NOTHING),
    _tell([37, 38], _DRIVER, _SEV2, "an error in the driver's firmware", _SUPPORT),
    _tell([66, 67], _DRIVER, _SEV2, "an illegal access by the driver", _SUPPORT),
    _tell([93], _DRIVER, _SEV2, "the board's memory for facts about itself may not be written any more", _NOTHING),
    _tell([152, 153], _DRIVER, _SEV2, "an error in the deep-learning accelerator", _SUPPORT),
    _tell([154], _DRIVER, _SEV1, "the driver's recovery action has changed", "the driver is asked which it is"),
    _tell([162, 163], _DRIVER, _SEV2, "power smoothing was switched on or off", _NOTHING),
    _tell([164, 165], _DRIVER, _SEV2, "power smoothing is worn out", "the board should be replaced some day"),
)

XIDS: Mapping[int, Xid] = MappingProxyType(
    {row.number: row for row in chain(*_APPLICATION, *_MEMORY_HARDWARE, *_LINKS, *_DRIVER_AND_BOARD)}
)


def explain_xid(number: int) -> Xid:
    """The row of `number`; one that the catalogue does not know is a warning that names it."""
    known = XIDS.get(number)
    if known is not None:
        return known
    return Xid(
        number=number,
        level=Level.WARN,
        status=_DRIVER,
        severity=_SEV2,
        words="a number that NVIDIA's catalogue does not explain",
        action="the kernel log may say more",
    )


def xid_finding(number: int, subject: str, at: float) -> Finding:
    """What an XID event of the GPU named `subject` means; `at` is in monotonic seconds."""
    row = explain_xid(number)
    reason = f"{subject} reported XID {number}, {row.words}: {row.action}."
    return finding("gpu.xid", row.level, row.status, subject, reason, at=at, severity=row.severity)
