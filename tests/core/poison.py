"""NaN wherever nobody may read: in fresh memory and past the last offset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sidestream.dispatch.base import Received

NAN = float("nan")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors are filled with NaN (integers: the largest), so whoever reads what nobody wrote is found out."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _PoisonTail(torch.autograd.Function):
    """Rows at and past `end` are `value`, and so is their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end: int, value: float) -> Tensor:
        ctx.end, ctx.value = end, value
        out = x.clone()
        out[end:] = value
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad.clone()
        grad[ctx.end :] = ctx.value
        return grad, None, None


def poison_rows(x: Tensor, offsets: Tensor, value: float = NAN) -> Tensor:
    """`[S, ...]` with `value` past the last offset, in this direction and in the gradient that comes back."""
    return _PoisonTail.apply(x, int(offsets[-1]), value)


def poison_tail(received: Received, value: float = NAN) -> Received:
    """The same with its tail poisoned, rows and weights, in both directions."""
    rows, weights = (poison_rows(t, received.offsets, value) for t in (received.rows, received.row_weights))
    return replace(received, rows=rows, row_weights=weights)
