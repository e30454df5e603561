"""What CUDA, its libraries and the GPU's driver write when they fail, worst first.

The texts of `cudaError_t` are those of `cudaGetErrorString` (libcudart 12.9); PyTorch writes them after "CUDA error: "
(or "HIP error: "), NCCL after "Cuda failure". Hardware rows stand before all others, because NCCL wraps them:
"unhandled cuda error ... Last error: Cuda failure 'uncorrectable ECC error encountered'" is an ECC error, not a
network error.
"""

from __future__ import annotations

from unicron_elastic.base.fault import Status
from unicron_elastic.faults.pattern import Row, row

# Faults of the device or the node: another process on the same GPU would meet them too.
_HARDWARE = (
    row("CUDA 214; Linux nvidia driver, Xid 48", r"uncorrectable ECC error|double bit ECC error", Status.ECC_ERROR),
    row("CUDA 220", r"uncorrectable NVLink error", Status.NVLINK_ERROR),
    row("CUDA 226 (cudaErrorContained)", r"invalid access of peer GPU memory over nvlink", Status.NVLINK_ERROR),
    row("CUDA 205, 206", r"\b(?:un)?mapping of buffer object failed", Status.INVALID_DMA_MAPPING),
    # The IOMMU refused an address that a device used: seen in the kernel log, next to the worker's own CUDA error.
    row("Linux amd_iommu", r"nvidia \S{1,20} AMD-Vi: Event logged \[IO_PAGE_FAULT", Status.INVALID_DMA_MAPPING),
    row("Linux intel-iommu", r"DMAR: \[DMA (?:Read|Write)[^\]]{0,20}\] Request device", Status.INVALID_DMA_MAPPING),
    row("NVML 15, nvidia-smi", r"GPU is lost", Status.GPU_DRIVER_ERROR),
    row("Linux nvidia driver, Xid 79", r"fallen off the bus", Status.GPU_DRIVER_ERROR),
    row("NVML 16", r"GPU requires re(?:start|set)", Status.GPU_DRIVER_ERROR),
    row("NVML 9", r"driver not loaded", Status.GPU_DRIVER_ERROR, type_name=r"NVMLError_\w+"),
    row("NVML 18, nvidia-smi", r"(?:driver/library|NVML/RM) version mismatch", Status.GPU_DRIVER_ERROR),
    # Fabric manager down (802), or a user-space driver that does not fit the kernel's: no process can use the GPU.
    row("CUDA 802", r"system not yet initialized", Status.GPU_DRIVER_ERROR),
    row("CUDA 803", r"unsupported display driver / cuda driver combination", Status.GPU_DRIVER_ERROR),
    row("CUDA 804", r"forward compatibility was attempted on non supported HW", Status.GPU_DRIVER_ERROR),
    row("CUDA 35", r"CUDA driver version is insufficient for CUDA runtime", Status.GPU_DRIVER_ERROR),
    row("CUDA 100; torch", r"no CUDA-capable device is detected|No CUDA GPUs are available", Status.GPU_DRIVER_ERROR),
)

# The process has used memory wrongly; its CUDA context is lost with it, so only a new process helps.
_MEMORY = (
    row("CUDA 700, HIP 700", r"an illegal memory access was encountered", Status.ILLEGAL_MEMORY_ACCESS),
    row("CUDA 716", r"(?:error|failure|ADDRESS)\b[^\n]{0,40}\bmisaligned address", Status.ILLEGAL_MEMORY_ACCESS),
    row("CUDA 717", r"operation not supported on global/shared address space", Status.ILLEGAL_MEMORY_ACCESS),
    row(
        "torch caching allocator",
        r"\b(?:CUDA|HIP) out of memory(?:\. Tried to allocate [\d.]+ \w+)?",
        Status.OUT_OF_GPU_MEMORY,
    ),
    row(
        "CUDA 2, through torch",
        r"(?:CUDA|HIP)(?: driver| runtime)? error(?: \(\d+\))?\s?: out of memory",
        Status.OUT_OF_GPU_MEMORY,
    ),
    row("CUDA 2, through NCCL", r"Cuda failure (?:\d+ )?'out of memory'", Status.OUT_OF_GPU_MEMORY),
    row("cuBLAS, cuDNN", r"CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED", Status.OUT_OF_GPU_MEMORY),
    row("torch", r"", Status.OUT_OF_GPU_MEMORY, type_name="OutOfMemoryError"),
)

# All else that CUDA says. "CUDA driver error" is PyTorch's prefix for a failed call of the driver *API* (an ordinary
# CUDA error, often "operation not supported"), not a fault of the driver: so SEV2, and escalation does the rest.
_OTHER = (
    # Before "unhandled cuda error", which NCCL writes above it and which says less.
    row("NCCL CUDACHECK", r"Cuda failure[^\n]{0,120}", Status.CUDA_ERROR),
    row(
        "torch C10_CUDA_CHECK, C10_CUDA_DRIVER_CHECK",
        r"\b(?:CUDA|HIP)(?: driver)? error\b[^\n]{0,120}",
        Status.CUDA_ERROR,
    ),
    row("torch before 1.5 (THC)", r"cuda runtime error \(\d+\)[^\n]{0,120}", Status.CUDA_ERROR),
    row("torch", r"Unexpected error from cudaGetDeviceCount", Status.CUDA_ERROR),
    row(
        "cuBLAS, cuDNN, cuSOLVER, cuFFT, cuRAND",
        r"\bCU(?:BLAS|DNN|SOLVER|FFT|RAND|SPARSE)_STATUS_\w+",
        Status.CUDA_ERROR,
    ),
    row("CUDA driver API names", r"\bCUDA_ERROR_\w+", Status.CUDA_ERROR),
    row("torch >= 2.8", r"", Status.CUDA_ERROR, type_name="AcceleratorError"),
    row("NVML", r"", Status.CUDA_ERROR, type_name=r"NVMLError_(?:Unknown|GpuNotFound|IrqIssue)"),
)

GPU_ROWS: tuple[Row, ...] = (*_HARDWARE, *_MEMORY, *_OTHER)
