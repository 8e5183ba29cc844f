"""Memory that the ranks of one host share: a window per rank, all of them side by side in every rank.

    |   window of rank 0   |   window of rank 1   | ...        one range of addresses, so that one gather reads
    | flags | anything ... | flags | anything ... |            rows of every rank

A rank writes into its own window only. Flags are whole numbers that never fall; one rank writes each, the others wait
until it is large enough. Memory is taken when it is first written: a window may be far larger than what it will hold.

A window has no name: on Linux it is an anonymous file, elsewhere a file that is removed once every rank has opened it.
Nothing is left behind, however a rank ends. Each rank holds a lock on its file, which the system releases when the
process ends, so the others notice a death while they wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAGE = 4096
_LINE = 64  # bytes between flags: one cache line each
_FAILED = -1  # the flag that says: this rank gave up
_SPIN_S, _LONGEST_NAP_S, _LOOK_S = 30e-6, 200e-6, 0.25
_FIXED = 0x10  # MAP_FIXED, the same on Linux and macOS


class PeerLost(RuntimeError):
    """Another rank died, failed, or did not answer in time."""


def host() -> str:
    """Names the running system: equal for processes that can share memory."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{platform.node()} {file.read().strip()}"
    return platform.node()


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class Windows:
    """The windows of a group. Collective.

    Args:
        group: Ranks of one host; None: this rank alone.
        size: Bytes per window, a multiple of `PAGE`; equal on all ranks.
        num_flags: Flags per rank.
        timeout_s: How long to wait for another rank.

    Raises:
        ValueError: Ranks are on several hosts, or the system cannot share memory like this.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, size: int, num_flags: int, timeout_s: float
    ) -> None:
        assert size % PAGE == 0 and (num_flags + 1) * _LINE <= size, "room for the flags"
        if fcntl is None:
            raise ValueError("fusion=mega: this system has no POSIX memory; set fusion=grouped")
        self.size, self.timeout_s = size, timeout_s
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self._names = [0] if group is None else dist.get_process_group_ranks(group)
        self._fence = threading.Lock()
        self._address = 0
        self._files: list[int] = []
        mine, path = _anonymous_file(size)
        try:
            addresses: list[Any] = [(host(), path)]
            if group is not None and self.num_ranks > 1:
                addresses = [None] * self.num_ranks
                dist.all_gather_object(addresses, (host(), path), group=group)
            hosts = [name for name, _ in addresses]
            if len(set(hosts)) > 1:
                raise ValueError(
                    f"fusion=mega: the ranks that share experts are on several hosts "
                    f"({hosts[0].split()[0]}, {next(h for h in hosts if h != hosts[0]).split()[0]}) and memory is "
                    f"shared on one; set fusion=grouped dispatcher=alltoall"
                )
            for rank, (_, other) in enumerate(addresses):
                self._files.append(mine if rank == self.rank else os.open(other, os.O_RDWR))
            fcntl.lockf(mine, fcntl.LOCK_EX, 1)  # held until this process ends
            self._map()
            if group is not None and self.num_ranks > 1:
                dist.barrier(group=group)
        finally:
            if not path.startswith("/proc/"):
                os.unlink(path)

    def _map(self) -> None:
        self._libc = _libc()
        reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        total = self.size * self.num_ranks
        address = self._libc.mmap(None, total, mmap.PROT_READ, reserve, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"cannot reserve {total / 2**30:.0f} GiB of addresses")
        self._address = address
        for rank, file in enumerate(self._files):
            place = address + rank * self.size
            access = mmap.PROT_READ | mmap.PROT_WRITE
            if self._libc.mmap(place, self.size, access, mmap.MAP_SHARED | _FIXED, file, 0) != place:
                raise OSError(ctypes.get_errno(), f"cannot map {self.size / 2**30:.0f} GiB of shared memory")

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All windows as one vector; `size // itemsize` elements of each rank, one rank after another."""
        total = self.size * self.num_ranks
        buffer = (ctypes.c_byte * total).from_address(self._address)
        return torch.frombuffer(buffer, dtype=dtype, count=total // dtype.itemsize)

    def _flag(self, rank: int, flag: int) -> Any:
        return ctypes.c_int64.from_address(self._address + rank * self.size + (flag + 1) * _LINE)

    def signal(self, flag: int, value: int) -> None:
        """Raise one of this rank's flags, after everything that it has written."""
        with self._fence:  # orders what was written before what comes, on any processor
            pass
        self._flag(self.rank, flag).value = value

    def fail(self) -> None:
        """Tell the others not to wait for this rank."""
        if self._address:
            self.signal(_FAILED, 1)

    def value(self, rank: int, flag: int) -> int:
        """Read a rank's flag; after a wait for what was raised later, also the value that goes with it."""
        return self._flag(rank, flag).value

    def wait(self, rank: int, flag: int, at_least: int) -> None:
        """Wait until a rank's flag is at least that much; then what it wrote before can be read.

        Raises:
            PeerLost: It died, failed or took longer than the time-out.
        """
        place = self._flag(rank, flag)
        if place.value < at_least:
            self._wait(place, rank, at_least)
        with self._fence:
            pass

    def _wait(self, place: Any, rank: int, at_least: int) -> None:
        began = looked = time.monotonic()
        nap = 0.0
        while place.value < at_least:
            time.sleep(nap)  # 0 gives the core to whoever wants it
            now = time.monotonic()
            if now - began > _SPIN_S:
                nap = min(_LONGEST_NAP_S, nap + 10e-6)
            if now - looked > _LOOK_S:
                looked = now
                self._look_after(rank, now - began)

    def _look_after(self, rank: int, waited_s: float) -> None:
        what = None
        if self._flag(rank, _FAILED).value:
            what = "has failed"
        elif self._dead(rank):
            what = "has ended"
        elif waited_s > self.timeout_s:
            what = f"did not answer within {self.timeout_s:.0f} s (strategy.timeout_seconds)"
        if what is not None:
            raise PeerLost(f"fusion=mega: rank {self._names[rank]} of the expert-parallel group {what}")

    def _dead(self, rank: int) -> bool:
        """Whether nobody holds the lock on a rank's file."""
        if rank == self.rank:
            return False
        try:
            fcntl.lockf(self._files[rank], fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return False
        fcntl.lockf(self._files[rank], fcntl.LOCK_UN, 1)
        return True

    def close(self) -> None:
        """Give everything back. No tensor over the windows may be used any more."""
        if self._address:
            self._libc.munmap(self._address, self.size * self.num_ranks)
            self._address = 0
        for file in self._files:
            os.close(file)
        self._files = []


def _anonymous_file(size: int) -> tuple[int, str]:
    """A file of that many zeros that takes no memory yet; its descriptor, and how other processes open it."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("sidestream")
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="sidestream-")
    os.ftruncate(file, size)
    return file, path
