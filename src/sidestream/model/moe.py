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

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from sidestream.dispatch.base import Dispatcher, Received
from sidestream.fusion.base import Fused, Fusion
from sidestream.fusion.late import Late
from sidestream.model.config import ModelShape
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.layers import GatedSwiGLU, SwiGLU, run
from sidestream.model.ledger import Ledger
from sidestream.overlap.path import FusedPath, Path, RoutedPath
from sidestream.overlap.recorder import SILENT
from sidestream.routing.balance import Balance
from sidestream.routing.router import Routed, Router
from sidestream.routing.scores import jitter, z_loss


@dataclass(frozen=True)
class MoEParts:
    """What an MoE layer is assembled from. One dispatcher serves all layers.

    Attributes:
        expert_range: First and past-the-last global id of this rank's experts.
        tokens_per_plan: No plan of the dispatcher has more tokens.
        fused: Does the whole routed path in one operation; then it is the dispatcher and the fusion, too.
    """

    router: Router
    balance: Balance
    dispatcher: Dispatcher
    fusion: Fusion
    expert_range: tuple[int, int]
    tokens_per_plan: int = 0
    fused: Fused | None = None


def _bias_against(avoid: Tensor, logits_TE: Tensor, bias: Tensor | None) -> Tensor:
    """`[T, E]`: the selection bias, and minus infinity at the experts to avoid."""
    out = torch.zeros_like(logits_TE) if bias is None else bias.expand_as(logits_TE).clone()
    column = torch.where(avoid < 0, out.shape[1], avoid)
    return F.pad(out.detach(), (0, 1)).scatter_(1, column, -torch.inf)[:, :-1]


@dataclass(frozen=True)
class LateWeights:
    """Gate-up and down weights of the local experts, and where their gradients are put off."""

    weights: tuple[Tensor, Tensor]
    gradients: tuple[Late, Late]


class Experts(nn.Module):
    """Stacked weights of the local experts; under expert parallelism DTensors, `Shard(0)` on the `ep` axis."""

    def __init__(self, shape: ModelShape, *, num_local: int, fusion: Fusion) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.expert_hidden_size
        self.w_gate_up = nn.Parameter(torch.empty(num_local, hidden, 2 * width))
        self.w_down = nn.Parameter(torch.empty(num_local, width, hidden))
        self.fusion, self.recompute = fusion, shape.activation_checkpointing
        self.recorder = SILENT

    def forward(self, received: Received | torch.dtype, late: LateWeights | None = None) -> Any:
        """Rows `[S, H]` -> `[S, H]` in the dtype of the rows.

        Called with a dtype, it hands out the weights for a fused path: `fully_shard` gathers them where a module is
        called, and nowhere else.
        """
        if isinstance(received, torch.dtype):
            return self.weights(received)
        return self.recorder.experts(self._compute, received, late)

    def _compute(self, received: Received, late: LateWeights | None) -> Tensor:
        if late is None:
            arguments: tuple[Any, ...] = self.weights(received.rows.dtype)
        else:
            arguments = (*late.weights, late.gradients)
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.fusion, received, *arguments, use_reentrant=False)
        return self.fusion(received, *arguments)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Gate-up and down weights of the local experts."""
        return local(self.w_gate_up).to(dtype), local(self.w_down).to(dtype)

    def late_weights(self, dtype: torch.dtype) -> LateWeights:
        """The weights as `forward` takes them to compute their gradients late, see `fusion.late`.

        Args:
            dtype: Dtype of the rows.
        """
        return self.recorder.late_weights(self._late_weights, dtype, self.w_gate_up)

    def _late_weights(self, dtype: torch.dtype) -> LateWeights:
        gradients = (Late(), Late())
        weights = (
            gradients[0].token(local(self.w_gate_up).to(dtype)),
            gradients[1].token(local(self.w_down).to(dtype)),
        )
        return LateWeights(weights, gradients)


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
        # Gate and bias are fp32 in every precision: rounding them changes choices.
        self.gate = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size, dtype=torch.float32))
        first, last = parts.expert_range
        self.experts = Experts(shape, num_local=last - first, fusion=parts.fusion)
        shared = GatedSwiGLU if shape.shared_expert_gate else SwiGLU
        self.shared_expert = shared(shape.hidden_size, shape.shared_width) if shape.shared_width else None
        self.recompute = shape.activation_checkpointing
        self.recorder = SILENT
        # Updated in place at commit, never replaced: savers hold this very tensor.
        self.register_buffer("selection_bias", torch.zeros(shape.num_experts, dtype=torch.float32))
        self.jitter = getattr(parts.router, "jitter", 0.0)
        self._numbers = "first" in inspect.signature(parts.router).parameters
        # A schedule need not say it to its paths: one that forgets would call a run serial that is not.
        self.runs_serially: Callable[[], bool] = lambda: False
        if parts.balance.observes:
            ledger.make_room_to_observe()

    def routed_path(
        self,
        x: Tensor,
        context: TokenContext = PLAIN,
        *,
        serial: bool | None = None,
        delay_wgrad: bool = False,
        avoid: Tensor | None = None,
    ) -> Path:
        """Route `x` `[B, S, H]` and return the path, nothing of which has started but the exchange of counts.

        Args:
            x: What gate and routed experts read.
            context: Documents and padding of its tokens.
            serial: See `RoutedPath`; None: where the schedule has `enabled=False`.
            delay_wgrad: See `RoutedPath`.
            avoid: `[T, K]` int64, experts that a token must not choose, -1 for none.
        """
        routed = self.route(x, context, avoid=avoid)
        self.report(routed)
        return self.path(routed, serial=serial, delay_wgrad=delay_wgrad)

    def route(self, x: Tensor, context: TokenContext = PLAIN, *, avoid: Tensor | None = None) -> Routed:
        """The router's decision for `x` `[B, S, H]`, without anything else."""
        return self.recorder.router(partial(self._route, context=context, avoid=avoid), x)

    def _route(self, x: Tensor, *, context: TokenContext, avoid: Tensor | None) -> Routed:
        x_TH = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            gate_input = x_TH.float()
            if self.training and self.jitter:
                gate_input = jitter(gate_input, self.jitter)
            logits_TE = gate_input @ self.gate.float().t()
            bias = self.selection_bias if self.parts.balance.uses_bias else None
            if avoid is not None:
                bias = _bias_against(avoid, logits_TE, bias)
            decision = self.parts.router(
                logits_TE, selection_bias=bias, valid=context.valid, **self._number(logits_TE, context.valid)
            )
        if torch.is_autocast_enabled(x.device.type):
            x_TH = x_TH.to(torch.get_autocast_dtype(x.device.type))
        return Routed(x_TH, decision, logits_TE, x.shape[1])

    def _number(self, logits_TE: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """What a router that numbers tokens must know; see `Router`."""
        if not self._numbers:
            return {}
        return {"first": self.ledger.deal(self.layer, num_tokens=len(logits_TE), valid=valid)}

    def path(self, routed: Routed, *, serial: bool | None = None, delay_wgrad: bool = False) -> Path:
        """The path of a decision; arguments as for `routed_path`."""
        serial = self.runs_serially() if serial is None else serial
        if self.parts.fused is not None:
            return self._fused_path(self.parts.fused, routed, serial=serial)
        return RoutedPath(
            routed.x_TH,
            routed.decision.routing,
            dispatcher=self.parts.dispatcher,
            experts=self.experts,
            layer=self.layer,
            serial=serial,
            delay_wgrad=delay_wgrad,
            recorder=self.recorder,
        )

    def _fused_path(self, fused: Fused, routed: Routed, *, serial: bool) -> FusedPath:
        dtype = routed.x_TH.dtype
        weights = self.experts(dtype)
        if fused.fuses_shared:
            assert self.shared_expert is not None
            weights += tuple(local(w).to(dtype) for w in self.shared_expert.parameters())
        begin = partial(
            fused.start,
            routing=routed.decision.routing,
            weights=weights,
            layer=self.layer,
            recompute=self.experts.recompute,
        )
        return FusedPath(routed.x_TH, routed.decision.routing, begin=begin, serial=serial)

    def report(self, *parts: Routed) -> None:
        """Write into the ledger what balancing and metrics need, of the parts of one micro-batch together."""
        if not self.training:
            return
        routed = parts[0] if len(parts) == 1 else Routed.joined(parts)
        decision, ledger, balance = routed.decision, self.ledger, self.parts.balance
        with torch.autocast(routed.x_TH.device.type, enabled=False):
            ledger.counts[self.layer] += decision.counts
            if decision.dropped is not None:
                ledger.dropped[self.layer] += decision.dropped
            if balance.observes:
                ledger.observed[self.layer] += balance.observe(decision, self.selection_bias)
            if balance.z_loss_coefficient:
                ledger.z.append(z_loss(routed.logits_TE, decision.valid))
            if balance.needs_global_counts:
                ledger.probs.append(decision.probs.sum(dim=0))
            elif (aux := balance.loss(decision, seq_length=routed.seq_length)) is not None:
                ledger.aux.append(aux)

    def shared(self, x: Tensor) -> Tensor:
        """The shared experts on `x` `[B, S, H]`; zeros if there are none, or where the routed path computes them."""
        if self.shared_expert is None or (self.parts.fused is not None and self.parts.fused.fuses_shared):
            return torch.zeros_like(x)
        shared = partial(run, self.shared_expert, recompute=self.recompute)
        return self.recorder.part("shared", shared, x)

    def shared_up(self, x: Tensor) -> Tensor:
        """The first part of `shared`: up to the activation."""
        assert self.shared_expert is not None
        return self.recorder.part(
            "shared_up", partial(run, self.shared_expert.up, recompute=self.recompute), x
        )

    def shared_down(self, inner: Tensor, x: Tensor) -> Tensor:
        """The rest of `shared`, from what `shared_up` returned; the two together are bitwise equal to it."""
        assert self.shared_expert is not None
        down = partial(run, self.shared_expert.out, recompute=self.recompute)
        return self.recorder.part("shared_down", down, inner, x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """`.to(...)`: the layer moves and its experts are cast, but gate and selection bias stay fp32."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        # What is left are those two. Casts pass integers by, so they travel under an integer view.
        return super()._apply(lambda t: fn(t.view(torch.int32)).view(torch.float32), recurse=False)
