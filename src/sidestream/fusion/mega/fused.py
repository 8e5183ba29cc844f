"""`fusion=mega`: one operation does what dispatcher and experts do otherwise, and stands in the place of both.

    pending = mega.start(x, routing, weights)        every rank, in the same order
    ...compute...                                    a GPU works on both; on a CPU the operation is done by now
    y = pending.wait()                               [T, H], summed over k

Legend: T local tokens, K routes per token, H features, L local experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Pending, Routing
from sidestream.dispatch.counter import Counting, RowCounter
from sidestream.dispatch.library import PendingCall, known_weights
from sidestream.exchange.call import Call, CallChannel, lane_for
from sidestream.exchange.link import Link
from sidestream.fusion.mega.base import FusedLibrary
from sidestream.fusion.mega.choose import library_for

Library = Literal["auto", "windows", "triton", "mok"]


class MegaExperts(Counting):
    """Dispatch, experts and combine as one differentiable operation of a library.

    A `Fusion` that is its own `Dispatcher`: it counts rows and bytes and is wired and closed as one.

    Args:
        library: What does it. `auto`: `windows` on CPUs, `triton` on GPUs.
        capacity_factor: A number bounds the rows of a rank's result buffer to so many times the mean load; null makes
            room for the worst case, of which only what is used takes memory (`windows`).
        on_overflow: With a capacity_factor: `replay` the step with a larger budget, `drop`, or `error`.
        alignment: Rows of each expert are padded to a multiple.
        backend: A library object, instead of the named one.
    """

    name = "mega"
    replaces_dispatcher = True
    config_group = "fusion"  # that has the keys of the budget

    def __init__(
        self,
        *,
        library: Library = "auto",
        capacity_factor: float | None = None,
        on_overflow: Literal["replay", "drop", "error"] = "replay",
        alignment: int | Literal["auto"] = "auto",
        backend: FusedLibrary | None = None,
    ) -> None:
        self.library, self.capacity_factor, self.on_overflow = library, capacity_factor, on_overflow
        self.alignment: int | Literal["auto"] = alignment
        self._backend = backend
        self._channel: CallChannel | None = None
        self._counts: RowCounter | None = (
            None  # `counter`, if there is a budget; the library writes it in any case
        )

    # As a dispatcher

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        """See `Dispatcher.wire`."""
        if link.name != "native":
            raise ValueError(
                f"link={link.name}: fusion=mega moves rows where a link cannot slow it; set link=native"
            )
        if self._backend is None:
            self._backend = library_for(self.library, spec)
        self._backend.wire(group=group, spec=spec, capacity_factor=self.capacity_factor)
        self._channel = CallChannel(group, link, lane=lane_for(spec.device))
        self._spec = spec
        self._counts = RowCounter(spec.num_layers, spec.device)
        self.transport, self.budget = self.backend.transport, self.backend.budget
        self.counter = None if self.budget is None else self._counts

    @property
    def backend(self) -> FusedLibrary:
        """What does the work."""
        assert self._backend is not None, "wire() first"
        return self._backend

    @property
    def fuses_shared(self) -> bool:
        """The library computes the shared expert, too."""
        return self.backend.fuses_shared

    def resize(self, budget: int) -> None:
        """See `Dispatcher.resize`."""
        if self.budget is None:
            raise ValueError(f"fusion=mega: budget {budget} asked for, but it has no static budget")
        assert self._channel is not None and self._channel.pending == 0, "resize with calls in flight"
        self._channel.lane.synchronize()
        if budget > self.budget:
            self.backend.resize(budget)
            self.budget = self.backend.budget

    def bytes_sent(self) -> int:
        """Bytes that travelled for this rank; summed over ranks it is what was sent."""
        return self.backend.bytes_sent()

    def metadata_bytes_sent(self) -> int:
        """How many of `bytes_sent` are no rows: counts, expert ids, routing weights."""
        return self.backend.metadata_bytes_sent()

    def close(self) -> None:
        """Release buffers; collective."""
        if self._channel is None:
            return
        self._channel.lane.synchronize()
        super().close()
        self.backend.close()
        self._counts = self.transport = self.budget = None

    # As experts

    def start(
        self, x: Tensor, routing: Routing, weights: Sequence[Tensor], *, layer: int, recompute: bool
    ) -> Pending[Tensor]:
        """Start the routed path.

        Args:
            x: `[T, H]`.
            routing: The routing of these tokens.
            weights: Weights of the local experts, `[L, H, 2F]` and `[L, F, H]`, and those of the shared expert where
                the library computes it; in the dtype of `x`.
            layer: Index among the MoE layers.
            recompute: Keep no activation for the backward.

        Returns:
            What waits for `[T, H]`; differentiable in x, the routing weights and the experts' weights.
        """
        channel, counts, spec = self._channel, self._counts, self._spec
        assert channel is not None and counts is not None and spec is not None, "wire() first"
        if x.shape[0] > spec.max_tokens:
            raise ValueError(f"fusion=mega: {x.shape[0]} tokens, but windows are sized for {spec.max_tokens}")
        plan = self.backend.plan(layer=layer, keep=torch.is_grad_enabled(), recompute=recompute)
        row_weights = known_weights(routing)
        call = Call(
            channel,
            "mega",
            forward=plan.forward,
            outs=_like(x, extra=(counts.needed, counts.dropped)),
            backward=plan.backward,
            grads=_like(x, row_weights, *weights),
            again=self.backend.again,
        )
        tokens = call.start(x, row_weights, *weights, extra=(routing.expert_ids,))
        return PendingCall(call, tokens, lambda y: y)


def _like(*tensors: Tensor, extra: Sequence[Tensor] = ()) -> Callable[[], list[Tensor]]:
    """What makes contiguous tensors of the same shapes, and keeps nothing else alive; `extra` go behind them."""
    kinds = [(t.shape, t.dtype, t.device) for t in tensors]
    return lambda: [*(torch.empty(s, dtype=t, device=d) for s, t, d in kinds), *extra]
