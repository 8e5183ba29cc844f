"""Peak memory of a call, from the process's resident set (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_SELF = Path("/proc/self")


def _status_bytes(key: str) -> int:
    line = next(line for line in (_SELF / "status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def peak_growth(call: Callable[[], object]) -> int | None:
    """How far the resident set grows while `call` runs, above what was resident before.

    Free memory is first given back to the system, so what an earlier call left behind is not reused unseen. Counts
    tensors and the buffers of libraries alike, in pages.

    Returns:
        Bytes, or None where the system has no resettable high-water mark.
    """
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_SELF / "clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
    except (OSError, StopIteration):
        return None
    call()
    return max(0, _status_bytes("VmHWM") - before)


def peak_on(device: torch.device, call: Callable[[], object]) -> int | None:
    """`peak_growth` on a CPU; on a GPU how far torch's allocations grow there, without buffers of other libraries."""
    if device.type != "cuda":
        return peak_growth(call)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
