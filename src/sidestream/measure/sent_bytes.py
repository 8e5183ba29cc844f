"""Bytes that a rank sends to other ranks, counted in torch's collectives by one formula for every arm."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# operator -> place of what is sent among its arguments, place of the rows for each rank
_ALL_TO_ALL = {
    "c10d::alltoall_base_": (1, 4),
    "_c10d_functional::all_to_all_single": (0, 2),
    "sidestream::start_": (1, 2),  # what it calls inside is hidden from a dispatch mode
}
_GATHER = {"c10d::_allgather_base_": 1, "c10d::allgather_": 1, "_c10d_functional::all_gather_into_tensor": 0}
_SCATTER = {"c10d::_reduce_scatter_base_": 1, "_c10d_functional::reduce_scatter_tensor": 0}
_REDUCE = {"c10d::allreduce_": 0, "_c10d_functional::all_reduce": 0}
_NAMESPACES = ("c10d::", "_c10d_functional::", "sidestream::")
_SILENT = (
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "sidestream::wait_",
    "sidestream::call_",  # only its dispatcher knows
    "sidestream::wait_call_",
)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(item) for item in value)


class CountBytes(TorchDispatchMode):
    """While entered, adds up what this rank would send over a full mesh of point-to-point links.

    All-to-all: the rows for other ranks. All-gather: the input once per other rank. Reduce-scatter: all of the input
    but the own part. All-reduce: twice that. How a transport really moves them may differ.

    Attributes:
        sent: Bytes so far.
        calls: There were calls of a library, whose bytes are not among them.

    Raises:
        NotImplementedError: A collective that is in none of the tables above.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.calls = 0, False
        self.world, self.rank = dist.get_world_size(), dist.get_rank()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.calls |= name == "sidestream::call_"
        if name.startswith(_NAMESPACES) and name not in _SILENT:
            self.sent += self._sent(name, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> int:
        if name in _ALL_TO_ALL:
            x, splits = (args[place] for place in _ALL_TO_ALL[name])
            total = x.shape[0]
            if total == 0:
                return 0
            # A buffer may be larger than what the counts say travels.
            rows = [int(split) for split in splits] if len(splits) else [total // self.world] * self.world
            return _bytes(x) // total * (sum(rows) - rows[self.rank])
        if name in _GATHER:
            return _bytes(args[_GATHER[name]]) * (self.world - 1)
        if name in _SCATTER:
            return _bytes(args[_SCATTER[name]]) * (self.world - 1) // self.world
        if name in _REDUCE:
            return 2 * _bytes(args[_REDUCE[name]]) * (self.world - 1) // self.world
        raise NotImplementedError(f"bytes sent by {name}")
