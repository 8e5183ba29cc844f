"""Every dispatcher against a dense computation in one process: outputs, gradients, and bits.

The reference sends nothing: each expert runs on every token of every rank, in fp64. A new dispatcher is tested by
being added to `DISPATCHERS`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Dispatcher, Routing
from sidestream.routing.router import SoftmaxRouter
from tests.core.build_tiny import DISPATCHERS, parallel_for
from tests.core.one_layer import check_received, run_layer
from tests.core.pairwise import pairwise
from tests.core.poison import NAN, poisoned_memory
from tests.core.scale_experts import wire
from tests.rank_pool import ranks

HIDDEN = WIDTH = 64  # multiples of the CPU's vectors, see `receive_budget`
NUM_EXPERTS, TOKENS = 8, 16
UNEQUAL = {1: [0], 2: [13, 0], 4: [7, 16, 0, 1]}

# Of the largest entry of a tensor over all ranks, against fp64. fp32: two sums of 64 products and one over the
# routes, each rounded at 6e-8; 7e-7 seen. bf16 keeps 8 bits, 0.4 %, and rounds at every step: 1.2 % seen.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """What the suite varies.

    Attributes:
        mode: `even` is what `static` does on a GPU: every pair of ranks exchanges the most rows there can be.
    """

    dispatcher: str
    world: int
    mode: str
    dtype: torch.dtype
    routing: str
    alignment: int


ROUTINGS = ["uniform", "skewed", "starved", "gaps", "unequal", "all"]
ROWS = [
    Case(*row)
    for row in product(
        DISPATCHERS,
        (1, 2, 4),
        ("eager", "static", "even"),
        (torch.float32, torch.bfloat16),
        ROUTINGS,
        (1, 16),
    )
    if not (row[0] == "local" and (row[1] > 1 or row[2] != "eager"))
    and not (row[2] == "even" and (row[1] == 1 or row[0] == "allgather"))  # nothing to send; always even
]
SAMPLE = pairwise(ROWS)


@dataclass(frozen=True)
class Inputs:
    """Of all ranks, token-major; `tokens` says which are whose."""

    tokens: list[int]
    top_k: int
    x: Tensor
    logits: Tensor
    lost: Tensor  # [T, K] routes that become -1
    w_gate_up: Tensor
    w_down: Tensor
    up: Tensor  # gradient of the output

    def mine(self, rank: int, world: int) -> Inputs:
        """Tokens and experts of one rank, as leaves of a graph."""
        begin, num_local = sum(self.tokens[:rank]), NUM_EXPERTS // world
        rows = slice(begin, begin + self.tokens[rank])
        experts = slice(rank * num_local, (rank + 1) * num_local)
        tokens = {name: getattr(self, name)[rows] for name in ("x", "logits", "lost", "up")}
        weights = {name: getattr(self, name)[experts] for name in ("w_gate_up", "w_down")}
        leaves = {name: leaf(t) for name, t in (tokens | weights).items()}
        return replace(self, tokens=[self.tokens[rank]], **leaves)


def leaf(t: Tensor) -> Tensor:
    return t.clone().requires_grad_(t.is_floating_point())


def make_inputs(world: int, routing: str, dtype: torch.dtype) -> Inputs:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(ROUTINGS.index(routing))
    tokens = UNEQUAL[world] if routing == "unequal" else [TOKENS] * world
    top_k, total = NUM_EXPERTS if routing == "all" else 3, sum(tokens)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits, lost = randn(total, NUM_EXPERTS), torch.zeros(total, top_k, dtype=torch.bool)
    if routing == "skewed":
        logits += 3 * torch.log(1 / torch.arange(1.0, NUM_EXPERTS + 1))  # Zipf, to the third power
    if routing == "starved":
        logits[:, -(NUM_EXPERTS // max(world, 2)) :] -= 100  # the last rank
    if routing == "gaps":
        lost = torch.rand(total, top_k, generator=generator) < 0.3
        lost[1] = True
    return Inputs(
        tokens,
        top_k,
        randn(total, HIDDEN).to(dtype),
        logits,
        lost,
        (randn(NUM_EXPERTS, HIDDEN, 2 * WIDTH) / 8).to(dtype),
        (randn(NUM_EXPERTS, WIDTH, HIDDEN) / 8).to(dtype),
        randn(total, HIDDEN).to(dtype),
    )


# ---- The reference.


@cache
def dense(world: int, routing: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients over all ranks, in fp64."""
    given = make_inputs(world, routing, dtype)
    x, logits, w_gate_up, w_down = (
        t.double().requires_grad_() for t in (given.x, given.logits, given.w_gate_up, given.w_down)
    )
    chosen = given.logits.topk(given.top_k).indices
    probs = torch.softmax(logits, dim=1).gather(1, chosen)
    weights = torch.where(given.lost, 0.0, probs / probs.sum(dim=1, keepdim=True))
    weights.retain_grad()
    y = torch.zeros_like(x)
    for e in range(NUM_EXPERTS):
        gate, up = (x @ w_gate_up[e]).chunk(2, dim=1)
        weight = torch.where(chosen == e, weights, 0.0).sum(dim=1, keepdim=True)
        y = y + weight * ((F.silu(gate) * up) @ w_down[e])
    y.backward(given.up.double())
    return {
        "y": y.detach(),
        "x": x.grad,
        "logits": logits.grad,
        "weights": weights.grad.masked_fill(given.lost, 0.0),
        "w_gate_up": w_gate_up.grad,
        "w_down": w_down.grad,
    }


def expected_rows(inputs: Inputs, rank: int, world: int, alignment: int) -> tuple[Tensor, list[int]]:
    """What the experts of `rank` get, as NCCL EP orders it: by expert, then source rank, then token."""
    chosen = inputs.logits.topk(inputs.top_k).indices.masked_fill(inputs.lost, -1)
    num_local = NUM_EXPERTS // world
    pieces, ends = [inputs.x[:0]], []
    for e in range(rank * num_local, (rank + 1) * num_local):
        rows = inputs.x[(chosen == e).any(dim=1)]
        pieces.append(F.pad(rows, (0, 0, 0, -len(rows) % alignment)))
        ends.append(sum(map(len, pieces)))
    return torch.cat(pieces), ends


def share_of(reference: dict[str, Tensor], tokens: list[int], rank: int, world: int) -> dict[str, Tensor]:
    """The part of each tensor that `rank` computes."""
    return {
        name: t.chunk(world)[rank] if name.startswith("w_") else t.split(tokens)[rank]
        for name, t in reference.items()
    }


# ---- What is tested.


def make_dispatcher(case: Case, mode: str, inputs: Inputs, world: int) -> Dispatcher:
    # Room for every route on one rank, and for the padding of every expert.
    options = {} if mode == "eager" else {"capacity_factor": world + 8.0}
    dispatcher: Any = wire(
        case.dispatcher,
        num_experts=NUM_EXPERTS,
        group=parallel_for(world).ep_group,
        hidden=HIDDEN,
        alignment=case.alignment,
        max_tokens=max(*inputs.tokens, 1),
        top_k=inputs.top_k,
        **options,
    )
    if mode == "even":
        dispatcher.even = True
    return dispatcher


def one_pass(
    case: Case, mode: str, inputs: Inputs, rank: int, world: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Output, gradients, and the tags of all transfers in order."""
    dispatcher, mine, tags = make_dispatcher(case, mode, inputs, world), inputs.mine(rank, world), []
    if case.dispatcher != "local":
        dispatcher.channel.on_start = tags.append
    routing = SoftmaxRouter(top_k=inputs.top_k)(mine.logits).routing
    weights = routing.weights
    if case.routing == "gaps":
        weights = torch.where(mine.lost, NAN, weights)  # never read
        routing = Routing(routing.expert_ids.masked_fill(mine.lost, -1), weights)
    weights.retain_grad()

    def look(plan, received):
        check_received(received, alignment=case.alignment, num_slots=plan.rows())
        rows, ends = expected_rows(inputs, rank, world, case.alignment)
        assert received.offsets.tolist() == ends and torch.equal(received.rows[: ends[-1]], rows)
        if mode != "eager":
            assert dispatcher.needed().tolist() == [ends[-1]] and dispatcher.dropped().tolist() == [0]
        elif world > 1:
            assert received.exact and dispatcher.needed() is None is dispatcher.dropped()

    y = run_layer(dispatcher, mine.x, routing, mine.w_gate_up, mine.w_down, look=look)
    y.backward(mine.up)
    dispatcher.close()
    grads = {name: getattr(mine, name).grad for name in ("x", "logits", "w_gate_up", "w_down")}
    return {"y": y.detach(), "weights": weights.grad, **grads}, tags


def check_case(rank: int, world: int, case: Case) -> tuple[dict[str, float], list[str]]:
    inputs = make_inputs(world, case.routing, case.dtype)
    with poisoned_memory():
        found, tags = one_pass(case, case.mode, inputs, rank, world)
        if case.mode != "eager":
            exact, _ = one_pass(case, "eager", inputs, rank, world)
            for name, value in exact.items():
                assert torch.equal(found[name], value), f"{name}: static differs from eager"
    reference = dense(world, case.routing, case.dtype)
    expected = share_of(reference, inputs.tokens, rank, world)
    errors = {}
    for name, value in found.items():
        assert value.dtype == (torch.float32 if name in ("logits", "weights") else case.dtype)
        largest = reference[name].abs().max().item() if reference[name].numel() else 0.0
        distance = (value.double() - expected[name]).abs()
        errors[name] = (distance.max().item() if distance.numel() else 0.0) / (largest or 1.0)
    return errors, tags


def check_cases(rank: int, world: int, cases: list[Case]) -> list[tuple[dict[str, float], list[str]]]:
    found = []
    for case in cases:
        try:
            found.append(check_case(rank, world, case))
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
    return found


def expected_tags(case: Case) -> list[str]:
    if case.world == 1:
        return []
    counts = {"eager": ["dispatch.counts"], "static": ["dispatch.counts"], "even": []}[case.mode]
    if case.mode != "eager" and case.dispatcher == "allgather":
        counts = []
    if case.mode != "eager" and case.dispatcher == "deep_ep":
        counts = ["dispatch.histogram", *counts]
    forward = [*counts, "dispatch.routes", "dispatch", "combine"]
    return [*forward, "combine.backward", "dispatch.backward", "dispatch.routes.backward"]


def check_on_ranks(cases: list[Case]) -> None:
    results = ranks(cases[0].world).run(check_cases, cases=cases, limit_s=110)
    for index, case in enumerate(cases):
        for rank, result in enumerate(results):
            errors, tags = result[index]
            for name, error in errors.items():
                assert error < TOLERANCE[case.dtype], f"{case}, rank {rank}: {name} is off by {error:.1e}"
            assert tags == expected_tags(case), f"{case}, rank {rank}"


PATHS = [path for path, _ in groupby(ROWS, key=lambda case: case[:2])]


@pytest.mark.parametrize(("dispatcher", "world"), PATHS)
def test_dispatchers_equal_a_dense_layer(dispatcher: str, world: int) -> None:
    check_on_ranks([case for case in SAMPLE if case[:2] == (dispatcher, world)])


@pytest.mark.full
@pytest.mark.parametrize(("dispatcher", "world"), PATHS)
def test_dispatchers_equal_a_dense_layer_full(dispatcher: str, world: int) -> None:
    check_on_ranks([case for case in ROWS if case[:2] == (dispatcher, world) and case not in SAMPLE])
