"""Memory that the ranks of an expert-parallel group address alike: the same bytes on each, and a table of addresses.

    bases[r] + offset          that place in the memory of rank r; kernels read and write it like any other

`DeviceMemory` is PyTorch's symmetric memory (NVLink); it has never been run here. `SharedMemory` is shared memory of
one host, for kernels under Triton's interpreter. Both begin as zeros, on every rank before `open_memory` returns.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.fusion.mega.window_memory import PAGE, Windows, host

ELSEWHERE = "set fusion=grouped dispatcher=alltoall"


class SymmetricMemory(Protocol):
    """Memory that all ranks of a group can address.

    Attributes:
        rank: This process's rank in the group.
        num_ranks: Size of the group.
        bases: `[R]` int64 on the device: the address of every rank's memory, as this rank sees it.
    """

    rank: int
    num_ranks: int
    bases: Tensor

    def local(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        """This rank's own memory from a byte offset on; a view that must not outlive the memory."""
        ...

    def look_after(self, waited_s: float) -> None:
        """Called while the interpreter waits. Raises PeerLost if that is in vain."""
        ...

    def fail(self) -> None:
        """Tell the others not to wait for this rank, where they can hear it."""
        ...

    def close(self) -> None:
        """Give it back; collective, nothing in flight."""
        ...


def open_memory(
    group: dist.ProcessGroup | None, *, size: int, device: torch.device, timeout_s: float
) -> SymmetricMemory:
    """Memory of a group. Collective.

    Args:
        group: None: this rank alone.
        size: Bytes per rank; equal on all.
        device: This rank's device.
        timeout_s: How long to wait for another rank, where waiting can be ended.

    Raises:
        ValueError: The ranks cannot read each other's memory.
    """
    if device.type == "cpu":
        return SharedMemory(group, size=size, timeout_s=timeout_s)
    return DeviceMemory(group, size=size, device=device)


class SharedMemory:
    """Symmetric memory of the ranks of one host, over `Windows`."""

    def __init__(self, group: dist.ProcessGroup | None, *, size: int, timeout_s: float) -> None:
        self._group, self._failed = group, False
        # The first page is the windows' own: their flag that says a rank gave up.
        self._windows = Windows(group, size=PAGE + -(-size // PAGE) * PAGE, num_flags=0, timeout_s=timeout_s)
        self.rank, self.num_ranks = self._windows.rank, self._windows.num_ranks
        start = self._windows.tensor(torch.uint8).data_ptr() + PAGE
        self.bases = start + self._windows.size * torch.arange(self.num_ranks)

    def local(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        begin = self.rank * self._windows.size + PAGE + offset
        return self._windows.tensor(torch.uint8)[begin : begin + count * dtype.itemsize].view(dtype)

    def look_after(self, waited_s: float) -> None:
        for rank in range(self.num_ranks):
            if rank != self.rank:
                self._windows._look_after(rank, waited_s)

    def fail(self) -> None:
        self._failed = True
        self._windows.fail()

    def close(self) -> None:
        if self._group is not None and not self._failed:
            dist.barrier(group=self._group)  # a rank that had nothing to wait for is done before the others
        self._windows.close()


class DeviceMemory:
    """Symmetric memory of the GPUs of one NVLink domain.

    A GPU cannot be asked who waits for it: `look_after` and `fail` do nothing.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, size: int, device: torch.device) -> None:
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self._handle: Any = None
        if group is None:
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            addresses = [self._buffer.data_ptr()]
        else:
            addresses = self._rendezvous(group, size, device)
        self.bases = torch.tensor(addresses, dtype=torch.int64, device=device)

    def _rendezvous(self, group: dist.ProcessGroup, size: int, device: torch.device) -> list[int]:
        from torch.distributed import _symmetric_memory as symmetric

        problem, addresses = "", []
        try:
            self._buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
            self._buffer.zero_()
            self._handle = symmetric.rendezvous(self._buffer, group)
            # Not `buffer_ptrs`: these are of the allocation, of which the buffer may be a part.
            others = [
                self._handle.get_remote_tensor(rank, (size,), torch.uint8) for rank in range(self.num_ranks)
            ]
            addresses = [other.data_ptr() for other in others]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        # One rank's trouble is everyone's. This is also the barrier after the zeros.
        told: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(told, (host().split()[0], problem), group=group)
        if any(text for _, text in told):
            name, text = next(item for item in told if item[1])
            raise ValueError(
                f"fusion.library=triton: the GPUs that share experts cannot read each other's memory, they need one "
                f"NVLink domain ({name}: {text}); {ELSEWHERE}"
            )
        return addresses

    def local(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return self._buffer[offset : offset + count * dtype.itemsize].view(dtype)

    def look_after(self, waited_s: float) -> None:
        pass

    def fail(self) -> None:
        pass

    def close(self) -> None:
        torch.cuda.synchronize()
        if self._handle is not None:
            self._handle.barrier(channel=0)  # nobody reads what goes away
            torch.cuda.synchronize()
        self._handle = None
        del self._buffer
