"""What a fused library is: dispatch, experts and combine of one routing as one operation, and its reverse.

    y = forward(x, weights, w_gate_up, w_down, ids)                [T, H] -> [T, H]
    dx, dweights, dw_gate_up, dw_down = backward(dy, ...)

Parameters, optimizer and checkpoint know nothing of it: the weights come as the native experts hold them.

Legend: T local tokens, K routes per token, H features, L local experts, F expert width, R ranks, S slots (rows of the
local experts, expert-major, padding included).
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec


class FusedPlan(Protocol):
    """One routing. Its two calls are made once each, on every rank in the same order, and may be repeated in pairs."""

    def forward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """Run the layer.

        Args:
            outs: Filled. y `[T, H]`; needed and dropped, `[num_layers]` int64, of which the layer's entries are
                raised (see `Dispatcher.needed`).
            ins: x `[T, H]`, weights `[T, K]` fp32, w_gate_up `[L, H, 2F]` (gate, then up), w_down `[L, F, H]`, the
                weights of the shared expert where `fuses_shared` (gate_up `[2F, H]`, down `[H, F]`), ids `[T, K]`
                int64 with -1 for no route. None of them may be kept beyond the call but those named in `again`.
        """
        ...

    def backward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """Run the reverse.

        Args:
            outs: Filled: the gradients of the inputs of `forward` but ids, in that order.
            ins: The gradient of y, then the inputs of `forward` that `again` names.
        """
        ...


class FusedLibrary(Protocol):
    """A way to do it.

    Attributes:
        name: Its value of `fusion.library`.
        transport: What the rows travel through, as results record it.
        budget: Rows of this rank's result buffer, once wired; None: nothing can overflow.
        again: Places of the inputs of `forward` that `backward` takes once more.
        fuses_shared: It computes the shared expert, too.
    """

    name: str
    transport: str
    budget: int | None
    again: tuple[int, ...]
    fuses_shared: bool

    def wire(
        self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, capacity_factor: float | None
    ) -> None:
        """Collective, once.

        Args:
            group: The ranks that share the experts; rank r holds experts `[r L, (r + 1) L)`.
            spec: Sizes. `spec.dtype` is that of rows and weights.
            capacity_factor: Budget over the mean load (`dispatch.base.receive_budget`); None: the largest need.

        Raises:
            ValueError: It cannot run here; one line with the override that fixes it.
        """
        ...

    def plan(self, *, layer: int, keep: bool, recompute: bool) -> FusedPlan:
        """A plan of a routing.

        Args:
            layer: Entry of the counters.
            keep: A backward will come.
            recompute: Keep no activation for it.
        """
        ...

    def resize(self, budget: int) -> None:
        """Room for at least so many rows; collective, no plan in flight."""
        ...

    def bytes_sent(self) -> int:
        """Bytes that travelled for this rank so far; summed over ranks, all of them. 0 where a library does not say."""
        ...

    def metadata_bytes_sent(self) -> int:
        """How many of `bytes_sent` are no rows: counts, expert ids, routing weights."""
        ...

    def close(self) -> None:
        """Release everything; collective."""
        ...
