"""Adapters on their doubles: a problem that every rank knows whole, experts, and a dense computation to compare with.

Legend: T tokens, K routes per token, H features, E experts, L local experts, S slots.
"""

import gc
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Routing
from sidestream.dispatch.deep_ep import DeepEPLibrary
from sidestream.dispatch.hybrid_ep import HybridEPLibrary
from sidestream.dispatch.nccl_ep import NcclEPLibrary
from sidestream.exchange.link import NativeLink
from tests.doubles.deep_ep import DeepEP
from tests.doubles.hybrid_ep import HybridEP
from tests.doubles.nccl_ep import NcclEP
from tests.doubles.rules import Stream, garbage

E, K, MAX_TOKENS = 8, 2, 64
ADAPTERS = {
    "nccl_ep": (NcclEPLibrary, NcclEP),
    "deep_ep": (DeepEPLibrary, DeepEP),
    "hybrid_ep": (HybridEPLibrary, HybridEP),
}


class LateLane:
    """Runs a library's work when somebody waits for it: as late as a device may."""

    def __init__(self) -> None:
        self.stream = Stream()

    @property
    def handle(self) -> Stream:
        return self.stream

    def launch(self, run) -> int:
        with self.stream.current():
            run()
        return self.stream.mark()

    def join(self, event, outs) -> None:
        self.stream.run_until(event)

    def synchronize(self) -> None:
        self.stream.synchronize()


@dataclass
class Setup:
    """What a test varies.

    Attributes:
        kind: Subclass of the adapter to use instead.
        tokens: Of each rank.
        ids: Of each rank, `[T, K]`; None draws them, some -1.
    """

    name: str
    capacity_factor: float | None = None
    alignment: int = 8
    dtype: torch.dtype | None = None
    tokens: tuple[int, ...] = (16, 11, 0, 7)
    ids: list[Tensor] | None = None
    layers: int = 1
    kind: Any = None
    lane: Any = LateLane
    spec: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> "Setup":
        return replace(self, **changes)

    @property
    def rows_dtype(self) -> torch.dtype:
        return self.dtype or (torch.float32 if self.name == "nccl_ep" else torch.bfloat16)

    @property
    def hidden(self) -> int:
        return self.spec.get("hidden_size", 256 if self.name == "deep_ep" else 16)


def make(setup: Setup) -> Any:
    """A wired adapter; its double is `.library`."""
    adapter, double = ADAPTERS[setup.name]
    made = (setup.kind or adapter)(
        capacity_factor=setup.capacity_factor,
        alignment=setup.alignment,
        library=double(),
        lane=setup.lane(),
    )
    made.wire(group=dist.group.WORLD, spec=spec_of(setup), link=NativeLink())
    return made


def spec_of(setup: Setup) -> DispatchSpec:
    return DispatchSpec(
        **(
            {
                "num_experts": E,
                "hidden_size": setup.hidden,
                "max_tokens": MAX_TOKENS,
                "top_k": K,
                "num_layers": setup.layers,
                "dtype": setup.rows_dtype,
            }
            | setup.spec
        )
    )


def draw(setup: Setup, world: int, *, seed: int = 0) -> SimpleNamespace:
    """x, ids, weights, gradient of the output of every rank, and the scale of every expert `[E, H]`.

    A weight without a route is NaN: nobody may read it.
    """
    g = torch.Generator().manual_seed(100 + seed)
    tokens = setup.tokens[:world]
    ids = setup.ids
    if ids is None:
        ids = [
            torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(n)])
            if n
            else torch.zeros(0, K).long()
            for n in tokens
        ]
        for theirs in ids:
            theirs[::3, 1] = -1
            theirs[4::5] = -1
    x = [torch.randn(n, setup.hidden, generator=g).to(setup.rows_dtype) for n in tokens]
    grad = [torch.randn(n, setup.hidden, generator=g).to(setup.rows_dtype) for n in tokens]
    w = [torch.rand(n, K, generator=g).masked_fill(theirs < 0, torch.nan) for n, theirs in zip(tokens, ids)]
    scale = 0.5 + torch.rand(E, setup.hidden, generator=g)
    return SimpleNamespace(x=x, ids=ids, w=w, grad=grad, scale=scale, world=world)


def to_device(p: SimpleNamespace, device: torch.device) -> SimpleNamespace:
    """The same problem on a GPU."""
    moved = {name: [t.to(device) for t in getattr(p, name)] for name in ("x", "ids", "w", "grad")}
    return SimpleNamespace(**moved, scale=p.scale.to(device), world=p.world)


class Experts(torch.autograd.Function):
    """`tanh(row * scale) * weight`; what lies past the last offset is NaN in both directions."""

    @staticmethod
    def forward(ctx, rows, weights, scale_LH, offsets):
        n = int(offsets[-1])
        expert = torch.searchsorted(offsets, torch.arange(n, device=rows.device), right=True)
        ctx.save_for_backward(rows, weights, scale_LH, expert)
        out = garbage(*rows.shape, dtype=rows.dtype).to(rows.device)
        out[:n] = (torch.tanh(rows[:n].float() * scale_LH[expert]) * weights[:n, None]).to(rows.dtype)
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, weights, scale_LH, expert = ctx.saved_tensors
        n, scale = len(expert), scale_LH[expert]
        x, g, w = rows[:n].float(), grad[:n].float(), weights[:n, None]
        y = torch.tanh(x * scale)
        inner = g * w * (1 - y * y)
        grad_rows = garbage(*rows.shape, dtype=rows.dtype).to(rows.device)
        grad_weights = garbage(len(rows), dtype=torch.float32).to(rows.device)
        grad_rows[:n] = (inner * scale).to(rows.dtype)
        grad_weights[:n] = (g * y).sum(1)
        # Padding rows count: they must be zero, not just unused.
        grad_scale = torch.zeros_like(scale_LH).index_add_(0, expert, inner * x)
        return grad_rows, grad_weights, grad_scale, None


def local_scale(p: SimpleNamespace, rank: int) -> Tensor:
    share = E // p.world
    return p.scale[rank * share : (rank + 1) * share].clone()


def forward(
    adapter: Any, p: SimpleNamespace, rank: int, scale_LH: Tensor, x: Tensor, w: Tensor, layer: int = 0
):
    plan = adapter.plan(Routing(p.ids[rank], w), layer=layer)
    got = adapter.dispatch(x, plan).wait()
    assert got.offsets.dtype == torch.int32 and plan.rows() == got.rows.shape[0]
    assert got.row_weights.dtype == torch.float32
    ends = [0, *got.offsets.tolist()]
    assert ends == sorted(ends) and ends[-1] <= got.rows.shape[0], f"offsets {ends}"
    assert all(end % adapter.align == 0 for end in ends), f"offsets {ends} that are not aligned"
    assert not got.exact or ends[-1] == got.rows.shape[0]
    assert got.host_offsets in (None, ends[1:])
    rows = Experts.apply(got.rows, got.row_weights, scale_LH, got.offsets)
    return adapter.combine(rows, plan).wait()


def step(adapter: Any, p: SimpleNamespace, rank: int, *, layer: int = 0) -> list[Tensor]:
    """Output, and gradients of x, weights and scales."""
    x, w = p.x[rank].clone().requires_grad_(), p.w[rank].clone().requires_grad_()
    scale_LH = local_scale(p, rank).requires_grad_()
    y = forward(adapter, p, rank, scale_LH, x, w, layer)
    y.backward(p.grad[rank])
    return [y.detach(), x.grad, w.grad, scale_LH.grad]


@torch.enable_grad()
def dense(p: SimpleNamespace, rank: int, keep: list[Tensor] | None = None) -> list[Tensor]:
    """The same on one process in fp32, over the routes in `keep` (of each rank, `[T, K]` bool)."""
    keep = [ids >= 0 for ids in p.ids] if keep is None else keep
    scale = p.scale.clone().requires_grad_()
    leaves, outs = [], []
    for source in range(p.world):
        x = p.x[source].float().clone().requires_grad_()
        w = p.w[source].nan_to_num().requires_grad_()
        y = torch.tanh(x[:, None] * scale[p.ids[source].clamp(min=0)])
        outs.append((torch.where(keep[source], w, 0)[:, :, None] * y).sum(1))
        leaves.append((x, w))
    torch.autograd.backward(outs, [g.float() for g in p.grad])
    share = E // p.world
    x, w = leaves[rank]
    return [outs[rank].detach(), x.grad, w.grad, scale.grad[rank * share : (rank + 1) * share]]


def kept(p: SimpleNamespace, *, budget: int, alignment: int) -> tuple[list[Tensor], list[int]]:
    """Routes of each rank that fit, by hand, and the rows that each rank needs: by expert, source, token, k."""
    keep, needed, share = [ids >= 0 for ids in p.ids], [], E // p.world
    for rank in range(p.world):
        slot = 0
        for expert in range(rank * share, (rank + 1) * share):
            for source, ids in enumerate(p.ids):
                for token, k in (ids == expert).nonzero().tolist():
                    keep[source][token, k] = slot < budget
                    slot += 1
            slot = -(-slot // alignment) * alignment
        needed.append(slot)
    return keep, needed


def compare(found: list[Tensor], wanted: list[Tensor], setup: Setup) -> None:
    """Raises AssertionError on every rank if a tensor differs on one.

    Output and input gradient are rounded to bf16 once per row and once per sum where rows are bf16: 2 ** -8 each, of
    values up to about 4. The other two are fp32 everywhere.
    """
    low = setup.rows_dtype != torch.float32
    rounding = {"rtol": 2**-6, "atol": 2**-5} if low else {"rtol": 1e-5, "atol": 1e-5}
    wrong = []
    for name, a, b in zip(("output", "x", "weights", "scales"), found, wanted):
        tolerance = rounding if name in ("output", "x") else {"rtol": 1e-4, "atol": 1e-4}
        try:
            torch.testing.assert_close(a.float().cpu(), b, **tolerance)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, wrong)
    assert not any(heard), f"differs from the dense computation: {heard}"


def close(adapter: Any) -> list[str]:
    """Close; nothing may be left. Returns the log of the double."""
    library = adapter.library
    adapter.close()
    del adapter
    gc.collect()
    library.check_closed()
    return library.log


def run(rank: int, world: int, setup: Setup, *, steps: int = 2) -> list[str]:
    """A few steps of one layer, and the end."""
    adapter = make(setup)
    for seed in range(steps):
        p = draw(setup, world, seed=seed)
        compare(step(adapter, p, rank), dense(p, rank), setup)
    return close(adapter)
