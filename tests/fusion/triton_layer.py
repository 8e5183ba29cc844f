"""A layer on ranks whose Triton is interpreted, and the same layer in plain torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec
from tests.rank_pool import RankPool

H, WIDTH, K = 32, 24, 3  # the width is no multiple of a tile
_pools: dict[int, RankPool] = {}


def interpreted(world: int) -> RankPool:
    """Ranks that interpret Triton kernels: told before they import it, so not forked from one that may have."""
    pool = _pools.get(world)
    if pool is None or not pool._processes[0].is_alive():
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            pool = _pools[world] = RankPool(world, fresh=True)
        finally:
            del os.environ["TRITON_INTERPRET"]
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before
    return pool


def close_pools() -> None:
    """End the processes."""
    for world in list(_pools):
        pool = _pools.pop(world)
        pool.discard()


@dataclass
class Case:
    """The inputs of all ranks.

    Attributes:
        x, ids, weights, dy: Per rank.
        w_gate_up, w_down: Of all experts.
    """

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    dy: list[Tensor]
    w_gate_up: Tensor
    w_down: Tensor
    max_tokens: int

    @staticmethod
    def of(
        kind: str,
        world: int,
        *,
        dtype: torch.dtype = torch.float32,
        experts: int = 4,
        tokens: int = 16,
        seed: int = 0,
    ) -> Case:
        """Kinds, joined by "+": skewed; starved (the last rank gets nothing); missing (routes); unequal (tokens)."""
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        kinds = kind.split("+")
        counts = [tokens - (5 * rank if "unequal" in kinds else 0) for rank in range(world)]
        if "unequal" in kinds and world > 1:
            counts[-1] = 0
        chance = torch.ones(experts)
        if "skewed" in kinds:
            chance[0], chance[-1] = 12.0, 0.1
        case = Case(
            [], [], [], [], normal(experts, H, 2 * WIDTH) * H**-0.5, normal(experts, WIDTH, H) * 0.2, tokens
        )
        for count in counts:
            ids = torch.multinomial(chance.expand(max(1, count), -1), K, generator=random)[:count]
            if "starved" in kinds:
                ids[ids >= experts - max(1, experts // world)] = -1
            if "missing" in kinds:
                ids[torch.rand(ids.shape, generator=random) < 0.3] = -1
                ids[: count // 4] = -1
            weights = torch.rand(count, K, generator=random) + 0.1
            weights[ids < 0] = torch.nan  # never read
            case.x.append(normal(count, H).to(dtype))
            case.ids.append(ids)
            case.weights.append(weights)
            case.dy.append(normal(count, H).to(dtype))
        case.w_gate_up, case.w_down = case.w_gate_up.to(dtype), case.w_down.to(dtype)
        return case

    def spec(self, *, alignment: int = 1) -> DispatchSpec:
        return DispatchSpec(
            num_experts=self.w_down.shape[0],
            hidden_size=H,
            alignment=alignment,
            max_tokens=self.max_tokens,
            top_k=K,
            num_layers=2,
            dtype=self.w_down.dtype,
        )

    def kept(
        self, world: int, *, budget: int | None, alignment: int
    ) -> tuple[list[Tensor], list[int], list[int]]:
        """Of each rank's routes, which fit; slots needed and routes dropped of each rank."""
        local = self.w_down.shape[0] // world
        fits = [torch.zeros_like(ids, dtype=torch.bool) for ids in self.ids]
        needed, dropped = [0] * world, [0] * world
        for owner in range(world):
            start = 0
            for expert in range(owner * local, (owner + 1) * local):
                slot = start
                for ids, fit in zip(self.ids, fits):
                    for place in (ids == expert).nonzero().tolist():
                        ok = budget is None or slot < budget
                        fit[tuple(place)] = ok
                        dropped[owner] += not ok
                        slot += 1
                start += -(-(slot - start) // alignment) * alignment
            needed[owner] = start
        return fits, needed, dropped


def reference(case: Case, rank: int, world: int, fits: list[Tensor] | None = None) -> dict[str, Tensor]:
    """What a rank should get: fp64, each route for itself."""
    gate_up = case.w_gate_up.double().requires_grad_()
    down = case.w_down.double().requires_grad_()
    xs = [x.double().requires_grad_() for x in case.x]
    weights = [w.nan_to_num().double().requires_grad_() for w in case.weights]
    ys = []
    for number, (x, ids, w) in enumerate(zip(xs, case.ids, weights)):
        y = torch.zeros_like(x)
        for k in range(K):
            there = ids[:, k] >= 0
            if fits is not None:
                there = there & fits[number][:, k]
            expert = ids[:, k].clamp(min=0)
            gate, up = torch.einsum("th,thf->tf", x, gate_up[expert]).chunk(2, dim=-1)
            act = F.silu(gate) * up * w[:, k, None]
            y = y + torch.where(there[:, None], torch.einsum("tf,tfh->th", act, down[expert]), 0.0)
        ys.append(y)
    sum((y * dy.double()).sum() for y, dy in zip(ys, case.dy)).backward()  # type: ignore[union-attr]
    local = case.w_down.shape[0] // world
    mine = slice(rank * local, (rank + 1) * local)
    found = {
        "y": ys[rank].detach(),
        "dx": xs[rank].grad,
        "d_weights": weights[rank].grad,
        "dw_gate_up": gate_up.grad[mine],  # type: ignore[index]
        "dw_down": down.grad[mine],  # type: ignore[index]
    }
    return {name: torch.zeros(0) if value is None else value for name, value in found.items()}


class Run:
    """One pass of a case on a rank."""

    def __init__(
        self, library: Any, case: Case, rank: int, world: int, *, layer: int, recompute: bool
    ) -> None:
        local = case.w_down.shape[0] // world
        self.mine = slice(rank * local, (rank + 1) * local)
        self.case, self.rank, self.library = case, rank, library
        self.plan = library.plan(layer=layer, keep=True, recompute=recompute)
        self.w = case.w_gate_up[self.mine].contiguous(), case.w_down[self.mine].contiguous()

    def forward(self, needed: Tensor, dropped: Tensor) -> dict[str, Tensor]:
        x, ids, weights = self.case.x[self.rank], self.case.ids[self.rank], self.case.weights[self.rank]
        y = torch.full_like(x, torch.nan)
        self.plan.forward([y, needed, dropped], [x.clone(), weights.clone(), *self.w, ids.clone()])
        return {"y": y}

    def backward(self) -> dict[str, Tensor]:
        names = ("dx", "d_weights", "dw_gate_up", "dw_down")
        x, weights = self.case.x[self.rank], self.case.weights[self.rank]
        outs = [torch.full_like(t, torch.nan) for t in (x, weights, *self.w)]
        again = [x.clone(), *self.w]
        self.plan.backward(outs, [self.case.dy[self.rank].clone(), *again])
        return dict(zip(names, outs))
