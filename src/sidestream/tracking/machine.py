"""What the machine has: memory in use, and the arithmetic peak that MFU is measured against."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

SECONDS = 0.2  # of the measured matmul, after one warm-up

# Dense TFLOP/s of (bf16 with fp32 sums, fp32 without tensor cores); "with sparsity" figures halved. Second-hand: tables
# that cite NVIDIA's data sheets, not the sheets. Lightning's `fabric/utilities/throughput.py` for A100, H100 SXM and
# PCIe, H200 and L4; published collections for the rest. They differ by 11 % for Blackwell (GB200: 2250 or 2500).
# fp32 is left out where none was found or they disagree. The first pattern that fits counts.
GPUS: tuple[tuple[str, float, float | None], ...] = (
    (r"GB[23]00", 2500.0, None),
    (r"B[23]00", 2250.0, None),
    (r"H100 NVL", 835.0, None),
    (r"H200 NVL", 835.0, 60.0),
    (r"H100 PCIe", 756.0, 51.2),
    (r"H[12]00", 989.0, 67.0),
    (r"H800(?! PCIe)|GH200", 989.0, None),
    (r"A100", 312.0, 19.5),
    (r"A800", 312.0, None),
    (r"L40S", 362.0, 91.6),
    (r"L4", 121.0, 30.3),
)


@dataclass(frozen=True)
class Peak:
    """Arithmetic peak of one device.

    Attributes:
        flops: FLOP/s; None where it is not known.
        source: where the number is from, or why there is none.
    """

    flops: float | None
    source: str


def peak(setting: str | float | None, *, device: torch.device, dtype: torch.dtype) -> Peak:
    """Returns the peak of `device` for matrix products in `dtype`.

    Args:
        setting: `trainer.peak_tflops`: a number in TFLOP/s, None for none, or `auto`: from a table for a GPU that
            is in it, measured on a CPU.
    """
    if setting is None:
        return Peak(None, "none: trainer.peak_tflops=null")
    if setting != "auto":
        return Peak(float(setting) * 1e12, "trainer.peak_tflops")
    if device.type == "cuda":
        return gpu_peak(torch.cuda.get_device_name(device), dtype)
    return cpu_peak(dtype, torch.get_num_threads())


def gpu_peak(name: str, dtype: torch.dtype) -> Peak:
    """Looks a GPU up by the name that the driver gives it."""
    unknown = Peak(None, f"none: no figure for {_short(dtype)} on {name}; set trainer.peak_tflops")
    if "MIG" in name:  # a slice of the device, of which there are many sizes
        return unknown
    for pattern, bf16, fp32 in GPUS:
        if re.search(rf"\b(?:{pattern})\b", name):
            tflops = bf16 if dtype == torch.bfloat16 else fp32
            return (
                unknown if tflops is None else Peak(tflops * 1e12, f"table: {name}, {_short(dtype)}, dense")
            )
    return unknown


@cache
def cpu_peak(dtype: torch.dtype, threads: int) -> Peak:
    """Measures the best of repeated matrix products, about `SECONDS` long, once per process.

    The ranks of a machine come here at about the same time, which is what training has to share too.
    """
    size, best = 512, float("inf")
    while True:
        a = torch.ones(size, size, dtype=dtype)  # not random: that would move the generator of the run
        _timed(a)  # the first call pays for threads and look-ups
        seconds = _timed(a)  # decides the size on slow machines
        if size == 1024 or seconds > SECONDS / 16:
            break
        size = 1024
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        best = min(best, _timed(a))
    source = (
        f"measured: best matmul of {size} x {size}, {_short(dtype)}, {threads} thread{'s'[: threads != 1]}"
    )
    return Peak(2 * size**3 / min(best, seconds), source)


def _timed(a: torch.Tensor) -> float:
    started = time.perf_counter()
    a @ a
    return time.perf_counter() - started


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype, str(dtype))


def waiting_reader() -> Callable[[], float | None]:
    """Returns a function that gives the seconds for which this process's main thread wanted a core and had none.

    None where the system does not tell. Other programs on its cores are what makes it grow, and ranks that share one.
    """
    path = "/proc/self/schedstat"
    if not os.path.exists(path):
        return lambda: None
    file = open(path, "rb", buffering=0)  # noqa: SIM115 - kept open: it is read every step

    def read() -> float | None:
        # Time on a core, time of waiting for one, both in ns, and turns.
        found = os.pread(file.fileno(), 128, 0).split()
        return 1e-9 * int(found[1]) if len(found) == 3 else None

    return read


def memory_reader(device: torch.device) -> Callable[[], tuple[int, int]]:
    """Returns a function that gives (current, peak) bytes: allocated on CUDA, resident set of the process on a CPU."""
    if device.type == "cuda":
        return lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    page = os.sysconf("SC_PAGE_SIZE")
    # Kept open: it is read every step. Other systems do not tell the current size without a package.
    statm = open("/proc/self/statm", "rb", buffering=0) if os.path.exists("/proc/self/statm") else None  # noqa: SIM115

    def read() -> tuple[int, int]:
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        current = int(os.pread(statm.fileno(), 128, 0).split()[1]) * page if statm else 0
        return current, max(highest, current)

    return read
