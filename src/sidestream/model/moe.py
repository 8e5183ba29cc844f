"""The MoE layer: gate, routed path, shared experts.

    logits = x @ gate                       fp32
    ids, weights = router(logits)           top-k
    rows = dispatch(x)                      to the ranks that own the experts
    out  = experts(rows, weights)
    y    = combine(out)                     back, summed over k
    y   += shared(x)

Legend: T tokens, H features, E experts in total, L local experts, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sidestream.dispatch.base import Dispatcher, Received
from sidestream.fusion.base import Fusion
from sidestream.model.config import ModelShape
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.layers import GatedSwiGLU, SwiGLU, run
from sidestream.model.ledger import Ledger
from sidestream.overlap.path import RoutedPath
from sidestream.routing.balance import Balance
from sidestream.routing.router import Decision, Router
from sidestream.routing.scores import jitter, z_loss


@dataclass(frozen=True)
class MoEParts:
    """What an MoE layer is assembled from. One dispatcher serves all layers.

    Attributes:
        expert_range: First and past-the-last global id of this rank's experts.
    """

    router: Router
    balance: Balance
    dispatcher: Dispatcher
    fusion: Fusion
    expert_range: tuple[int, int]


class Experts(nn.Module):
    """Stacked weights of the local experts; under expert parallelism DTensors, `Shard(0)` on the `ep` axis."""

    def __init__(self, shape: ModelShape, *, num_local: int, fusion: Fusion) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.expert_hidden_size
        self.w_gate_up = nn.Parameter(torch.empty(num_local, hidden, 2 * width))
        self.w_down = nn.Parameter(torch.empty(num_local, width, hidden))
        self.fusion, self.recompute = fusion, shape.activation_checkpointing

    def forward(self, received: Received) -> Tensor:
        """Rows `[S, H]` -> `[S, H]` in the dtype of the rows."""
        dtype = received.rows.dtype
        w_gate_up, w_down = local(self.w_gate_up).to(dtype), local(self.w_down).to(dtype)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.fusion, received, w_gate_up, w_down, use_reentrant=False)
        return self.fusion(received, w_gate_up, w_down)


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class MoE(nn.Module):
    """Routed experts and shared experts of one block.

    Args:
        shape: Model shape.
        parts: Router, balance, dispatcher, fusion.
        layer: Index among the MoE layers, row of the ledger.
        ledger: Where routing statistics and auxiliary losses go.
    """

    selection_bias: Tensor

    def __init__(self, shape: ModelShape, parts: MoEParts, *, layer: int, ledger: Ledger) -> None:
        super().__init__()
        self.parts, self.layer, self.ledger = parts, layer, ledger
        # Gate and bias are fp32 in every precision: rounding them changes choices (cases d1, d3).
        self.gate = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size, dtype=torch.float32))
        first, last = parts.expert_range
        self.experts = Experts(shape, num_local=last - first, fusion=parts.fusion)
        shared = GatedSwiGLU if shape.shared_expert_gate else SwiGLU
        self.shared_expert = shared(shape.hidden_size, shape.shared_width) if shape.shared_width else None
        self.recompute = shape.activation_checkpointing
        # Updated in place at commit, never replaced: savers hold this very tensor (case g2).
        self.register_buffer("selection_bias", torch.zeros(shape.num_experts, dtype=torch.float32))
        self.jitter = getattr(parts.router, "jitter", 0.0)
        if parts.balance.observes:
            ledger.make_room_to_observe()

    def routed_path(self, x: Tensor, context: TokenContext = PLAIN) -> RoutedPath:
        """Route `x` `[B, S, H]` and return the path, nothing of which has started but the exchange of counts."""
        seq_length = x.shape[1]
        x_TH = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            gate_input = x_TH.float()
            if self.training and self.jitter:
                gate_input = jitter(gate_input, self.jitter)
            logits_TE = gate_input @ self.gate.float().t()
            bias = self.selection_bias if self.parts.balance.uses_bias else None
            decision = self.parts.router(logits_TE, selection_bias=bias, valid=context.valid)
            if self.training:
                self._report(decision, logits_TE, seq_length=seq_length)
        if torch.is_autocast_enabled(x.device.type):
            x_TH = x_TH.to(torch.get_autocast_dtype(x.device.type))
        return RoutedPath(
            x_TH,
            decision.routing,
            dispatcher=self.parts.dispatcher,
            experts=self.experts,
            layer=self.layer,
        )

    def _report(self, decision: Decision, logits: Tensor, *, seq_length: int) -> None:
        """Write into the ledger what balancing and metrics need."""
        ledger, balance = self.ledger, self.parts.balance
        ledger.counts[self.layer] += decision.counts
        if decision.dropped is not None:
            ledger.dropped[self.layer] += decision.dropped
        if balance.observes:
            ledger.observed[self.layer] += balance.observe(decision, self.selection_bias)
        if balance.z_loss_coefficient:
            ledger.z.append(z_loss(logits, decision.valid))
        if balance.needs_global_counts:
            ledger.probs.append(decision.probs.sum(dim=0))
        elif (aux := balance.loss(decision, seq_length=seq_length)) is not None:
            ledger.aux.append(aux)

    def shared(self, x: Tensor) -> Tensor:
        """The shared experts on `x` `[B, S, H]`; zeros if there are none."""
        if self.shared_expert is None:
            return torch.zeros_like(x)
        return run(self.shared_expert, x, recompute=self.recompute)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """`.to(...)`: the layer moves and its experts are cast, but gate and selection bias stay fp32 (case d1)."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        # What is left are those two. Casts pass integers by, so they travel under an integer view.
        return super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32), recurse=False)
