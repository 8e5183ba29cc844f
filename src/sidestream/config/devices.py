"""Counts GPUs without importing torch, which takes seconds and may initialise the driver."""

import functools
import os
import shutil
import subprocess
from pathlib import Path

PROC = Path("/proc/driver/nvidia/gpus")


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that torch would see, CUDA_VISIBLE_DEVICES respected."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _installed()
    chosen = 0
    for name in visible.split(","):
        # As in the driver: the list ends at the first entry that names no device.
        if not name.strip() or name.strip().startswith("-"):
            break
        chosen += 1
    return min(chosen, _installed()) if chosen else 0


@functools.cache
def _installed() -> int:
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return 0  # the tool is there but the driver is not
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return len(list(PROC.iterdir())) if PROC.is_dir() else 0
