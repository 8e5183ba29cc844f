"""Weight gradients that are computed later than the gradient of the rows.

    weight = late.token(weight)      forward, after the rows have left and before they are waited for
    ...                              backward runs in the opposite order:
    rows' gradient                   the experts' backward; it leaves rows and gradients in `late`
    reverse transfer starts
    weight gradient                  backward of the token, while the rows' gradient travels
    reverse transfer is waited for

Autograd runs what is ready in the reverse order of creation, so nothing but the place of the token is needed, and the
hooks that reduce gradients see the weight gradient where they always do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Late:
    """The gradient of one weight, put off.

    Attributes:
        around: Computes it, and may do something before and after.
    """

    def __init__(self) -> None:
        self._todo: list[Callable[[], Tensor]] = []
        self.around: Callable[[Callable[[], Tensor]], Tensor] = lambda compute: compute()

    def token(self, weight: Tensor) -> Tensor:
        """The weight, as it is to be used."""
        return _Token.apply(weight, self)

    def put_off(self, gradient: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Take note of how to compute the gradient; return what stands for it until then, without memory."""
        self._todo.append(gradient)
        return like.new_empty(()).expand(like.shape)

    def compute(self) -> Tensor:
        """The gradient: all that was put off, in that order."""
        assert self._todo, "no gradient was put off: the weight had another user"
        total = self._todo[0]()
        for gradient in self._todo[1:]:
            total += gradient()
        self._todo.clear()
        return total


class _Token(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: Late) -> Tensor:
        ctx.late = late
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.late.around(ctx.late.compute), None
