"""Experts that multiply by one number each (H = 1): results that can be computed by hand.

`Scales` is a model of such experts on this rank's share of them, with router logits that are the same for every
token. It is reduced like a real model, by `Replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from sidestream.dispatch.base import Dispatcher, DispatchSpec, Received, Routing
from sidestream.exchange.link import NativeLink
from sidestream.model.moe import local
from sidestream.overlap.path import RoutedPath
from sidestream.parallel.mesh import Parallel
from sidestream.parallel.replicate import Replicate
from tests.core.build_tiny import DISPATCHERS, full
from tests.core.poison import poison_rows, poison_tail


def scale_rows(received: Received, scales: Tensor) -> Tensor:
    """Row times its expert's scale times its weight. Past the last offset NaN, in both directions: nobody reads it."""
    offsets = received.offsets
    received = poison_tail(received)
    slot = torch.arange(received.rows.shape[0])
    expert = torch.searchsorted(offsets, slot, right=True).clamp(max=len(scales) - 1)
    # Selected twice: the scales' gradient is a product with the rows.
    real = slot < offsets[-1]
    rows = torch.where(real.unsqueeze(1), received.rows, 0)
    out = rows * (scales[expert] * torch.where(real, received.row_weights, 0)).unsqueeze(1)
    return poison_rows(out, offsets)


def run_path(path: RoutedPath) -> Tensor:
    """All stages, one after another."""
    path.start("dispatch")
    path.finish("dispatch")
    path.run("experts")
    path.start("combine")
    return path.finish("combine")


def wire(
    name: str,
    *,
    num_experts: int,
    group: Any = None,
    hidden: int = 1,
    alignment: int = 1,
    max_tokens: int = 32,
    top_k: int = 2,
    num_layers: int = 1,
    **options: Any,
) -> Dispatcher:
    """A dispatcher ready for use, for at most so many tokens per rank; `options` are its own."""
    dispatcher = DISPATCHERS[name](**options)
    spec = DispatchSpec(
        num_experts=num_experts,
        hidden_size=hidden,
        alignment=alignment,
        max_tokens=max_tokens,
        top_k=top_k,
        num_layers=num_layers,
    )
    dispatcher.wire(group=group, spec=spec, link=NativeLink())
    return dispatcher


def routing_of(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]] | None = None) -> Routing:
    """Fixed routes; weights are 1 where not given."""
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(len(ids), len(ids[0]) if ids else 1)
    weights_TK = torch.ones(ids_TK.shape) if weights is None else torch.tensor(weights)
    return Routing(ids_TK, weights_TK)


class Scales(nn.Module):
    """Scale experts of one rank and the router's logits `[E]`."""

    def __init__(self, scales: Sequence[float], parallel: Parallel, *, dispatcher: str = "alltoall") -> None:
        super().__init__()
        first, last = parallel.expert_range(len(scales))
        shard = torch.tensor(scales[first:last], dtype=torch.float32)
        mesh = parallel.sparse["ep"]
        self.scales = nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
        self.logits = nn.Parameter(torch.zeros(len(scales)))
        self.dispatcher = wire(dispatcher, num_experts=len(scales), group=parallel.ep_group)
        self.replicate = Replicate(bucket_mb=1.0)
        self.replicate.attach(self, parallel)

    def forward(self, x_T: Tensor, routing: Routing) -> Tensor:
        """`[T]` -> `[T]`."""
        path = RoutedPath(
            x_T.unsqueeze(1),
            routing,
            dispatcher=self.dispatcher,
            experts=lambda received: scale_rows(received, local(self.scales)),
        )
        return run_path(path).squeeze(1)

    def backward(self, loss: Tensor) -> None:
        """Fresh gradients of `loss`, summed over ranks as in training."""
        self.replicate.zero()
        with self.replicate.last_micro_batch():
            loss.backward()

    def scale_grads(self) -> list[float]:
        """Of all experts, on every rank."""
        return full(self.scales.grad).tolist()

    def close(self) -> None:
        self.replicate.close()
        self.dispatcher.close()
