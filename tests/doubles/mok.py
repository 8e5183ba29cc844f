"""A double of `mok.functional` (Mixture-of-Kittens), bf16.

    functional = MoK(ep_sizes=(1, 2))       # in place of the module; upstream takes 4, 8, 16, 32 and 64 ranks
    workspace = functional.get_workspace(functional.MoKConfig(), group, device=..., num_local_tokens=512, ...)

What the documentation leaves open is taken from what upstream publishes, and marked: [readme] its README,
[functional] the checks and the order of steps in `mok/functional.py`, [scheduler] its scheduling kernel, [tests] the
plain computation of its own tests. A port says [port] what a score of zero does to the score's gradient.
Where these leave room, the double takes what hurts most: memory that nobody wrote is NaN, and a context that backward
has used is gone.

Legend: T tokens, K routes per token, H features, I expert width, E experts, R ranks, L = E / R local experts,
S rows of the local experts, padding included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles.rules import Corruption, TeardownOrder, Trap, garbage, require, together

PADDING = 256  # rows of an expert are padded to a multiple [scheduler]
NUM_SMS = 148  # of the device that the double plays
SHARED_MEMORY = 232448  # bytes that a block may have on it


@dataclass(frozen=True)
class MoKConfig:
    """5.2."""

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048


@dataclass(frozen=True, eq=False)
class MoKSchedule:
    """Tensors of one routing, new for each [functional]: several may be alive.

    Attributes:
        peer_rank, peer_token_idx: `[capacity]` int32, where the row of a slot comes from (token * K + k); -1: padding.
        num_tokens: `[1]` int32, rows in use, padding included.
        tokens_per_expert: `[L]` int32, padded.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor


@dataclass(frozen=True, eq=False)
class MoKForwardContext:
    """Activations. Of the routed rows only the first macrobatch is kept, the others are computed again [readme]."""

    x_routed: Tensor
    gate_shared: Tensor
    gate_routed: Tensor
    up_shared: Tensor
    up_routed: Tensor
    hidden_shared: Tensor
    hidden_routed: Tensor


@dataclass(eq=False)
class MoKWorkspace:
    """Symmetric buffers, shared by all layers [readme]: what one call left there the next one overwrites."""

    group: dist.ProcessGroup
    ep_rank: int
    ep_size: int
    device: torch.device
    num_local_tokens: int
    hidden_size: int
    topk: int
    schedule_capacity: int
    cleared: bool = False


class MoK:
    """The module.

    Args:
        ep_sizes: Sizes of the group that this build takes. 5.2: forks add 1; 2 is for tests alone.
        zero_scores_count: A score of zero has a gradient.

    Attributes:
        log: The calls, in order.
    """

    MoKConfig = MoKConfig
    MoKSchedule = MoKSchedule
    MoKForwardContext = MoKForwardContext
    MoKWorkspace = MoKWorkspace

    def __init__(
        self, *, ep_sizes: tuple[int, ...] = (4, 8, 16, 32, 64), zero_scores_count: bool = True
    ) -> None:
        self.ep_sizes, self.zero_scores_count = ep_sizes, zero_scores_count
        self.log: list[str] = []
        self._cache: dict[Any, MoKWorkspace] = {}
        self._used: list[MoKForwardContext] = []

    # Workspaces.

    def get_workspace(
        self,
        config: MoKConfig,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        num_local_tokens: int,
        hidden_size: int,
        topk: int,
    ) -> MoKWorkspace:
        """Collective where there is none yet; one of the same sizes is given out again [readme]."""
        self.log.append("get_workspace")
        require(isinstance(group, dist.ProcessGroup), "group: a process group")  # [functional]
        size = dist.get_world_size(group)
        multiplier = config.schedule_capacity_multiplier
        require(
            math.isfinite(multiplier) and multiplier > 0, "schedule_capacity_multiplier > 0"
        )  # [functional]
        require(size in self.ep_sizes, f"EP size {size}, one of {self.ep_sizes}")
        require(num_local_tokens >= 512, f"num_local_tokens={num_local_tokens}, at least 512")
        require(num_local_tokens % 256 == 0, f"num_local_tokens={num_local_tokens} % 256")
        require(hidden_size > 0 and hidden_size % 256 == 0, f"hidden_size={hidden_size} % 256")
        require(0 < topk <= 255, f"topk={topk}, 1 to 255")  # [functional]
        epilogue = 2 * ((topk + 1) * 2048 + topk * 4) + 1024
        require(epilogue <= SHARED_MEMORY, f"topk={topk}: shared memory of the epilogue")  # [functional]
        factor = max(2, math.ceil(size * multiplier))
        key = (group.group_name, device, num_local_tokens, hidden_size, topk, factor)
        if key not in self._cache:
            # T identical on all ranks. One read by the host, here only [functional].
            shapes = together(group, ["get_workspace", factor], (num_local_tokens, hidden_size, topk))
            require(all(shape == shapes[0] for shape in shapes), f"shapes differ between ranks: {shapes}")
            self._cache[key] = MoKWorkspace(
                group,
                dist.get_rank(group),
                size,
                device,
                num_local_tokens,
                hidden_size,
                topk,
                schedule_capacity=num_local_tokens * topk * factor,
            )
        return self._cache[key]

    def clear_workspace_cache(self) -> None:
        """[functional] Collective: every rank has come before memory goes."""
        self.log.append("clear_workspace_cache")
        for workspace in self._cache.values():
            together(workspace.group, ["clear"])
            workspace.cleared = True
        self._cache.clear()

    def check_closed(self) -> None:
        if self._cache:
            raise TeardownOrder(f"{len(self._cache)} workspaces left: symmetric memory is never given back")

    # Schedules.

    def build_schedule(
        self, workspace: MoKWorkspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int
    ) -> MoKSchedule:
        """5.2."""
        self.log.append("build_schedule")
        self._check_config(config, workspace)
        T, K = workspace.num_local_tokens, workspace.topk
        require(not workspace.cleared, "the workspace is gone", TeardownOrder)
        require(top_experts.dtype == torch.int64, f"top_experts: int64, not {top_experts.dtype}")
        require(top_experts.is_contiguous(), "top_experts: contiguous")  # [functional]
        require(tuple(top_experts.shape) == (T, K), f"top_experts: {T} x {K}")
        require(num_local_experts > 0, "num_local_experts > 0")  # [functional]
        heard = together(workspace.group, ["build_schedule", num_local_experts], top_experts.to(torch.int32))

        # Nothing looks at the range of an id: what is nobody's expert is in no schedule [scheduler].
        capacity, first = workspace.schedule_capacity, workspace.ep_rank * num_local_experts
        flat = torch.stack(heard).view(workspace.ep_size, T * K)
        peer_rank = torch.full((capacity,), -1, dtype=torch.int32)
        peer_token_idx = torch.full((capacity,), -1, dtype=torch.int32)
        padded, found = [], []
        for expert in range(first, first + num_local_experts):
            peers, places = (flat == expert).nonzero(as_tuple=True)
            # Round robin over the peers [scheduler]; which token of a peer comes first is not said.
            turns = torch.cat([torch.arange(int(n)) for n in peers.bincount(minlength=workspace.ep_size)])
            order = (turns * workspace.ep_size + peers).argsort()
            found.append((peers[order], places[order]))
            padded.append(-(-len(peers) // PADDING) * PADDING)  # an expert without rows has none [scheduler]

        def check() -> None:
            # the device traps. [scheduler]: when the padded rows are more than the schedule holds.
            require(
                sum(padded) <= capacity, f"{sum(padded)} rows needed, the schedule holds {capacity}", Trap
            )

        together(workspace.group, ["schedule"], check=check)
        begin = 0
        for (peers, places), rows in zip(found, padded):
            peer_rank[begin : begin + len(peers)] = peers.to(torch.int32)
            peer_token_idx[begin : begin + len(peers)] = places.to(torch.int32)
            begin += rows
        counts = torch.tensor(padded, dtype=torch.int32)
        return MoKSchedule(peer_rank, peer_token_idx, torch.tensor([begin], dtype=torch.int32), counts)

    def _check_config(self, config: MoKConfig, workspace: MoKWorkspace) -> None:
        require(isinstance(config, MoKConfig), "config: a MoKConfig")
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
            value = getattr(config, name)
            require(0 < value < NUM_SMS and value % 2 == 0, f"{name}={value}: even, and SMs must be left")
        mini, macro = config.minibatch_size, config.macrobatch_size
        require(mini > 0 and mini % 256 == 0, f"minibatch_size={mini} % 256")
        require(macro > 0 and macro % mini == 0, f"macrobatch_size={macro} % {mini}")
        chunk = config.all_gather_top_experts_chunk_bytes
        require(chunk > 0 and chunk % 16 == 0, f"chunk bytes {chunk} % 16")
        route_bytes = workspace.num_local_tokens * workspace.topk * 4
        require(
            route_bytes % chunk == 0, f"{route_bytes} bytes of routes in chunks of {chunk}"
        )  # [functional]

    # Calls. All of them wait for the other ranks: a rank that makes another call waits for ever.

    def forward(
        self,
        config: MoKConfig,
        workspace: MoKWorkspace,
        schedule: MoKSchedule,
        x: Tensor,
        router_weights: Tensor,
        w_shared_gate: Tensor,
        w_shared_up: Tensor,
        w_shared_down: Tensor,
        routed_gate: Tensor,
        routed_up: Tensor,
        routed_down: Tensor,
        swiglu_limit: float | None = None,
    ) -> tuple[Tensor, MoKForwardContext]:
        """5.2."""
        self.log.append("forward")
        assert swiglu_limit is None, "not in this double"
        self._check_inputs(workspace, schedule, x=x, router_weights=router_weights)
        gate, up = (w_shared_gate, routed_gate), (w_shared_up, routed_up)
        self._check_weights(workspace, schedule, gate, up, (w_shared_down, routed_down))
        context, rows = self._activations("forward", workspace, schedule, x, gate, up)
        y_shared = _round(rows.hidden_shared @ w_shared_down.float().t())
        y_rows = torch.empty(rows.x.shape)
        for part, expert in _zones(schedule):
            y_rows[part] = _round(rows.hidden[part] @ routed_down[expert].float().t())
        # One slot per route. A slot that no row is for keeps what it held [functional]: anything.
        combined = self._scatter(workspace, "combine", schedule, y_rows, columns=workspace.hidden_size)
        # The scores come in only here, behind the down projection, in fp32 [functional, tests].
        routed = (combined.view(len(x), -1, x.shape[1]) * router_weights.unsqueeze(2)).sum(1)
        return (y_shared + routed).to(torch.bfloat16), self._first_macrobatch(config, context)

    def recompute_forward_context(
        self,
        config: MoKConfig,
        workspace: MoKWorkspace,
        schedule: MoKSchedule,
        x: Tensor,
        w_shared_gate: Tensor,
        w_shared_up: Tensor,
        routed_gate: Tensor,
        routed_up: Tensor,
        swiglu_limit: float | None = None,
    ) -> MoKForwardContext:
        """[readme]: the context of a forward with the same arguments, and no output. It exchanges rows again."""
        self.log.append("recompute_forward_context")
        assert swiglu_limit is None, "not in this double"
        self._check_inputs(workspace, schedule, x=x)
        gate, up = (w_shared_gate, routed_gate), (w_shared_up, routed_up)
        self._check_weights(workspace, schedule, gate, up, None)
        context, _ = self._activations("recompute", workspace, schedule, x, gate, up)
        return self._first_macrobatch(config, context)

    def backward(
        self,
        config: MoKConfig,
        workspace: MoKWorkspace,
        schedule: MoKSchedule,
        ctx: MoKForwardContext,
        grad_output: Tensor,
        x: Tensor,
        router_weights: Tensor,
        w_shared_gate: Tensor,
        w_shared_up: Tensor,
        w_shared_down: Tensor,
        routed_gate: Tensor,
        routed_up: Tensor,
        routed_down: Tensor,
        swiglu_limit: float | None = None,
    ) -> tuple[Tensor, ...]:
        """Gradients of x, scores (fp32), the three routed and the three shared weights, in this order."""
        self.log.append("backward")
        assert swiglu_limit is None, "not in this double"
        require(isinstance(ctx, MoKForwardContext), "forward_context: a MoKForwardContext")  # [functional]
        # The rows of the first macrobatch make room for those of the others [readme].
        require(not any(ctx is used for used in self._used), "the context has been used", Corruption)
        self._check_inputs(workspace, schedule, x=x, router_weights=router_weights, grad_output=grad_output)
        gate, up = (w_shared_gate, routed_gate), (w_shared_up, routed_up)
        self._check_weights(workspace, schedule, gate, up, (w_shared_down, routed_down))
        _, rows = self._activations("backward", workspace, schedule, x, gate, up)
        self._take(ctx, config, rows)

        # Every rank's gradient and scores, as x; the gradient comes in already multiplied by the score [tests].
        grads = together(workspace.group, ["d_y"], (grad_output, router_weights))
        count = int(schedule.num_tokens)
        peers, places = schedule.peer_rank[:count].long(), schedule.peer_token_idx[:count].long()
        real = peers >= 0
        d_y, scores = torch.zeros(rows.x.shape), torch.zeros(count)
        scores[real] = torch.stack([w for _, w in grads]).view(workspace.ep_size, -1)[
            peers[real], places[real]
        ]
        d_y[real] = torch.stack([g for g, _ in grads])[peers[real], places[real] // workspace.topk].float()
        d_y_plain, d_y = d_y, _round(d_y * scores.unsqueeze(1))
        d_hidden, d_x_rows = torch.empty(rows.hidden.shape), torch.empty(rows.x.shape)
        d_gate, d_up = torch.empty(rows.hidden.shape), torch.empty(rows.hidden.shape)
        d_weights = [torch.zeros_like(w) for w in (routed_gate, routed_up, routed_down)]
        for part, expert in _zones(schedule):
            d_hidden[part] = _round(d_y[part] @ routed_down[expert].float())
            d_gate[part], d_up[part] = _swiglu_backward(rows.gate[part], rows.up[part], d_hidden[part])
            d_x_rows[part] = _round(
                d_gate[part] @ routed_gate[expert].float() + d_up[part] @ routed_up[expert].float()
            )
            d_weights[0][expert] = (d_gate[part].t() @ rows.x[part]).to(torch.bfloat16)
            d_weights[1][expert] = (d_up[part].t() @ rows.x[part]).to(torch.bfloat16)
            d_weights[2][expert] = (d_y[part].t() @ rows.hidden[part]).to(torch.bfloat16)
        d_routed = self._scatter(workspace, "d_x", schedule, d_x_rows, columns=workspace.hidden_size)
        # [tests] The product of dy and y, whatever the score is; [port] computed from the multiplied gradient and
        # divided by the score, hence zero where that is. Callers must do with either.
        dots = (rows.hidden * d_hidden).sum(1) / scores
        if self.zero_scores_count:
            for part, expert in _zones(schedule):
                y_rows = rows.hidden[part] @ routed_down[expert].float().t()
                dots[part] = (y_rows * d_y_plain[part]).sum(1)
        dots = dots.masked_fill(real.logical_not() if self.zero_scores_count else scores == 0, 0.0)
        d_scores = self._scatter(workspace, "d_scores", schedule, dots.unsqueeze(1), columns=1)

        d_y_shared = grad_output.float()
        d_hidden_shared = _round(d_y_shared @ w_shared_down.float())
        d_gate_shared, d_up_shared = _swiglu_backward(rows.gate_shared, rows.up_shared, d_hidden_shared)
        d_x = d_gate_shared @ w_shared_gate.float() + d_up_shared @ w_shared_up.float()
        d_x = _round(d_x) + d_routed.view(len(x), -1, x.shape[1]).sum(1)
        shared = (
            d_gate_shared.t() @ x.float(),
            d_up_shared.t() @ x.float(),
            d_y_shared.t() @ rows.hidden_shared,
        )
        self._used.append(ctx)
        for name in ctx.__dataclass_fields__:
            getattr(ctx, name).fill_(float("nan"))
        return (
            d_x.to(torch.bfloat16),
            d_scores.view(router_weights.shape).clone(),
            *d_weights,
            *(w.to(torch.bfloat16) for w in shared),
        )

    # What they share.

    def _check_inputs(self, workspace: MoKWorkspace, schedule: MoKSchedule, **tensors: Tensor) -> None:
        """[functional]."""
        require(not workspace.cleared, "the workspace is gone", TeardownOrder)
        require(isinstance(schedule, MoKSchedule), "schedule: a MoKSchedule")
        T, H, K = workspace.num_local_tokens, workspace.hidden_size, workspace.topk
        for name, tensor in tensors.items():
            dtype, shape = (torch.bfloat16, (T, H)) if name != "router_weights" else (torch.float32, (T, K))
            require(tensor.dtype == dtype, f"{name}: {dtype}, not {tensor.dtype}")
            require(tensor.is_contiguous(), f"{name}: contiguous")
            require(tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)} where {shape} is wanted")
        require(len(schedule.peer_rank) == workspace.schedule_capacity, "capacity of the schedule")

    def _check_weights(
        self,
        workspace: MoKWorkspace,
        schedule: MoKSchedule,
        gate: tuple[Tensor, Tensor],
        up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Gate and up `[L, I, H]`, down `[L, H, I]`; the shared expert as wide as the routed ones; I % 256."""
        H, width, local = workspace.hidden_size, gate[1].shape[1], len(schedule.tokens_per_expert)
        require(width % 256 == 0, f"expert width {width} % 256")
        given = {"gate": gate, "up": up} | ({"down": down} if down else {})
        for name, (shared, routed) in given.items():
            shape = (H, width) if name == "down" else (width, H)
            for kind, tensor, wanted in (("shared", shared, shape), ("routed", routed, (local, *shape))):
                require(tensor.dtype == torch.bfloat16, f"{kind} {name}: bf16, not {tensor.dtype}")
                require(
                    tuple(tensor.shape) == wanted, f"{kind} {name}: {tuple(tensor.shape)}, wanted {wanted}"
                )
                require(tensor.is_contiguous(), f"{kind} {name}: contiguous")  # the kernels read it by tiles

    def _activations(
        self,
        call: str,
        workspace: MoKWorkspace,
        schedule: MoKSchedule,
        x: Tensor,
        gate: tuple[Tensor, Tensor],
        up: tuple[Tensor, Tensor],
    ) -> tuple[MoKForwardContext, _Rows]:
        """Collective: fetch the rows, run both experts up to the product. All that is kept is bf16."""
        of_rank = together(workspace.group, [call, len(schedule.tokens_per_expert)], x)
        count = int(schedule.num_tokens)
        peers, places = schedule.peer_rank[:count].long(), schedule.peer_token_idx[:count].long()
        real = peers >= 0
        rows = torch.zeros(count, x.shape[1])  # padding is zero [scheduler: slots of -1]
        rows[real] = torch.stack(of_rank)[peers[real], places[real] // workspace.topk].float()
        width = gate[0].shape[0]
        gate_rows, up_rows = torch.zeros(count, width), torch.zeros(count, width)
        for part, expert in _zones(schedule):
            gate_rows[part] = _round(rows[part] @ gate[1][expert].float().t())
            up_rows[part] = _round(rows[part] @ up[1][expert].float().t())
        gate_shared = _round(x.float() @ gate[0].float().t())
        up_shared = _round(x.float() @ up[0].float().t())
        found = _Rows(
            rows,
            gate_rows,
            up_rows,
            _swiglu(gate_rows, up_rows),
            gate_shared,
            up_shared,
            _swiglu(gate_shared, up_shared),
        )
        kept = [
            tensor.to(torch.bfloat16)
            for tensor in (
                found.x,
                found.gate_shared,
                found.gate,
                found.up_shared,
                found.up,
                found.hidden_shared,
                found.hidden,
            )
        ]
        return MoKForwardContext(*kept), found

    def _first_macrobatch(self, config: MoKConfig, context: MoKForwardContext) -> MoKForwardContext:
        most = config.macrobatch_size
        return MoKForwardContext(
            **{
                name: getattr(context, name)[:most].clone()
                if name.endswith("routed")
                else getattr(context, name)
                for name in context.__dataclass_fields__
            }
        )

    def _take(self, ctx: MoKForwardContext, config: MoKConfig, rows: _Rows) -> None:
        """The first macrobatch is what the context says, the others what x and the weights give now."""
        most = config.macrobatch_size
        rows.x[:most], rows.gate[:most] = ctx.x_routed.float(), ctx.gate_routed.float()
        rows.up[:most], rows.hidden[:most] = ctx.up_routed.float(), ctx.hidden_routed.float()
        rows.gate_shared, rows.up_shared = ctx.gate_shared.float(), ctx.up_shared.float()
        rows.hidden_shared = ctx.hidden_shared.float()

    def _scatter(
        self, workspace: MoKWorkspace, call: str, schedule: MoKSchedule, rows: Tensor, *, columns: int
    ) -> Tensor:
        """Collective: rows into the slots of their routes, on the ranks that they came from."""
        count = int(schedule.num_tokens)
        mine = schedule.peer_rank[:count], schedule.peer_token_idx[:count], rows
        out = garbage(workspace.num_local_tokens * workspace.topk, columns, dtype=torch.float32)
        for peers, places, theirs in together(workspace.group, [call], mine):
            here = peers == workspace.ep_rank
            out[places[here].long()] = theirs[here]
        return out


@dataclass
class _Rows:
    x: Tensor
    gate: Tensor
    up: Tensor
    hidden: Tensor
    gate_shared: Tensor
    up_shared: Tensor
    hidden_shared: Tensor


def _round(tensor: Tensor) -> Tensor:
    """What bf16 leaves of it, as fp32."""
    return tensor.to(torch.bfloat16).float()


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _round(torch.nn.functional.silu(gate) * up)


def _swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(gate)
    d_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return _round(d_gate), _round(grad * gate * sigmoid)


def _zones(schedule: MoKSchedule) -> list[tuple[slice, int]]:
    """The rows of each local expert."""
    ends = schedule.tokens_per_expert.cumsum(0).tolist()
    return [(slice(begin, end), expert) for expert, (begin, end) in enumerate(zip([0, *ends], ends))]
