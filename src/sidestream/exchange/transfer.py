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
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.exchange.ops import Channel, new_ticket, start_, wait_


class Codec(Protocol):
    """How rows look on the wire. Neither method is differentiated: the gradient passes as if nothing was coded."""

    def encode(self, rows: Tensor) -> Tensor:
        """`[N, ...]` rows -> `[N, ...]` as they travel."""
        ...

    def decode(self, wire: Tensor, like: torch.dtype) -> Tensor:
        """`[R, ...]` as it travelled -> `[R, ...]` rows of dtype `like`. Rows nobody sent may hold anything."""
        ...


@dataclass(eq=False)
class Transfer:
    """One all-to-all of rows over a channel, with counts on the host.

    Args:
        channel: Where the rows travel.
        send_counts: `[ranks]` int64, host.
        recv_counts: `[ranks]` int64, host.
        tag: Name in spans and order logs; the reverse transfer is `tag + ".backward"`.
        layer: MoE layer, for errors.
        codec: Codes the rows, in forward; None sends them as they are.
        backward_codec: The same for their gradient, in backward.
    """

    channel: Channel
    send_counts: Tensor
    recv_counts: Tensor
    tag: str
    layer: int | None = None
    codec: Codec | None = None
    backward_codec: Codec | None = None
    _ticket: int = -1
    _reverse_ticket: int = -1
    _out: Tensor | None = field(default=None, repr=False)
    _reverse_out: Tensor | None = field(default=None, repr=False)
    _reverse_token: Tensor | None = field(default=None, repr=False)

    def start(self, x_NH: Tensor, *, num_received: int) -> Tensor:
        """Start; return the token to give to `finish`. `x_NH` is `[N, ...]`, ordered by destination rank.

        Counts may add up to less than N and `num_received`; what is past them is not sent, or not written.
        """
        return _Start.apply(x_NH, self, num_received)

    def finish(self, token: Tensor) -> Tensor:
        """Wait; return the received rows `[R, ...]`, ordered by source rank."""
        out, self._out = self._out, None
        return _Wait.apply(token, out, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer, num_received: int) -> Tensor:
        ctx.transfer, ctx.dtype = transfer, x.dtype
        t = transfer
        wire = t.codec.encode(x) if t.codec is not None else x.contiguous()
        t._ticket, t._out = new_ticket(t.layer), wire.new_empty((num_received, *wire.shape[1:]))
        start_(t._out, wire, t.send_counts, t.recv_counts, t.channel.id, t._ticket, t.tag)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        t = ctx.transfer
        out, t._reverse_out, token, t._reverse_token = t._reverse_out, None, t._reverse_token, None
        assert grad.data_ptr() == token.data_ptr(), "the token must have one user, its wait"
        wait_(out, t.channel.id, t._reverse_ticket)
        return out if t.backward_codec is None else t.backward_codec.decode(out, ctx.dtype), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, out: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer, ctx.sent_shape = transfer, token.shape
        wait_(out, transfer.channel.id, transfer._ticket)
        return out.detach() if transfer.codec is None else transfer.codec.decode(out, token.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        t = ctx.transfer
        wire = t.backward_codec.encode(grad) if t.backward_codec is not None else grad.contiguous()
        t._reverse_ticket = new_ticket(t.layer)
        t._reverse_out = out = wire.new_empty((ctx.sent_shape[0], *wire.shape[1:]))
        tag = f"{t.tag}.backward"
        start_(out, wire, t.recv_counts, t.send_counts, t.channel.id, t._reverse_ticket, tag)
        # What is still being filled goes back as the token's gradient, or stands behind one without memory.
        t._reverse_token = out if t.backward_codec is None else grad.new_empty(()).expand(ctx.sent_shape)
        return t._reverse_token, None, None
