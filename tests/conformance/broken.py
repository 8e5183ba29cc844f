"""Parts that break one promise each, as a user might write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.alltoall import AllToAllDispatcher
from sidestream.dispatch.base import Received, Routing
from sidestream.fusion.grouped import GroupedExperts
from sidestream.overlap.fork import fork
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.routing.balance import AuxLoss, ExpertBias
from sidestream.routing.quantile import QuantileBalance
from sidestream.routing.router import Decision, SoftmaxRouter, count_routes


class MyRouter(SoftmaxRouter):
    """Keeps every promise."""


class Edited(SoftmaxRouter):
    """`edit` changes the decision."""

    def __call__(self, logits: Tensor, **options: Any) -> Any:
        return self.edit(super().__call__(logits, **options))

    def edit(self, decision: Decision) -> Any:
        return decision

    def with_ids(self, decision: Decision, ids: Tensor) -> Decision:
        counts = count_routes(
            ids.clamp(max=decision.counts.numel() - 1).unsqueeze(0), decision.counts.numel()
        )
        return replace(
            decision,
            routing=Routing(ids, decision.routing.weights),
            chosen=None,
            counts=counts.squeeze(0),
        )


class Twice(Edited):
    def edit(self, decision: Decision) -> Any:
        return self.with_ids(decision, decision.routing.expert_ids[:, :1].repeat(1, self.top_k))


class OutOfRange(Edited):
    def edit(self, decision: Decision) -> Any:
        ids = decision.routing.expert_ids
        return self.with_ids(decision, torch.where(ids == 0, decision.counts.numel() + 2, ids))


class ShortIds(Edited):
    def edit(self, decision: Decision) -> Any:
        routing = decision.routing
        return replace(decision, routing=Routing(routing.expert_ids.int(), routing.weights))


class WrongCounts(Edited):
    def edit(self, decision: Decision) -> Any:
        return replace(decision, counts=decision.counts.roll(1) + 1)


class NanWeights(Edited):
    def edit(self, decision: Decision) -> Any:
        routing = decision.routing
        return replace(decision, routing=Routing(routing.expert_ids, routing.weights / 0.0 * 0.0))


class Shares(Edited):
    def edit(self, decision: Decision) -> Any:
        return replace(decision, probs=decision.probs * 0.5)


class Untrained(Edited):
    def edit(self, decision: Decision) -> Any:
        routing = decision.routing
        return replace(decision, routing=Routing(routing.expert_ids, routing.weights.detach()))


class Pair(Edited):
    def edit(self, decision: Decision) -> Any:
        return decision.routing.expert_ids, decision.routing.weights


class RoutesPadding(SoftmaxRouter):
    def __call__(self, logits: Tensor, **options: Any) -> Any:
        return super().__call__(logits, **{**options, "valid": None})


class BiasInWeights(SoftmaxRouter):
    def __call__(self, logits: Tensor, *, selection_bias: Tensor | None = None, **options: Any) -> Any:
        return super().__call__(
            logits if selection_bias is None else logits * (1 + selection_bias), **options
        )


class VectorLoss(AuxLoss):
    def loss(self, *args: Any, **options: Any) -> Any:
        return super().loss(*args, **options).repeat(2)


class NanLoss(AuxLoss):
    def loss(self, *args: Any, **options: Any) -> Any:
        return super().loss(*args, **options) * torch.nan


class BiasAway(ExpertBias):
    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> Any:
        bias.div_(0.0)


class NewBias(ExpertBias):
    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> Any:
        return bias + torch.sign(counts.float().mean() - counts)


class Fp32Mean(ExpertBias):
    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> Any:
        counts = counts.float()
        bias.add_(torch.sign(counts.mean() - counts), alpha=self.update_rate)


class Backwards(ExpertBias):
    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> Any:
        super().commit(bias, counts.max() - counts)


class Observes32(QuantileBalance):
    def observe(self, *args: Any) -> Any:
        return super().observe(*args).float()


class LosesAToken(AllToAllDispatcher):
    def dispatch(self, x: Tensor, plan: Any) -> Any:
        keep = torch.ones(len(x), 1, dtype=x.dtype)
        keep[:1] = 0
        return super().dispatch(x * keep, plan)


class ComesBackElsewhere(AllToAllDispatcher):
    def combine(self, rows: Tensor, plan: Any) -> Any:
        pending = super().combine(rows, plan)
        return Changed(pending, lambda y: y.roll(1, 0))


class ForgetsWeights(AllToAllDispatcher):
    def dispatch(self, x: Tensor, plan: Any) -> Any:
        pending = super().dispatch(x, plan)
        return Changed(pending, lambda r: replace(r, row_weights=torch.ones_like(r.row_weights)))


class LongOffsets(AllToAllDispatcher):
    def dispatch(self, x: Tensor, plan: Any) -> Any:
        pending = super().dispatch(x, plan)
        return Changed(pending, lambda r: replace(r, offsets=r.offsets.long()))


class Changed:
    def __init__(self, pending: Any, change: Any) -> None:
        self.pending, self.change = pending, change

    def wait(self) -> Any:
        return self.change(self.pending.wait())


class ReadsTheTail(GroupedExperts):
    def __call__(self, received: Received, *args: Any) -> Any:
        return super().__call__(received, *args) + 0.0 * received.rows.sum()


class NarrowResult(GroupedExperts):
    def __call__(self, received: Received, *args: Any) -> Any:
        return super().__call__(received, *args)[:, :-1]


class TwiceWeighted(GroupedExperts):
    def __call__(self, received: Received, *args: Any) -> Any:
        return super().__call__(received, *args) * received.row_weights.unsqueeze(1)


class Relu(GroupedExperts):
    def __call__(self, received: Received, *args: Any) -> Any:
        return F.relu(super().__call__(received, *args))


class Copied(NoOverlap):
    """The schedule of docs/moe_block.md, copied and changed: the shared expert is computed while rows travel."""

    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        a = h + unit.attention(h, context)
        tap, current = fork(unit.norm(a), 2)
        path = unit.moe.routed_path(tap, context, **self.options())
        path.start("dispatch")
        shared = unit.moe.shared(current)
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        routed = path.finish("combine")
        return a + unit.dropout(shared + routed.view_as(current))

    def options(self) -> dict[str, Any]:
        return {}


class NeverSerial(Copied):
    def options(self) -> dict[str, Any]:
        return {"serial": False}


class ForgetsToReport(TwoBatchOverlap):
    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        unit.moe.report, report = lambda *parts: None, unit.moe.report
        try:
            return super().__call__(unit, h, context)
        finally:
            unit.moe.report = report


class ForgetsToFinish(NoOverlap):
    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        path = unit.moe.routed_path(unit.norm(h), context)
        path.start("dispatch")
        self.kept = path  # alive, so that nothing is freed under a transfer
        return h + unit.attention(h, context)


class Flat(NoOverlap):
    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        return super().__call__(unit, h, context).flatten(0, 1)


class WithoutShared(NoOverlap):
    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        a = h + unit.attention(h, context)
        path = unit.moe.routed_path(unit.norm(a), context)
        path.start("dispatch")
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        return a + path.finish("combine").view_as(a) + 0.0 * unit.moe.shared(a)


class OtherNumbersWhenSerial(Copied):
    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        return super().__call__(unit, h, context) * (1.0 if self.enabled else 1.0 + 1e-6)
