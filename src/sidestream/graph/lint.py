"""`HostReadLint`: every place where a step makes the host wait for the device, with file and line.

    with HostReadLint() as lint:
        step.attempt(batch)          # forward and backward
    for line in summarize(lint.reads):
        print(line)                  # dispatch/alltoall.py:53 tolist (forward, 2x)

A dispatch mode sees the operators whose value or output shape the host must know. On a CPU it does not see `tolist`,
`cpu` and `numpy`, so the methods of `Tensor` that read are patched as well, and patches also hold inside the backward
of a custom `autograd.Function`.

On a laptop every tensor counts as one of the device, so the same code reports what would block on a GPU. Once an
operator has run on an accelerator, reads of host tensors are left out: they block nothing.

Not seen: reads inside a compiled kernel, such as those of `F.grouped_mm` on a GPU in other dtypes than bf16
(`torch.cuda.set_sync_debug_mode` shows them), and copies to the device. Seen on a CPU only: the check of the ids in
`F.one_hot`.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.graph.findings import Finding, in_backward, place


@dataclass(frozen=True)
class HostRead:
    """One read.

    Attributes:
        kind: Method of `Tensor` (`tolist`) or operator (`nonzero`).
        file: Path of the nearest source file on the stack that belongs to no library.
        line: Line in it, from 1; 0 if no such file is on the stack (an operator's own backward on a GPU).
        function: Qualified name of the function there.
        phase: "forward" or "backward".
        device: Device type of the tensor that was read.
    """

    kind: str
    file: str
    line: int
    function: str
    phase: str
    device: str


_METHODS = (
    "item", "tolist", "cpu", "numpy", "__array__", "__dlpack__", "__bool__", "__int__", "__float__", "__index__",
    "__complex__", "__repr__",
)  # fmt: skip
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_UNTAGGED = {"equal", "allclose", "unique_dim_consecutive", "_linalg_check_errors"}
_SHAPES = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "index",
    "repeat_interleave", "bincount", "index_put", "index_put_", "_index_put_impl_",
}  # fmt: skip
_COPIES = {"copy_", "_to_copy"}
_INDEX_WRITES = {"index_put", "index_put_", "_index_put_impl_"}
_HOST = ("cpu", "meta")
_SYNCHRONISING = (
    (torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"),
    (torch.distributed, "barrier"), (torch.distributed, "monitored_barrier"),
)  # fmt: skip


class _Here(threading.local):
    """What this thread is inside of."""

    reading = False  # a patched method: its own operators and methods are the same read
    exchanging = False  # an exchange operator: its counts are host tensors by contract


class HostReadLint(TorchDispatchMode):
    """Context manager around forward and backward of a step. Use each instance once, one at a time.

    Reads count in the thread that entered and in threads that run a backward (autograd has its own for a GPU); what a
    progress bar or a data loader reads meanwhile does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reads: list[HostRead] = []
        self._uses_accelerator = False
        self._here = _Here()
        self._owner = 0
        self._own_methods: dict[str, Any] = {}
        self._synchronising: list[Finding] = []
        self._own_calls: list[tuple[Any, str, Any]] = []

    @property
    def reads(self) -> list[HostRead]:
        """The reads in the order in which they happened."""
        return [r for r in self._reads if not self._uses_accelerator or r.device not in _HOST]

    @property
    def findings(self) -> list[Finding]:
        """The same as findings: operators of unknown output size are "data-dependent shape"."""
        return [
            Finding(
                "data-dependent shape" if r.kind in _SHAPES else "host read",
                r.kind,
                r.file,
                r.line,
                r.function,
                r.phase,
            )
            for r in self.reads
        ] + self._synchronising

    def __enter__(self) -> HostReadLint:
        super().__enter__()
        self._owner = threading.get_ident()
        for name in _METHODS:
            self._own_methods[name] = Tensor.__dict__.get(name)  # None: inherited from the C base
            setattr(Tensor, name, self._watched(name, getattr(Tensor, name)))
        for owner, name in _SYNCHRONISING:
            original = getattr(owner, name)
            self._own_calls.append((owner, name, original))
            setattr(owner, name, self._noted(f"{owner.__name__}.{name}", original))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, method in self._own_methods.items():
            if method is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)
        for owner, name, original in self._own_calls:
            setattr(owner, name, original)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(a, Tensor) and a.device.type not in _HOST for a in args):
            self._uses_accelerator = True
        source = _source_of_read(func, args, kwargs)
        if source is not None and not self._here.reading:
            self._record(_name(func), source)
        if func.namespace != "sidestream":
            return func(*args, **kwargs)
        self._here.exchanging = True
        try:
            return func(*args, **kwargs)
        finally:
            self._here.exchanging = False

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            here = self._here
            if here.reading or not self._counts_here(tensor):
                return original(tensor, *args, **kwargs)
            here.reading = True
            try:
                value = original(tensor, *args, **kwargs)
            finally:
                here.reading = False
            self._record(name, tensor)  # a call that raised has read nothing
            return value

        return method

    def _noted(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._owner or in_backward():
                self._synchronising.append(Finding.here("synchronising call", what))
            return original(*args, **kwargs)

        return call

    def _counts_here(self, tensor: Tensor) -> bool:
        if self._here.exchanging and tensor.device.type in _HOST:
            return False
        return threading.get_ident() == self._owner or in_backward()

    def _record(self, kind: str, tensor: Tensor) -> None:
        phase = "backward" if in_backward() else "forward"
        self._reads.append(HostRead(kind, *place(), phase, tensor.device.type))


def _name(func: Any) -> str:
    return func._schema.name.partition("::")[2]


def _source_of_read(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that the host must see before the operator can go on; None if there is none."""
    name = _name(func)
    if name in _COPIES:
        source = args[1] if name == "copy_" else args[0]
        return source if _leaves_device(name, args, kwargs) else None
    if name in _INDEX_WRITES:
        return args[0] if _has_mask(args[1]) and not _is_fill(args, kwargs) else None
    if not _TAGS.intersection(func.tags) and name not in _UNTAGGED:
        return None
    if name == "index" and not _has_mask(args[1]):
        return None
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    return args[0]


def _has_mask(indices: Iterable[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _is_fill(args: Any, kwargs: Any) -> bool:
    """`x[mask] = 0.0` becomes a masked fill, which needs no count."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return args[2].numel() == 1 and not accumulate


def _leaves_device(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a copy goes from the device to the host and blocks."""
    if name == "copy_":
        source, target = args[1].device, args[0].device
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    else:
        source, target = args[0].device, kwargs.get("device") or args[0].device
        non_blocking = kwargs.get("non_blocking", False)
    return source.type not in _HOST and torch.device(target).type == "cpu" and not non_blocking


def summarize(reads: Iterable[HostRead]) -> list[str]:
    """One line per place, kind and phase, in the order of first occurrence."""
    places = Counter((r.file, r.line, r.kind, r.phase) for r in reads)
    return [
        f"{'/'.join(Path(file).parts[-2:])}:{line} {kind} ({phase}, {count}x)"
        for (file, line, kind, phase), count in places.items()
    ]
