"""Arms: what is compared. Sidestream's layer in any combination of dispatcher and fusion, and the dense yardstick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from torch import Tensor, nn

from sidestream.build import make, make_movers, model_shape
from sidestream.dispatch.base import Dispatcher, DispatchSpec
from sidestream.exchange.link import NativeLink
from sidestream.fusion.base import fused_of, resolve_alignment
from sidestream.launch import entry
from sidestream.measure.problem import Weights
from sidestream.measure.shapes import LayerShape
from sidestream.model.layers import SwiGLU
from sidestream.model.moe import Ledger, MoE, MoEParts

GEMM = "gemm"
Kind = Literal["sidestream", "dense", "peer"]


@dataclass
class Arm:
    """One layer under test.

    Attributes:
        forward: `[T, D]` -> `[T, D]`, differentiable.
        module: Holds the parameters.
        grads: Gradients after a backward, in our layout (see `problem.Answer`, without `x`); None: the arm computes
            another function and is not checked against the reference.
        close: Releases what the arm holds; collective.
        dispatcher: What moves its rows, of Sidestream's arms.
    """

    name: str
    kind: Kind
    forward: Callable[[Tensor], Tensor]
    module: nn.Module
    grads: Callable[[], dict[str, Tensor]] | None = None
    close: Callable[[], None] = lambda: None
    dispatcher: Dispatcher | None = None

    def clear_gradients(self) -> None:
        self.module.zero_grad(set_to_none=True)


def dense_arm(shape: LayerShape, *, dtype: torch.dtype, seed: int) -> Arm:
    """One SwiGLU of width K * F per token: the same expert FLOPs, no routing, nothing travels."""
    layer = SwiGLU(shape.hidden_size, shape.top_k * shape.expert_hidden_size)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return Arm("dense", "dense", layer.to(dtype), layer)


class _Products(torch.autograd.Function):
    """The six products of the experts on rows that stay where they are; neither input nor output has a meaning."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: GemmOnly) -> Tensor:
        ctx.work, ctx.like = work, x
        work.forward_products()
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.work.backward_products()
        return torch.zeros_like(ctx.like), None


class GemmOnly(nn.Module):
    """What no layer can do without: the products of the local experts, at perfect balance, and nothing else."""

    def __init__(self, shape: LayerShape, weights: Weights, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.w_gate_up, self.w_down = (w.clone() for w in weights.local)
        local = self.w_gate_up.shape[0]
        rows = -(-shape.tokens * shape.top_k // local) * local
        self.offsets = torch.arange(1, local + 1, dtype=torch.int32) * (rows // local)
        width, hidden = shape.expert_hidden_size, shape.hidden_size
        generator = torch.Generator().manual_seed(0)
        self.rows, self.act, self.gate_up = (
            torch.randn(rows, size, generator=generator).to(dtype) for size in (hidden, width, 2 * width)
        )
        self.products: list[Tensor] = []

    def forward_products(self) -> None:
        self.products = [
            F.grouped_mm(self.rows, self.w_gate_up, offs=self.offsets),
            F.grouped_mm(self.act, self.w_down, offs=self.offsets),
        ]

    def backward_products(self) -> None:
        self.products = [
            F.grouped_mm(self.rows, self.w_down.transpose(1, 2), offs=self.offsets),
            F.grouped_mm(self.act.t(), self.rows, offs=self.offsets),
            F.grouped_mm(self.gate_up, self.w_gate_up.transpose(1, 2), offs=self.offsets),
            F.grouped_mm(self.rows.t(), self.gate_up, offs=self.offsets),
        ]


def gemm_arm(shape: LayerShape, weights: Weights, *, dtype: torch.dtype) -> Arm:
    """The floor of any MoE layer of this shape: its matrix products."""
    layer = GemmOnly(shape, weights, dtype=dtype)
    return Arm(GEMM, "dense", lambda x: _Products.apply(x, layer), layer)


def compose_layer(conf: Path, shape: LayerShape, arm: str) -> DictConfig:
    """The config of an arm `sidestream/<dispatcher>+<fusion>[,<override>...]`.

    Raises:
        ValueError: The name does not read like this.
    """
    choice, *overrides = arm.split(",")
    project, _, combination = choice.partition("/")
    dispatcher, plus, fusion = combination.partition("+")
    if project != "sidestream" or not (dispatcher and plus and fusion):
        raise ValueError(
            f"arm={arm}: expected sidestream/<dispatcher>+<fusion>, such as sidestream/alltoall+grouped"
        )
    return compose_options(conf, shape, f"dispatcher={dispatcher}", f"fusion={fusion}", *overrides)


@cache
def compose_options(conf: Path, shape: LayerShape, *overrides: str) -> DictConfig:
    """The config of train.py for one layer of a shape, with overrides that come last. Not to be changed.

    Raises:
        ValueError: An override names nothing.
    """
    entry.register()
    own = [
        "balance=none",
        f"router.top_k={shape.top_k}",
        f"model.hidden_size={shape.hidden_size}",
        f"model.expert_hidden_size={shape.expert_hidden_size}",
        f"model.num_experts={shape.num_experts}",
        "model.num_shared_experts=0",
    ]
    try:
        with initialize_config_dir(str(conf), version_base="1.3"):
            return compose("train", [*own, *overrides])
    except HydraException as error:
        raise ValueError(f"{', '.join(overrides)}: {str(error).splitlines()[0]}") from error


def sidestream_arm(
    name: str,
    shape: LayerShape,
    weights: Weights,
    *,
    conf: Path,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> Arm:
    """The layer of `sidestream.model.moe`, in the serial order of `overlap=none`. Collective.

    Raises:
        ValueError: The combination cannot run on this group.
    """
    cfg = compose_layer(conf, shape, name)
    dispatcher, fusion = make_movers(cfg)
    alignment = resolve_alignment(fusion.alignment, dtype=dtype, device_type="cpu")
    spec = DispatchSpec(
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        alignment=alignment,
        max_tokens=shape.tokens,
        top_k=shape.top_k,
        dtype=dtype,
    )
    dispatcher.wire(group=group, spec=spec, link=NativeLink())
    parts = MoEParts(
        router=make(cfg, "router"),
        balance=make(cfg, "balance"),
        dispatcher=dispatcher,
        fusion=fusion,
        expert_range=weights.expert_range,
        fused=fused_of(fusion),
    )
    ledger = Ledger(counts=torch.zeros(1, shape.num_experts, dtype=torch.int64))
    layer = MoE(model_shape(cfg, vocab_size=256), parts, layer=0, ledger=ledger).to(dtype)
    w_gate_up, w_down = weights.local
    with torch.no_grad():
        layer.gate.copy_(weights.gate)
        layer.selection_bias.zero_()
        layer.experts.w_gate_up.copy_(w_gate_up)
        layer.experts.w_down.copy_(w_down)

    def forward(x: Tensor) -> Tensor:
        ledger.begin_attempt()
        path = layer.routed_path(x.unsqueeze(0))
        path.start("dispatch")
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        return path.finish("combine")

    def grads() -> dict[str, Tensor]:
        experts = layer.experts
        return {"gate": layer.gate.grad, "w_gate_up": experts.w_gate_up.grad, "w_down": experts.w_down.grad}  # type: ignore[dict-item]

    return Arm(name, "sidestream", forward, layer, grads, dispatcher.close, dispatcher)
