"""`fork`: one tensor for several branches, with a gradient that does not depend on the schedule."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _Fork(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(n))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        return total, None


def fork(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """Return n views of `x`. Their gradients are summed in the order of the views.

    Without it autograd sums them in the order in which the branches finish backward, which differs between a serial
    and an overlapped schedule, and floating-point sums with it.
    """
    return _Fork.apply(x, n)
