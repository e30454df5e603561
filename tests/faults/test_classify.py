"""The classification tables against real error texts, and the promises of `classify` against arbitrary ones."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.faults import SEVERITY_OF, Failure, Severity, Status, classify, signature
from unicron_elastic.faults.classify import ROWS
from unicron_elastic.faults.exit_status import describe_exit

DATA = Path(__file__).parent / "data"


def _read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


# Every line names the library, and the public thread or the action on a CPU-only machine, that its text comes from.
ERRORS = _read("errors.jsonl")
# cudaGetErrorName and cudaGetErrorString of libcudart 12.9 for every code it knows.
CUDA_STRINGS = _read("cuda_error_strings.jsonl")


def _failure(**known: Any) -> Failure:
    return Failure(**{"at": 1.0, "rank": 3, "local_rank": 1, "pid": 4242, **known})


def _failure_of(case: dict[str, Any]) -> Failure:
    return _failure(exit_code=case["exit_code"], exception_type=case["exception_type"], message=case["message"])


@pytest.mark.parametrize("case", ERRORS, ids=[f"{number}-{case['source']}" for number, case in enumerate(ERRORS)])
def test_real_error(case: dict[str, Any]) -> None:
    fault = classify(_failure_of(case))
    assert (str(fault.status), int(fault.severity), fault.is_consequence) == (
        case["status"],
        case["severity"],
        case["is_consequence"],
    )


def test_corpus_is_large_varied_and_without_duplicates() -> None:
    texts = [(case["exception_type"], case["message"], case["exit_code"]) for case in ERRORS]
    assert len(ERRORS) >= 60
    assert len(set(texts)) == len(texts)
    # A lost connection is what heartbeats notice; no process writes it.
    assert {case["status"] for case in ERRORS} == {str(status) for status in Status} - {"lost connection"}


def test_every_row_with_a_text_is_grounded_in_a_real_one() -> None:
    texts = [(case["exception_type"] or "", case["message"] or "") for case in ERRORS]
    texts += [("RuntimeError", f"CUDA error: {case['text']}") for case in CUDA_STRINGS]
    texts += [("RuntimeError", f"Cuda failure {case['code']} '{case['text']}'") for case in CUDA_STRINGS]
    decided = {next((row for row in ROWS if row.match(*pair)), None) for pair in texts}
    # "any other" rows are nets below the rows that we have seen texts for.
    unseen = [
        row.source
        for row in ROWS
        if row not in decided and row.text_pattern.pattern and not row.source.endswith("any other")
    ]
    assert unseen == []


NOT_SIMPLY_CUDA_ERRORS = {
    2: Status.OUT_OF_GPU_MEMORY,
    35: Status.GPU_DRIVER_ERROR,
    100: Status.GPU_DRIVER_ERROR,
    205: Status.INVALID_DMA_MAPPING,
    206: Status.INVALID_DMA_MAPPING,
    214: Status.ECC_ERROR,
    220: Status.NVLINK_ERROR,
    226: Status.NVLINK_ERROR,
    700: Status.ILLEGAL_MEMORY_ACCESS,
    716: Status.ILLEGAL_MEMORY_ACCESS,
    717: Status.ILLEGAL_MEMORY_ACCESS,
    802: Status.GPU_DRIVER_ERROR,
    803: Status.GPU_DRIVER_ERROR,
    804: Status.GPU_DRIVER_ERROR,
}


@pytest.mark.parametrize("case", CUDA_STRINGS, ids=[case["name"] for case in CUDA_STRINGS])
@pytest.mark.parametrize(
    "wrapping",
    [
        "CUDA error: {text}\nCUDA kernel errors might be asynchronously reported",
        "Last error:\nCuda failure {code} '{text}'",
    ],
    ids=["torch", "NCCL"],
)
def test_cuda_error_code(case: dict[str, Any], wrapping: str) -> None:
    fault = classify(_failure(exception_type="RuntimeError", message=wrapping.format(**case)))
    assert fault.status is NOT_SIMPLY_CUDA_ERRORS.get(case["code"], Status.CUDA_ERROR)
    assert not fault.is_consequence


@pytest.mark.parametrize(
    ("exception_type", "status"),
    [
        ("torch.OutOfMemoryError", Status.OUT_OF_GPU_MEMORY),
        ("torch.AcceleratorError", Status.CUDA_ERROR),
        ("torch.distributed.DistBackendError", Status.OTHER_NETWORK_ERROR),
        ("MyOutOfMemoryErrorHandlerFailed", Status.OTHER_SOFTWARE_ERROR),
        ("project.errors.TrainingDiverged", Status.OTHER_SOFTWARE_ERROR),
    ],
)
def test_type_decides_where_the_text_says_nothing(exception_type: str, status: Status) -> None:
    assert classify(_failure(exception_type=exception_type, message="step 7 was bad")).status is status


def test_hardware_wins_over_the_library_that_reports_it() -> None:
    message = (
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 214 'uncorrectable ECC error encountered'"
    )
    fault = classify(_failure(exception_type="torch.distributed.DistBackendError", message=message))
    assert (fault.status, fault.severity) == (Status.ECC_ERROR, Severity.SEV1)
    assert fault.reason == (
        "rank 3 raised torch.distributed.DistBackendError: Cuda failure 214 'uncorrectable ECC error encountered'."
    )


CHAIN = """Traceback (most recent call last):
  File "/home/user/train.py", line 17, in load
    batch = torch.empty(size)  # RuntimeError: CUDA error: this is only a comment
            ^^^^^^^^^^^^^^^^^
RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to \
allocate 4503599627370496 bytes. Error code 12 (Cannot allocate memory)

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/user/train.py", line 20, in <module>
    load()
ValueError: could not build batch 12
"""


def test_cause_is_found_in_the_chain_but_not_in_source_lines() -> None:
    fault = classify(_failure(exception_type="ValueError", message="could not build batch 12", stack=CHAIN))
    assert fault.status is Status.OUT_OF_HOST_MEMORY
    assert fault.reason == (
        "rank 3 raised ValueError: could not build batch 12, from RuntimeError: DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4503599627370496 bytes."
    )


def test_own_text_wins_over_the_chain() -> None:
    fault = classify(
        _failure(exception_type="RuntimeError", message="CUDA error: device-side assert triggered", stack=CHAIN)
    )
    assert fault.status is Status.CUDA_ERROR


def test_exception_wins_over_exit_code() -> None:
    fault = classify(_failure(exception_type="KeyError", message="'label'", exit_code=-signal.SIGTERM))
    assert (fault.status, fault.is_consequence) == (Status.OTHER_SOFTWARE_ERROR, False)


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"rank": 1, "exit_code": -9, "step": 120}, "rank 1 was killed by signal 9 (SIGKILL) after 120 steps."),
        (
            {
                "rank": 0,
                "exception_type": "RuntimeError",
                "message": "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be",
                "location": "train.py:88 in step",
            },
            "rank 0 raised RuntimeError: CUDA error: an illegal memory access was encountered (train.py:88 in step).",
        ),
        (
            {"exception_type": "AssertionError", "message": "", "location": "train.py:9 in <module>", "step": 0},
            "rank 3 raised AssertionError (train.py:9 in <module>) before its first step.",
        ),
        ({"exit_code": 7}, "rank 3 exited with code 7."),
        ({"exit_code": 1}, "rank 3 exited with code 1 (usually an unhandled exception)."),
        (
            {"exit_code": 2, "message": "usage: train.py [-h]\ntrain.py: error: no argument --x\n"},
            "rank 3 exited with code 2 (usually a bad command line) after writing: train.py: error: no argument --x.",
        ),
        ({"exit_code": -15}, "rank 3 was stopped by signal 15 (SIGTERM)."),
        ({}, "rank 3 has neither raised nor exited and is taken to hang."),
        ({"message": "GPU is lost"}, "rank 3 reported: GPU is lost."),
        (
            {"exception_type": "ValueError", "message": "found invalid values:\nnan"},
            "rank 3 raised ValueError: found invalid values: nan.",
        ),
        (
            {
                "exception_type": "RuntimeError",
                "message": "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer "
                "[18.25.6.30]:28048",
            },
            "rank 3 raised RuntimeError: Connection closed by peer [18.25.6.30]:28048.",
        ),
    ],
)
def test_reason(known: dict[str, Any], reason: str) -> None:
    assert classify(_failure(**known)).reason == reason


def test_reason_of_a_long_line_shows_the_words_that_decided() -> None:
    text = "x" * 5_000 + " Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1" + "y" * 5_000
    fault = classify(_failure(exception_type="RuntimeError", message=text, location="train.py:1 in f", step=5))
    assert "raised RuntimeError: Watchdog caught collective operation timeout" in fault.reason
    assert fault.reason.endswith("… (train.py:1 in f) after 5 steps.")


def test_reason_never_exceeds_its_limit() -> None:
    long = {"exception_type": "E" * 999, "message": "m" * 999, "location": "l" * 999, "step": 10**100}
    assert len(classify(_failure(**long)).reason) == 400


@pytest.mark.parametrize(
    ("exit_code", "status", "is_consequence", "fragment"),
    [
        (-9, Status.KILLED_BY_SIGNAL, False, "was killed by signal 9 (SIGKILL)"),
        (137, Status.KILLED_BY_SIGNAL, False, "was killed by signal 9 (SIGKILL)"),
        (134, Status.KILLED_BY_SIGNAL, False, "was killed by signal 6 (SIGABRT)"),
        (139, Status.KILLED_BY_SIGNAL, False, "was killed by signal 11 (SIGSEGV)"),
        (143, Status.STOPPED_BY_REQUEST, True, "was stopped by signal 15 (SIGTERM)"),
        (-2, Status.STOPPED_BY_REQUEST, True, "was stopped by signal 2 (SIGINT)"),
        (-40, Status.KILLED_BY_SIGNAL, False, "was killed by signal 40"),
        (128, Status.EXITED_ABNORMALLY, False, "exited with code 128"),
        (255, Status.EXITED_ABNORMALLY, False, "exited with code 255"),
        (0, Status.EXITED_ABNORMALLY, False, "exited with code 0"),
    ],
)
def test_exit_code(exit_code: int, status: Status, is_consequence: bool, fragment: str) -> None:
    fault = classify(_failure(exit_code=exit_code))
    assert (fault.status, fault.is_consequence, fault.severity) == (status, is_consequence, SEVERITY_OF[status])
    assert describe_exit(exit_code) == fragment


# Arbitrary text, and arbitrary text around real fragments, so that rows match inside noise.
REAL_TEXT = st.sampled_from([case["message"] for case in ERRORS if case["message"]])
NOISE = st.text(max_size=400)
TEXT = st.one_of(st.none(), NOISE, st.builds(lambda a, b, c: a + b + c, NOISE, REAL_TEXT, NOISE))
FAILURES = st.builds(
    Failure,
    at=st.floats(),
    rank=st.integers(0, 10**6),
    local_rank=st.integers(0, 64),
    pid=st.integers(1, 2**22),
    host=st.text(max_size=20),
    exit_code=st.one_of(st.none(), st.integers(-300, 300), st.integers()),
    exception_type=st.one_of(st.none(), st.text(max_size=200), st.sampled_from(["RuntimeError", "a.b.DistError"])),
    message=TEXT,
    stack=TEXT,
    location=st.one_of(st.none(), st.text(max_size=300)),
    step=st.one_of(st.none(), st.integers(0, 10**9)),
)


@given(FAILURES)
def test_anything_gets_a_status_and_a_one_line_reason(failure: Failure) -> None:
    fault = classify(failure)
    assert fault.failure is failure
    assert fault.severity is SEVERITY_OF[fault.status]
    assert fault.reason.startswith(f"rank {failure.rank} ")
    assert fault.reason.endswith(".")
    assert len(fault.reason) <= 400
    assert len(fault.reason.splitlines()) == 1
    assert fault.reason.isprintable()
    fault.reason.encode("utf-8")


@given(FAILURES)
def test_same_failure_same_fault(failure: Failure) -> None:
    assert classify(failure).reason == classify(failure).reason


@pytest.mark.timeout(20)  # it takes milliseconds; a quadratic row takes hours
@pytest.mark.parametrize(
    "piece",
    [
        "frame #1: c10::cuda Net : socketProgress: nvidia DMAR: [DMA Read NET/IB : x",
        "DataLoader worker (pid(s) 1, 2",
        "Last error: ",
        "a. ",
        "\n",
        " ",
        "1",
        ":",
        "[",
    ],
)
def test_long_texts_take_no_time(piece: str) -> None:
    failure = _failure(exception_type="RuntimeError", message="boom\n" + piece * 1_000_000, stack=piece * 1_000_000)
    assert classify(failure).reason == "rank 3 raised RuntimeError: boom."
    assert len(signature(failure)) < 400
