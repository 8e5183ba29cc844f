"""Expert capacity: how large, what is dropped, padding to it, and what reaches the experts."""

from functools import partial

import pytest
import torch

from sidestream.dispatch.base import Routing
from sidestream.overlap.path import RoutedPath
from sidestream.routing.capacity import drop_over_capacity, expert_capacity, pad_to_capacity
from sidestream.routing.router import SigmoidRouter, SoftmaxRouter
from tests.core.build_tiny import (
    DISPATCHERS,
    Setup,
    local_batch,
    make_model,
    make_step,
    parallel_for,
    run_steps,
)
from tests.core.scale_experts import run_path, scale_rows, wire
from tests.rank_pool import ranks


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "factor", "capacity"),
    [(5, 1, 4, 1.0, 2), (4, 2, 2, 4.0, 16), (100, 1, 11, 1.1, 10), (8, 2, 8, 1.25, 3), (3, 1, 8, 0.5, 1)],
)
def test_capacity_is_rounded_up_exactly(num_tokens, top_k, num_experts, factor, capacity):
    # 100 * 1.1 / 11 is 10.000000000000002 in fp64.
    assert expert_capacity(num_tokens, top_k=top_k, num_experts=num_experts, factor=factor) == capacity


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_all_tokens_to_one_expert(policy):
    logits = torch.tensor([[9.0, 0, 0, 0]]).repeat(5, 1)
    decision = SoftmaxRouter(top_k=1, expert_capacity_factor=1.0, drop_policy=policy)(logits)
    assert decision.routing.expert_ids.flatten().tolist() == [0, 0, -1, -1, -1]  # ties: the earlier token
    assert decision.dropped.item() == 3 and not decision.routing.complete
    assert decision.counts.tolist() == [5, 0, 0, 0]  # balancing sees what was chosen


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True])
def test_capacity_larger_than_the_token_count(policy, pad):
    router = SoftmaxRouter(top_k=2, expert_capacity_factor=4.0, drop_policy=policy, pad_to_capacity=pad)
    decision = router(torch.randn(4, 2))
    assert decision.dropped.item() == 0
    assert (decision.routing.expert_ids[:4] >= 0).all()


@pytest.mark.parametrize(("policy", "kept"), [("probs", [-1, 0, 0]), ("position", [0, 0, -1])])
def test_drop_policies_keep_the_largest_weights_or_the_first_tokens(policy, kept):
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0.2], [0.9], [0.5]])
    left, dropped = drop_over_capacity(ids, weights, capacity=2, num_experts=2, policy=policy)
    assert left.flatten().tolist() == kept and dropped.item() == 1


def test_routes_compete_within_their_expert_only_and_padding_takes_no_place():
    ids = torch.tensor([[0, 1], [-1, -1], [0, 2], [1, 0]])
    weights = torch.tensor([[0.1, 0.9], [5.0, 5.0], [0.3, 0.7], [0.8, 0.2]])
    left, dropped = drop_over_capacity(ids, weights, capacity=1, num_experts=3, policy="probs")
    assert left.tolist() == [[-1, 1], [-1, -1], [0, 2], [-1, -1]] and dropped.item() == 3
    left, dropped = drop_over_capacity(ids, weights, capacity=1, num_experts=3, policy="position")
    assert left.tolist() == [[0, 1], [-1, -1], [-1, 2], [-1, -1]] and dropped.item() == 3


def test_dropping_equals_an_obvious_loop():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 6, generator=generator)
    for policy in ("probs", "position"):
        free = SigmoidRouter(top_k=3)(logits).routing
        limited = SigmoidRouter(top_k=3, expert_capacity_factor=0.7, drop_policy=policy)(logits).routing
        assert torch.equal(free.weights, limited.weights)  # not renormalised
        expected = free.expert_ids.clone()
        for e in range(6):
            routes = [(t, k) for t in range(60) for k in range(3) if free.expert_ids[t, k] == e]
            if policy == "probs":
                routes.sort(key=lambda route: -free.weights[route].item())
            for route in routes[21:]:
                expected[route] = -1
        assert torch.equal(limited.expert_ids, expected)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dropped_route_adds_exactly_zero(name):
    logits = torch.tensor([[2.0, 0.0], [3.0, 0.0], [1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]], requires_grad=True)
    routing = SoftmaxRouter(top_k=1, expert_capacity_factor=1.0)(logits).routing
    mover = wire(name, num_experts=2)
    experts = partial(scale_rows, scales=torch.tensor([10.0, 100.0]))
    y = run_path(RoutedPath(x, routing, dispatcher=mover, experts=experts)).flatten()
    y.sum().backward()
    mover.close()
    p = torch.softmax(logits.detach(), dim=1).tolist()
    assert y.tolist() == pytest.approx([10 * p[0][0], 20 * p[1][0], 0.0, 400 * p[3][1]])
    assert y[2] == 0.0 and x.grad[2] == 0.0 and logits.grad[2].abs().max() == 0.0


# padding to capacity


def test_padding_fills_every_expert_exactly():
    ids = torch.tensor([[0, 1], [0, -1], [-1, -1]])
    padded = pad_to_capacity(Routing(ids, torch.ones(3, 2)), torch.tensor([5, 1, 0]), capacity=2)
    # 5 routes were chosen, 2 of them kept.
    assert torch.equal(padded.expert_ids[:3], ids)
    extra = padded.expert_ids[3:]
    assert extra.shape == (3, 2) and sorted(extra.flatten().tolist()) == [-1, -1, -1, 1, 2, 2]
    assert padded.weights[3:].abs().max() == 0.0


def capacity_rows(rank, world, name, ep):
    """Rows of each local expert, output and gradients, with and without padding, of skewed routing."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(12, 4, generator=generator), torch.randn(12, 1, generator=generator)
    found = []
    for pad in (False, True):
        logits, x = (v.clone().requires_grad_() for v in values)
        router = SoftmaxRouter(top_k=2, expert_capacity_factor=0.9, pad_to_capacity=pad)
        routing = router(logits + torch.tensor([2.0, 0.0, 0.0, 0.0])).routing
        mover = wire(name, num_experts=4, group=parallel_for(ep).ep_group)
        scales, rows = torch.tensor([1.0, 2.0, 3.0, 4.0]).chunk(ep)[rank % ep], []

        def experts(received, scales=scales, rows=rows):
            rows += received.offsets.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
            return scale_rows(received, scales)

        y = run_path(RoutedPath(x, routing, dispatcher=mover, experts=experts))
        y.sum().backward()
        mover.close()
        found.append((rows, y.detach(), x.grad, logits.grad))
    return found


@pytest.mark.parametrize(("name", "world", "ep"), [("local", 1, 1), ("alltoall", 1, 1), ("alltoall", 2, 2)])
def test_pad_to_capacity_gives_every_expert_capacity_rows_and_the_same_numbers(name, world, ep):
    for plain, padded in ranks(world).run(capacity_rows, name=name, ep=ep):
        assert padded[0] == [6 * ep] * (4 // ep)  # ceil(12 * 2 * 0.9 / 4) from each rank
        assert sum(plain[0]) < sum(padded[0])
        assert all(torch.equal(a, b) for a, b in zip(plain[1:], padded[1:]))
        assert padded[1].shape == (12, 1)


# in training


def dropped_in_a_step(rank, world, setup):
    model = make_model(setup)
    step = make_step(setup, model, world)
    step.attempt(local_batch(setup, 0, rank, world))
    report = step.check()
    mine = model.ledger.dropped.clone()
    step.attempt(local_batch(setup, 0, rank, world))
    assert torch.equal(model.ledger.dropped, mine), "the ledger is cleared"
    step.reduction.close()
    return report.dropped, mine.tolist(), report.counts


@pytest.mark.parametrize("router", ["capacity", "capacity_padded", "position"])
def test_drops_are_counted_over_all_ranks_and_micro_batches(router):
    setup = Setup(router=router, ep=2, accumulation=2)
    results = ranks(2).run(dropped_in_a_step, setup=setup)
    total = sum(sum(mine) for _, mine, _ in results)
    assert total > 0
    for dropped, _, counts in results:
        assert dropped == total
        assert (counts.sum(dim=1) == setup.global_batch * setup.seq_length * setup.top_k).all()


def test_without_capacity_there_is_no_number_of_drops():
    assert ranks(1).run(dropped_in_a_step, setup=Setup(balance="none"))[0][0] is None


@pytest.mark.parametrize("router", ["capacity_padded"])
@pytest.mark.parametrize("fusion", ["loop", "grouped"])
def test_padded_experts_train_as_unpadded_ones(router, fusion):
    plain, padded = (
        ranks(2).run(run_steps, setup=Setup(router=r, fusion=fusion, ep=2))[0] for r in ("capacity", router)
    )
    assert padded["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    for name, grad in plain["grads"].items():
        assert (padded["grads"][name] - grad).abs().max() < 5e-6 * grad.abs().max(), name
