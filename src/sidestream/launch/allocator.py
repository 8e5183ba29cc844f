"""Keep freed memory in the process instead of giving it back to the system after every large tensor."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LIMIT = 2**30


def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for returning memory. Returns False where malloc is another one.

    By default a buffer of a few MiB is a fresh mapping every time it is allocated, and the kernel zeroes each page at
    its first touch. A gather of 32768 x 512 bf16 rows takes 19 ms that way and 2 ms in memory that is reused.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has no mallopt
        return False
    return all(mallopt(option, _LIMIT) == 1 for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD))
