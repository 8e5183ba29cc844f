"""Routed layers for the tests of fused libraries: inputs of every rank, and the layer as a loop over experts in fp32.

Legend: R ranks, T tokens of a rank, K routes per token, H features, E experts, L local experts, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CASES = ("uniform", "skewed", "starved", "missing", "unequal", "nothing")


@dataclass(frozen=True)
class Layer:
    """Inputs of all ranks. `dy` is the gradient of the output.

    Attributes:
        x, ids, weights, dy: Per rank: `[T, H]`, `[T, K]`, `[T, K]`, `[T, H]`.
        w_gate_up, w_down: Of all experts, `[E, H, 2F]`, `[E, F, H]`.
    """

    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    dy: list[Tensor]
    w_gate_up: Tensor
    w_down: Tensor

    def local(self, rank: int) -> tuple[Tensor, Tensor]:
        """Copies of a rank's expert weights."""
        share = self.w_gate_up.shape[0] // len(self.x)
        part = slice(rank * share, (rank + 1) * share)
        return self.w_gate_up[part].clone(), self.w_down[part].clone()


def layer(
    case: str,
    *,
    world: int,
    tokens: int = 24,
    hidden: int = 16,
    width: int = 8,
    experts: int = 8,
    top_k: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Layer:
    """The same on every rank."""
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * scale).to(dtype)

    counts = [tokens] * world
    if case == "unequal":
        counts = [max(0, tokens - 11 * rank) for rank in range(world)]  # the last of four has none
    ids = []
    for count in counts:
        scores = torch.rand(count, experts, generator=draw)
        if case == "skewed":
            scores[:, 0] += 1
        if case == "starved":  # nobody goes to the last rank's experts
            scores[:, -(experts // max(2, world)) :] -= 1
        chosen = scores.topk(min(top_k, experts // 2), dim=1).indices
        if case == "missing":
            chosen[torch.rand(chosen.shape, generator=draw) < 0.4] = -1
        if case == "nothing":
            chosen.fill_(-1)
        ids.append(chosen)
    return Layer(
        x=[randn(count, hidden) for count in counts],
        ids=ids,
        weights=[torch.rand(i.shape, generator=draw) for i in ids],
        dy=[randn(count, hidden) for count in counts],
        w_gate_up=randn(experts, hidden, 2 * width, scale=hidden**-0.5),
        w_down=randn(experts, width, hidden, scale=width**-0.5),
    )


def expected(given: Layer, rank: int) -> dict[str, Tensor]:
    """Output and gradients of a rank, in fp32."""
    xs = [x.float().clone().requires_grad_() for x in given.x]
    weights = [w.clone().requires_grad_() for w in given.weights]
    gate_up = given.w_gate_up.float().clone().requires_grad_()
    down = given.w_down.float().clone().requires_grad_()
    ys = []
    for x, ids, w in zip(xs, given.ids, weights):
        y = 0.0 * x
        for expert in range(gate_up.shape[0]):
            token, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up[expert]).chunk(2, dim=-1)
            out = (F.silu(gate) * up * w[token, k].unsqueeze(-1)) @ down[expert]
            y = y.index_add(0, token, out)
        ys.append(y)
    loss = sum((y * dy.float()).sum() for y, dy in zip(ys, given.dy))
    assert isinstance(loss, Tensor)
    (loss + 0.0 * sum(w.sum() for w in weights) + 0.0 * (gate_up.sum() + down.sum())).backward()
    share = gate_up.shape[0] // len(xs)
    part = slice(rank * share, (rank + 1) * share)
    found = {"y": ys[rank].detach(), "x": xs[rank].grad, "weights": weights[rank].grad}
    assert gate_up.grad is not None and down.grad is not None
    return {**found, "w_gate_up": gate_up.grad[part], "w_down": down.grad[part]}  # type: ignore[dict-item]


def assert_close(found: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest value of each tensor."""
    for name, value in right.items():
        error = (found[name].float() - value).abs().max() if value.numel() else torch.tensor(0.0)
        scale = value.abs().max().clamp(min=1e-3) if value.numel() else torch.tensor(1.0)
        assert error <= tolerance * scale, f"{name}: {error:.2e} of {scale:.2e}"
