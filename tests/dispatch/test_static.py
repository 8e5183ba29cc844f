"""Static budgets and the wire: what is dropped, what is counted, what travels, and that no stale row is read.

Scale experts (H = 1) on whole numbers: every expected value is exact and can be worked out by hand.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from sidestream.dispatch.base import Received, Routing
from sidestream.exchange.ops import Span
from sidestream.overlap.path import RoutedPath
from tests.core.build_tiny import DISPATCHERS, parallel_for
from tests.core.one_layer import run_layer
from tests.core.poison import NAN, poisoned_memory
from tests.core.scale_experts import run_path, scale_rows, wire
from tests.rank_pool import ranks

SCALES = [2.0, 3.0, 5.0, 7.0]
NAMES = [name for name in DISPATCHERS if name != "local"]
DEDUP = ("nccl_ep", "deep_ep", "hybrid_ep")
# `even`: every pair of ranks exchanges the most rows there can be, as static dispatchers do on a GPU.
STATIC = [(name, even) for name in NAMES for even in (False, True) if not (even and name == "allgather")]


def static(name: str, world: int, *, even: bool = False, budget: int | None = None, **options: Any) -> Any:
    """A static dispatcher of four experts; a `budget` given here is not rounded up."""
    options = {"max_tokens": 8, "capacity_factor": 4.0} | options
    group = parallel_for(world).ep_group if world > 1 else None
    dispatcher: Any = wire(name, num_experts=4, group=group, **options)
    dispatcher.even |= even
    if budget is not None:
        dispatcher.budget = budget
    return dispatcher


class Step(NamedTuple):
    """Of one rank: tokens `[T]`, ids `[T, K]`, weights `[T, K]`, gradient of the output `[T]`."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    up: Tensor


def run_scales(
    rank: int, world: int, dispatcher: Any, step: Step, *, layer: int = 0
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Output, gradients of tokens and weights, rows of the buffer."""
    x, weights = (t.clone().requires_grad_() for t in (step.x.unsqueeze(1), step.weights))
    scales, seen = torch.tensor(SCALES).chunk(world)[rank], []

    def experts(received: Received) -> Tensor:
        seen.append(len(received.rows))
        return scale_rows(received, scales)

    path = RoutedPath(x, Routing(step.ids, weights), dispatcher=dispatcher, experts=experts, layer=layer)
    y = run_path(path)
    y.backward(step.up.unsqueeze(1))
    return y.detach().squeeze(1), x.grad.squeeze(1), weights.grad, seen[0]


def random_step(rank: int, num_tokens: int, *, top_k: int = 2, seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    draw = partial(torch.randint, generator=generator)
    order = torch.rand(num_tokens, 4, generator=generator).argsort(dim=1)[:, :top_k]
    ids = torch.where(torch.rand(num_tokens, top_k, generator=generator) < 0.2, -1, order)
    shape = (num_tokens, top_k)
    return Step(
        draw(1, 9, (num_tokens,)).float(),
        ids,
        draw(1, 5, shape).float(),
        draw(-9, 9, (num_tokens,)).float(),
    )


class Outcome(NamedTuple):
    """What one rank must find: see `run_scales`; rows that its experts need."""

    y: list[float]
    x_grad: list[float]
    weights_grad: list[list[float]]
    needed: int
    dropped: int


def expected_outcomes(steps: list[Step], *, budget: int, alignment: int = 1) -> list[Outcome]:
    """The rule spelled out: slots are given by expert, source rank, token; those past the budget do not exist."""
    world, kept, needed, dropped = len(steps), set(), [], 0
    for owner in range(world):
        slot, num_local = 0, 4 // world
        for expert in range(owner * num_local, (owner + 1) * num_local):
            for rank, step in enumerate(steps):
                for t, k in (step.ids == expert).nonzero().tolist():
                    kept |= {(rank, t, k)} if slot < budget else set()
                    dropped += slot >= budget
                    slot += 1
            slot += -slot % alignment
        needed.append(slot)
    outcomes = []
    for rank, (x, ids, weights, up) in enumerate(steps):
        y, x_grad, weights_grad = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
        for t, k in product(*map(range, ids.shape)):
            if (rank, t, k) in kept:
                scale = SCALES[ids[t, k]]
                y[t] += scale * weights[t, k] * x[t]
                x_grad[t] += scale * weights[t, k] * up[t]
                weights_grad[t, k] = scale * x[t] * up[t]
        outcomes.append(Outcome(y.tolist(), x_grad.tolist(), weights_grad.tolist(), needed[rank], dropped))
    return outcomes


# ---- Overflow


def all_to_rank_0(rank: int, world: int, name: str, even: bool, budget: int) -> dict[str, Any]:
    dispatcher = static(name, world, even=even, budget=budget, top_k=1, max_tokens=3)
    ones = torch.ones(3)
    step = Step(torch.arange(1.0, 4.0) + 3 * rank, torch.zeros(3, 1, dtype=torch.int64), ones[:, None], ones)
    y, x_grad, weights_grad, num_slots = run_scales(rank, world, dispatcher, step)
    needed, dropped = dispatcher.needed().item(), dispatcher.dropped().item()
    dispatcher.close()
    return {
        "y": y.tolist(),
        "x_grad": x_grad.tolist(),
        "weights_grad": weights_grad.flatten().tolist(),
        "needed": needed,
        "dropped": dropped,
        "num_slots": num_slots,
    }


@pytest.mark.parametrize(("name", "even"), STATIC)
@pytest.mark.parametrize("budget", [4, 6, 64])
def test_a_buffer_that_is_too_small_loses_exactly_what_does_not_fit(name, even, budget):
    first, second = ranks(2).run(all_to_rank_0, name=name, even=even, budget=budget, limit_s=120)
    kept = [1.0] * min(budget, 6) + [0.0] * (6 - min(budget, 6))
    tokens = range(1, 7)
    assert first["y"] + second["y"] == [2.0 * t * k for t, k in zip(tokens, kept)]
    assert first["x_grad"] + second["x_grad"] == [2.0 * k for k in kept]
    assert first["weights_grad"] + second["weights_grad"] == [2.0 * t * k for t, k in zip(tokens, kept)]
    # What was needed is seen before anything is dropped; a budget equal to it is no overflow.
    assert (first["needed"], second["needed"]) == (6, 0)
    assert first["dropped"] + second["dropped"] == 6 - min(budget, 6)
    assert first["num_slots"] == second["num_slots"] == budget


def compare_with_the_rule(rank: int, world: int, name: str, even: bool) -> list[str]:
    """Differences from `expected_outcomes`, over many routings and budgets."""
    wrong, tokens = [], [8, 5, 0, 3][:world]
    for seed, alignment in product(range(6), (1, 4)):
        steps = [random_step(r, n, seed=seed) for r, n in enumerate(tokens)]
        most = max(o.needed for o in expected_outcomes(steps, budget=1000, alignment=alignment))
        most += -most % alignment
        budgets = {0, alignment, 2 * alignment, most // 2 // alignment * alignment, most - alignment, most}
        for budget in sorted(budgets):
            outcomes = expected_outcomes(steps, budget=budget, alignment=alignment)
            mine = outcomes[rank]
            # The gradient of a token that is lost altogether is not even read.
            step = steps[rank]
            without = torch.tensor(mine.weights_grad).view_as(step.weights) == 0
            step = step._replace(up=step.up.masked_fill(without.all(dim=1) & (step.up != 0), NAN))
            dispatcher = static(name, world, even=even, budget=budget, alignment=alignment)
            y, x_grad, weights_grad, num_slots = run_scales(rank, world, dispatcher, step)
            dropped = torch.tensor([dispatcher.dropped().item()])
            torch.distributed.all_reduce(dropped)
            found = Outcome(
                y.tolist(), x_grad.tolist(), weights_grad.tolist(), dispatcher.needed().item(), dropped.item()
            )
            dispatcher.close()
            if found != mine or num_slots != budget:
                wrong.append(f"seed {seed}, alignment {alignment}, budget {budget}: {found} is not {mine}")
    return wrong


@pytest.mark.parametrize(("name", "even"), STATIC)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.sample(3)
def test_last_experts_lose_first_and_last_sources_within_them(name, even, world):
    for wrong in ranks(world).run(compare_with_the_rule, name=name, even=even):
        assert not wrong, "\n".join(wrong[:3])


def count_over_plans(rank: int, world: int, name: str) -> list[tuple[list[int], list[int]]]:
    """Two layers, two plans each, rows needed by rank 0: 4, then 2, in layer 1; 6 in layer 0."""
    dispatcher = static(name, world, budget=4, num_layers=2, top_k=1)
    ones, seen = torch.ones(3), []

    def plan(num_tokens: int, layer: int) -> None:
        ids = torch.zeros(num_tokens, 1, dtype=torch.int64)
        step = Step(ones[:num_tokens], ids, ones[:num_tokens, None], ones[:num_tokens])
        run_scales(rank, world, dispatcher, step, layer=layer)
        dropped = dispatcher.dropped().clone()
        torch.distributed.all_reduce(dropped)
        seen.append((dispatcher.needed().tolist(), dropped.tolist()))

    for num_tokens, layer in [(2, 1), (1, 1), (3, 0), (3, 0)]:
        plan(num_tokens, layer)
    dispatcher.reset_needed()
    plan(1, 0)
    dispatcher.close()
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_needed_is_the_most_of_a_layer_and_dropped_the_sum_since_the_reset(name):
    first, second = ranks(2).run(count_over_plans, name=name)
    assert [needed for needed, _ in first] == [[0, 4], [0, 4], [6, 4], [6, 4], [2, 0]]
    assert [needed for needed, _ in second] == [[0, 0]] * 5
    assert [dropped for _, dropped in first] == [[0, 0], [0, 0], [2, 0], [4, 0], [0, 0]]


# ---- resize


def resize_in_steps(rank: int, world: int, name: str) -> list[Any]:
    dispatcher, found = static(name, world, budget=4, alignment=16), []
    steps = [random_step(r, 8, seed=3) for r in range(world)]
    for budget in (4, 65, 10):
        dispatcher.resize(budget)
        found.append((dispatcher.budget, *run_scales(rank, world, dispatcher, steps[rank])))
    found.append(dispatcher.needed().item())
    dispatcher.close()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_grows_to_whole_units_and_never_shrinks(name):
    steps = [random_step(r, 8, seed=3) for r in range(2)]
    expected = expected_outcomes(steps, budget=1000, alignment=16)
    for rank, (*rows, needed) in enumerate(ranks(2).run(resize_in_steps, name=name)):
        assert needed == expected[rank].needed <= 64
        for (budget, y, x_grad, weights_grad, num_slots), wanted in zip(rows, (64, 128, 128)):
            assert budget == num_slots == wanted
            assert [y.tolist(), x_grad.tolist(), weights_grad.tolist()] == list(expected[rank][:3])


def test_more_tokens_than_buffers_are_made_for_are_refused():
    for name in NAMES:
        dispatcher = static(name, 1, max_tokens=3)
        step = random_step(0, 4)
        with pytest.raises(ValueError, match=rf"dispatcher={name}: 4 tokens, .* 3; set dispatcher.capacity_"):
            dispatcher.plan(Routing(step.ids, step.weights))
        dispatcher.close()
    eager = wire("allgather", num_experts=4, max_tokens=3)
    with pytest.raises(ValueError, match=r"dispatcher=allgather: 4 tokens, .* 3; set dispatcher=alltoall"):
        eager.plan(Routing(step.ids, step.weights))
    eager.close()


# ---- Rows that nobody wrote


def stale_empty(original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """NaN in fresh rows; in fresh bytes and integers zeros, which pass for expert 0."""
    out = original(tensor, *args, **kwargs)
    return out.fill_(NAN if out.is_floating_point() else 0)


def big_then_small(rank: int, world: int, name: str, even: bool, tail: float) -> list[list[Tensor]]:
    """The small step after a big one, and with fresh buffers."""
    generator = torch.Generator().manual_seed(0)
    w_gate_up, w_down = (torch.randn(4, 64, n, generator=generator).chunk(world)[rank] for n in (128, 64))
    original = torch.Tensor.new_empty

    def step(dispatcher: Any, num_tokens: int, value: float) -> list[Tensor]:
        routes = random_step(rank, num_tokens, seed=num_tokens)
        leaves = [
            t.clone().requires_grad_()
            for t in (torch.full((num_tokens, 64), value), routes.weights, w_gate_up, w_down)
        ]
        x, weights, *experts = leaves
        y = run_layer(dispatcher, x, Routing(routes.ids, weights), *experts, tail=tail)
        y.backward(torch.ones_like(y))
        return [y.detach(), *(t.grad for t in leaves)]

    found = []
    patched = mock.patch.object(torch.Tensor, "new_empty", lambda *a, **k: stale_empty(original, *a, **k))
    with poisoned_memory(), patched:
        for sizes in ([(8, 7.0), (3 - rank, 1.0)], [(3 - rank, 1.0)]):
            dispatcher = static(name, world, even=even, hidden=64)
            results = [step(dispatcher, *size) for size in sizes]
            found.append([*results[-1], dispatcher.needed().clone() if len(sizes) == 1 else torch.zeros(1)])
            dispatcher.close()
    return found


@pytest.mark.parametrize("tail", [NAN, pytest.param(1e38, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "even"), STATIC)
def test_a_small_step_after_a_big_one_equals_a_fresh_buffer(name, even, tail):
    results = ranks(2).run(big_then_small, name=name, even=even, tail=tail)
    for rank, (after, fresh) in enumerate(results):
        for one, other in zip(after[:-1], fresh[:-1]):
            assert one.isfinite().all() and torch.equal(one, other)
        steps = [random_step(r, 3 - r, seed=3 - r) for r in range(2)]
        assert fresh[-1].item() == expected_outcomes(steps, budget=1000)[rank].needed


# ---- Odd and unequal token counts


def unequal_tokens(rank: int, world: int, name: str, tokens: list[int]) -> list[str]:
    steps = [random_step(r, n, seed=1) for r, n in enumerate(tokens)]
    expected = expected_outcomes(steps, budget=1000)[rank]
    wrong = []
    for mode in ("eager", "static", "even"):
        options = {"max_tokens": 17, "capacity_factor": None if mode == "eager" else 4.0}
        dispatcher = static(name, world, even=mode == "even", **options)
        y, x_grad, weights_grad, _ = run_scales(rank, world, dispatcher, steps[rank])
        dispatcher.close()
        if [y.tolist(), x_grad.tolist(), weights_grad.tolist()] != list(expected[:3]):
            wrong.append(mode)
    return wrong


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "tokens",
    [[15, 16], [1, 0], *(pytest.param(t, marks=pytest.mark.full) for t in ([7, 7], [17, 3], [0, 0]))],
)
def test_unequal_tokens_per_rank(name, tokens):
    assert ranks(2).run(unequal_tokens, name=name, tokens=tokens, limit_s=120) == [[], []]


# ---- Several plans in flight


def interleave(rank: int, world: int, name: str, factor: float | None, interleaved: bool) -> list[Tensor]:
    """Two layers: one after the other, or every stage of both started before either is waited for."""
    dispatcher = static(name, world, capacity_factor=factor, num_layers=2)
    scales, steps = (
        torch.tensor(SCALES).chunk(world)[rank],
        [random_step(rank, 7 - s, seed=s) for s in (0, 1)],
    )
    leaves = [[t.clone().requires_grad_() for t in (s.x.unsqueeze(1), s.weights)] for s in steps]
    experts = partial(scale_rows, scales=scales)

    def make_path(index: int) -> RoutedPath:
        x, weights = leaves[index]
        return RoutedPath(
            x, Routing(steps[index].ids, weights), dispatcher=dispatcher, experts=experts, layer=index
        )

    if interleaved:
        paths = [make_path(0), make_path(1)]
        for stage, first in (("dispatch", 1), ("combine", 0)):
            for path in paths:
                path.start(stage)
            out = {index: paths[index].finish(stage) for index in (first, 1 - first)}
            if stage == "dispatch":
                for path in reversed(paths):
                    path.run("experts")
        ys = [out[0], out[1]]
    else:
        ys = [run_path(make_path(index)) for index in (0, 1)]
    torch.autograd.backward(ys, [s.up.unsqueeze(1) for s in steps])
    needed = torch.zeros(1) if factor is None else dispatcher.needed().clone()
    dispatcher.close()  # raises if a transfer was left
    return [*(y.detach() for y in ys), *(t.grad for pair in leaves for t in pair), needed]


@pytest.mark.parametrize("factor", [None, 4.0])
@pytest.mark.parametrize("name", NAMES)
def test_plans_in_flight_do_not_disturb_each_other(name, factor):
    apart, mixed = (
        ranks(2).run(interleave, name=name, factor=factor, interleaved=flag) for flag in (False, True)
    )
    for one, other in zip(apart, mixed):
        assert all(map(torch.equal, one, other))


# ---- Bytes

BYTES_H = 64


def bytes_of_a_pass(rank: int, world: int, name: str, factor: float | None, even: bool) -> dict[str, Any]:
    """By tag, from the spans; and the two counters."""
    dispatcher = static(name, world, capacity_factor=factor, even=even, hidden=BYTES_H)
    dispatcher.channel.spans = spans = []
    step = random_step(rank, 8 - rank)
    x, weights = torch.ones(8 - rank, BYTES_H, requires_grad=True), step.weights.clone().requires_grad_()
    num_local = 4 // world
    y = run_layer(
        dispatcher,
        x,
        Routing(step.ids, weights),
        torch.ones(num_local, BYTES_H, 2 * BYTES_H),
        torch.ones(num_local, BYTES_H, BYTES_H),
    )
    y.sum().backward()
    totals = dispatcher.bytes_sent(), dispatcher.metadata_bytes_sent()
    dispatcher.close()
    by_tag: dict[str, int] = {}
    span: Span
    for span in spans:
        by_tag[span.tag] = by_tag.get(span.tag, 0) + span.sent_bytes
    return {"tags": by_tag, "totals": totals}


def rows_between(name: str, world: int, even: bool) -> list[list[int]]:
    """`[source][destination]` rows."""
    counts = [[0] * world for _ in range(world)]
    for source, destination in product(range(world), repeat=2):
        ids = random_step(source, 8 - source).ids
        here = (ids // (4 // world) == destination) & (ids >= 0)
        dedup = name in DEDUP
        rows = here.any(dim=1).sum() if dedup else here.sum()
        most = 8 if dedup or name == "allgather" else 8 * min(2, 4 // world)
        counts[source][destination] = most if even or name == "allgather" else int(rows)
    return counts


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("name", "factor", "even"),
    [*((name, None, False) for name in NAMES), *((name, 4.0, even) for name, even in STATIC)],
)
def test_bytes_on_the_wire_are_the_rows_and_the_stated_metadata(name, factor, even, world):
    rows, others, num_local = rows_between(name, world, even), world - 1, 4 // world
    row_bytes, routes = 4 * BYTES_H, 1 if name == "alltoall" else 2
    for rank, found in enumerate(
        ranks(world).run(bytes_of_a_pass, name=name, factor=factor, even=even, limit_s=60)
    ):
        leave = sum(rows[rank]) - rows[rank][rank]
        come = sum(row[rank] for row in rows) - rows[rank][rank]
        metadata = {
            "dispatch.routes": leave * routes * (4 + 2),  # a weight and a 16-bit id per route
            "dispatch.routes.backward": come * routes * 4,
        }
        if factor is None:
            metadata["dispatch.counts"] = others * 8 * (1 + num_local)
        elif not even and name != "allgather":
            metadata["dispatch.counts"] = others * 8
        if factor is not None and name == "deep_ep":
            metadata["dispatch.histogram"] = others * 8 * 4
        moved = {
            "dispatch": leave * row_bytes,
            "combine.backward": leave * row_bytes,
            "combine": come * row_bytes,
            "dispatch.backward": come * row_bytes,
        }
        assert found["tags"] == metadata | moved
        assert found["totals"] == (sum((metadata | moved).values()), sum(metadata.values()))


def test_deduplication_sends_fewer_rows_than_routes():
    """Two experts on a rank: a token that chose both travels once."""
    deduplicated, plain = (sum(map(sum, rows_between(name, 2, False))) for name in ("nccl_ep", "alltoall"))
    assert deduplicated < plain
