"""What every dispatcher promises, and every fusion that is its own dispatcher. Collective: all ranks try together.

A dispatcher is wired once, so these properties take what makes one.

Legend: T tokens of this rank, K routes per token, H features, E experts, R ranks, L = E / R local experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.conformance import rows
from sidestream.conformance.experts import compare
from sidestream.conformance.suite import Property
from sidestream.conformance.values import output_problem, received_problem
from sidestream.dispatch.base import DispatchSpec, Routing
from sidestream.dispatch.local import LocalDispatcher
from sidestream.exchange.link import NativeLink
from sidestream.fusion.loop import LoopExperts

TOKENS, HIDDEN, WIDTH, TOP_K, LAYERS, LOCAL = 24, 32, 16, 3, 2, 4
# A dispatcher may send less than it was given, such as 8 bits per value.
_PRECISION = "mxfp8"
_CASES = ("uniform", "one rank takes all", "missing routes", "unequal tokens")

Make = Callable[[], Any]


def _group() -> rows.Group:
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None


def _spec(*, dtype: torch.dtype, alignment: int = 1) -> DispatchSpec:
    return DispatchSpec(
        num_experts=LOCAL * rows.place(_group())[1],
        hidden_size=HIDDEN,
        alignment=alignment,
        max_tokens=TOKENS,
        top_k=TOP_K,
        num_layers=LAYERS,
        dtype=dtype,
    )


def _wired(make: Make, spec: DispatchSpec) -> Any:
    part = make()
    part.wire(group=_group(), spec=spec, link=NativeLink())
    return part


def _given(case: str, spec: DispatchSpec, rank: int, *, seed: int = 0) -> rows.Given:
    """What one rank has; every rank can make it."""
    draw = torch.Generator().manual_seed(100 * seed + 10 * _CASES.index(case) + rank)
    tokens = max(0, TOKENS - 11 * rank) if case == "unequal tokens" else TOKENS
    scores = torch.rand(tokens, spec.num_experts, generator=draw)
    if case == "one rank takes all":
        scores[:, :LOCAL] += 1
    chosen = scores.topk(TOP_K, dim=1).indices
    if case == "missing routes":
        chosen[torch.rand(chosen.shape, generator=draw) < 0.4] = -1
        chosen[:2] = -1
    x, gradient = (torch.randn(tokens, HIDDEN, generator=draw).to(spec.dtype) for _ in range(2))
    weights = torch.rand(chosen.shape, generator=draw)
    return rows.Given(x, gradient, Routing(chosen, weights, complete=case != "missing routes"))


def _moves(make: Make, *, case: str, dtype: torch.dtype, alignment: int) -> str | None:
    spec, group = _spec(dtype=dtype, alignment=alignment), _group()
    given = _given(case, spec, rows.place(group)[0])
    part, found = _wired(make, spec), []

    def look(received: Any) -> None:
        sizes: dict[str, Any] = {"hidden": HIDDEN, "num_local": LOCAL, "alignment": alignment, "dtype": dtype}
        found.append(received_problem(received, **sizes))

    scales = rows.make_scales(spec.num_experts, HIDDEN, spec.device, seed=1)
    outcome = rows.found_by(part, given, scales, group=group, look=look)
    part.close()
    if found[0] is not None:
        return found[0]
    if (problem := output_problem("what combine gives", outcome.output, like=given.x)) is not None:
        return problem
    if outcome.dropped:  # which routes a budget loses is the dispatcher's choice
        return None
    right = rows.wanted(given, scales, ids=given.routing.expert_ids, group=group)
    return rows.too_far(rows.distance(outcome, right, group=group), _PRECISION)


def _in_flight(make: Make) -> str | None:
    """Two plans at a time, whose results come back to their own."""
    spec, group = _spec(dtype=torch.float32), _group()
    rank = rows.place(group)[0]
    part = _wired(make, spec)
    givens = [_given("uniform", spec, rank, seed=seed) for seed in range(2)]
    plans = [part.plan(given.routing, layer=layer) for layer, given in enumerate(givens)]
    pending = [part.dispatch(given.x, plan) for given, plan in zip(givens, plans)]
    received = [p.wait() for p in pending]
    ones = torch.ones(LOCAL, HIDDEN)
    pending = [part.combine(rows.scale_rows(r, ones), plan) for r, plan in zip(received, plans)]
    outputs = [p.wait() for p in pending]
    dropped = part.dropped()
    lost = 0 if dropped is None else int(dropped.sum())
    part.close()
    for number, (given, output) in enumerate(zip(givens, outputs)):
        right = given.x * given.routing.weights.sum(1, keepdim=True)
        if not lost and not bool((output - right).abs().max() <= 0.1 * right.abs().max()):
            return f"with two plans under way the result of plan {number} is another's"
    return None


def _same_bits(make: Make) -> str | None:
    spec, group = _spec(dtype=torch.bfloat16), _group()
    given = _given("uniform", spec, rows.place(group)[0])
    scales = rows.make_scales(spec.num_experts, HIDDEN, spec.device, seed=1)
    part = _wired(make, spec)
    one, other = (rows.found_by(part, given, scales, group=group) for _ in range(2))
    part.close()
    differing = [
        n for (n, a), b in zip(one.tensors().items(), other.tensors().values()) if not torch.equal(a, b)
    ]
    return f"{differing[0]} differs between two passes on the same rows" if differing else None


def _counts(make: Make) -> str | None:
    spec, group = _spec(dtype=torch.float32), _group()
    given = _given("uniform", spec, rows.place(group)[0])
    part = _wired(make, spec)
    before = part.bytes_sent(), part.metadata_bytes_sent()
    rows.found_by(part, given, rows.make_scales(spec.num_experts, HIDDEN, spec.device, seed=1), group=group)
    sent, metadata = part.bytes_sent(), part.metadata_bytes_sent()
    budget, counters = part.budget, {"needed": part.needed(), "dropped": part.dropped()}
    problem = None
    if not (isinstance(sent, int) and sent >= before[0] >= 0 and 0 <= metadata <= sent):
        problem = (
            f"bytes_sent is {sent!r} and metadata_bytes_sent {metadata!r}, expected counts that only grow"
        )
    for name, value in counters.items():
        if problem is None and (value is None) != (budget is None):
            problem = f"{name} is {'None' if value is None else 'counted'} with a budget of {budget}"
        if problem is None and value is not None and (value.dtype, value.shape) != (torch.int64, (LAYERS,)):
            problem = f"{name} is {value.dtype} of shape {list(value.shape)}, expected int64 [{LAYERS}]"
    part.reset_needed()
    if problem is None and any(
        value is not None and bool(value.any()) for value in (part.needed(), part.dropped())
    ):
        problem = "reset_needed leaves counts behind"
    part.close()
    return problem


DISPATCHER = [
    *(
        Property(
            f"rows, weights and gradients find their way: {case}",
            partial(_moves, case=case, dtype=torch.float32, alignment=1),
        )
        for case in _CASES
    ),
    Property("the same in bf16", partial(_moves, case="uniform", dtype=torch.bfloat16, alignment=1)),
    Property("segments of 16 rows", partial(_moves, case="uniform", dtype=torch.float32, alignment=16)),
    Property("two plans under way", _in_flight),
    Property("the same rows give the same bits", _same_bits),
    Property("counters of bytes, of rows needed, of routes dropped", _counts),
]


def _weights(spec: DispatchSpec) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    gate_up = torch.randn(spec.num_experts, HIDDEN, 2 * WIDTH, generator=draw) / HIDDEN**0.5
    down = torch.randn(spec.num_experts, WIDTH, HIDDEN, generator=draw) / WIDTH**0.5
    return [gate_up.to(spec.dtype), down.to(spec.dtype)]


def _alone(case: str, spec: DispatchSpec) -> list[Tensor]:
    """Output and gradients of all tokens of all ranks, in one process."""
    givens = [_given(case, spec, rank) for rank in range(rows.place(_group())[1])]
    leaves = [
        torch.cat([given.x for given in givens]),
        torch.cat([given.routing.weights for given in givens]),
    ]
    x, weights, gate_up, down = (t.requires_grad_() for t in (*leaves, *_weights(spec)))
    local = LocalDispatcher()
    local.wire(group=None, spec=spec, link=NativeLink())
    plan = local.plan(Routing(torch.cat([given.routing.expert_ids for given in givens]), weights))
    y = local.combine(LoopExperts()(local.dispatch(x, plan).wait(), gate_up, down), plan).wait()
    y.backward(torch.cat([given.output_gradient for given in givens]))
    return [y.detach(), *(t.grad for t in (x, weights, gate_up, down))]  # type: ignore[list-item]


def _computes(make: Make, *, case: str, dtype: torch.dtype) -> str | None:
    group = _group()
    rank, ranks = rows.place(group)
    spec = _spec(dtype=dtype, alignment=16 if dtype == torch.bfloat16 else 1)
    part = _wired(make, spec)
    tokens = [len(_given(case, spec, r).x) for r in range(ranks)]
    given, mine = _given(case, spec, rank), slice(rank * LOCAL, (rank + 1) * LOCAL)
    x, weights = given.x.requires_grad_(), given.routing.weights.requires_grad_()
    experts = [w[mine].clone().requires_grad_() for w in _weights(spec)]
    routing = Routing(given.routing.expert_ids, weights)
    y = part.start(x, routing, experts, layer=0, recompute=False).wait()
    if (problem := output_problem("its result", y, like=x)) is None:
        y.backward(given.output_gradient)
    dropped = part.dropped()
    lost = 0 if dropped is None else int(dropped.sum())
    part.close()
    if problem is not None or lost:
        return problem
    whole = _alone(case, spec)
    right = [*(t.split(tokens)[rank] for t in whole[:3]), *(t[mine] for t in whole[3:])]
    found = [y.detach(), *(t.grad for t in (x, weights, *experts))]
    return compare(found, right, 1e-5 if dtype == torch.float32 else 3e-2)


FUSED = [
    *(
        Property(
            f"rows, weights and gradients, as one process computes them: {case}",
            partial(_computes, case=case, dtype=torch.float32),
        )
        for case in _CASES
    ),
    Property("the same in bf16", partial(_computes, case="uniform", dtype=torch.bfloat16)),
]
