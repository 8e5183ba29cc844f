"""The differentiable transfer: asynchronous in forward and in backward.

    token = start(x)        the rows leave                 backward: waits for the rows' gradient
    ...compute...           hides the transfer             ...its backward hides the reverse transfer...
    rows  = wait(token)     the rows are here              backward: starts the reverse transfer

The trick that makes backward asynchronous without a side channel: `start` returns a token that has the *shape of x*
but no memory, so the backward of `wait` may return a buffer that is still being filled as the token's gradient, and
the backward of `start` waits for it. Nothing reads it in between.

Shapes: N rows sent, R rows received, H features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.exchange.ops import Channel, new_ticket, start_, wait_


@dataclass(eq=False)
class Transfer:
    """One all-to-all of rows over a channel, with counts on the host.

    Args:
        channel: Where the rows travel.
        send_counts: `[ranks]` int64, host.
        recv_counts: `[ranks]` int64, host.
        tag: Name in spans and order logs; the reverse transfer is `tag + ".backward"`.
    """

    channel: Channel
    send_counts: Tensor
    recv_counts: Tensor
    tag: str
    _ticket: int = -1
    _reverse_ticket: int = -1
    _out: Tensor | None = field(default=None, repr=False)
    _reverse_out: Tensor | None = field(default=None, repr=False)

    def start(self, x_NH: Tensor, *, num_received: int) -> Tensor:
        """Start; return the token to give to `finish`. `x_NH` is `[N, ...]`, ordered by destination rank."""
        self._ticket = new_ticket()
        self._out = x_NH.new_empty((num_received, *x_NH.shape[1:]))
        return _Start.apply(x_NH, self)

    def finish(self, token: Tensor) -> Tensor:
        """Wait; return the received rows `[R, ...]`, ordered by source rank."""
        out, self._out = self._out, None
        return _Wait.apply(token, out, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        t = transfer
        start_(t._out, x.contiguous(), t.send_counts, t.recv_counts, t.channel.id, t._ticket, t.tag)  # type: ignore[arg-type]
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        t = ctx.transfer
        grad_x, t._reverse_out = t._reverse_out, None
        assert grad.data_ptr() == grad_x.data_ptr(), "the token must have one user, its wait"
        wait_(grad_x, t.channel.id, t._reverse_ticket)
        return grad_x, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, out: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer, ctx.sent_shape = transfer, token.shape
        wait_(out, transfer.channel.id, transfer._ticket)
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        t = ctx.transfer
        t._reverse_ticket = new_ticket()
        t._reverse_out = grad_x = grad.new_empty(ctx.sent_shape)
        start_(
            grad_x,
            grad.contiguous(),
            t.recv_counts,
            t.send_counts,
            t.channel.id,
            t._reverse_ticket,
            f"{t.tag}.backward",
        )
        return grad_x, None, None
