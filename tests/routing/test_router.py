"""Scores, their order, weights, groups, jitter, forced balance, ties, precision: for all routers."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.routing.router import SigmoidRouter, SoftmaxRouter, SqrtSoftplusRouter
from sidestream.routing.scores import jitter
from sidestream.routing.select import balanced_ids, keep_top_groups
from tests.core.build_tiny import ROUTERS, SHAPE, Setup, local_batch, make_model, run_steps
from tests.rank_pool import ranks

CLASSES = [SoftmaxRouter, SigmoidRouter, SqrtSoftplusRouter]
# Softmax gives 1/8, 1/4, 5/8.
LOGITS = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"normalize": False}, [0.625, 0.25]),
        ({}, [0.714286, 0.285714]),
        ({"normalize": False, "scaling_factor": 2.5}, [1.5625, 0.625]),  # sum 2.1875
        ({"scaling_factor": 2.5}, [1.785714, 0.714286]),  # sum 2.5
        ({"score_order": "after_top_k"}, [0.714286, 0.285714]),
        ({"score_order": "after_top_k", "scaling_factor": 2.5}, [1.785714, 0.714286]),
    ],
)
def test_softmax_weights(options, expected):
    routing = SoftmaxRouter(top_k=2, **options)(LOGITS).routing
    assert routing.expert_ids.tolist() == [[2, 1]]
    assert routing.weights[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("order", ["before_top_k", "after_top_k"])
def test_sigmoid_and_sqrtsoftplus_weights(order):
    # sigmoid: 1/2, 2/3, 5/6; softplus: ln 2, ln 3, ln 6
    for router, raw in (
        (SigmoidRouter, [5 / 6, 2 / 3]),
        (SqrtSoftplusRouter, [math.log(6) ** 0.5, math.log(3) ** 0.5]),
    ):
        routing = router(top_k=2, normalize=False, score_order=order)(LOGITS).routing
        assert routing.expert_ids.tolist() == [[2, 1]]
        assert routing.weights[0].tolist() == pytest.approx(raw, abs=1e-6)
        routing = router(top_k=2, score_order=order, scaling_factor=2.5)(LOGITS).routing
        assert routing.weights[0].tolist() == pytest.approx([2.5 * w / sum(raw) for w in raw], abs=1e-6)
        assert router(top_k=1, score_order=order)(LOGITS).routing.weights.tolist() == [
            [pytest.approx(raw[0], abs=1e-6)]
        ]


@pytest.mark.parametrize("router", CLASSES)
def test_probabilities_for_balancing_sum_to_one_over_all_experts(router):
    decision = router(top_k=2, score_order="after_top_k")(torch.randn(16, 8))
    assert torch.allclose(decision.probs.sum(dim=1), torch.ones(16), atol=1e-6)
    assert decision.probs.shape == (16, 8)


def test_softmax_over_the_chosen_is_the_normalised_softmax():
    logits = torch.randn(64, 16)
    after = SoftmaxRouter(top_k=4, score_order="after_top_k")(logits).routing
    before = SoftmaxRouter(top_k=4)(logits).routing
    assert torch.equal(after.expert_ids, before.expert_ids)
    torch.testing.assert_close(after.weights, before.weights)


def test_the_order_decides_what_a_bias_is_added_to():
    logits, bias = torch.tensor([[0.0, 4.0]]), torch.tensor([1.0, 0.0])
    # sigmoid: .5 + 1 beats .982; the logits 0 + 1 do not beat 4.
    assert SigmoidRouter(top_k=1)(logits, selection_bias=bias).routing.expert_ids.item() == 0
    after = SigmoidRouter(top_k=1, score_order="after_top_k")(logits, selection_bias=bias)
    assert after.routing.expert_ids.item() == 1
    assert after.routing.weights.item() == pytest.approx(1 / (1 + math.exp(-4.0)))  # unbiased


def test_softmax_over_one_chosen_expert_is_refused():
    with pytest.raises(ValueError, match=r"router.score_order=after_top_k: with router.top_k=1"):
        SoftmaxRouter(top_k=1, score_order="after_top_k")
    logits = torch.tensor([[0.0, 1.0]], requires_grad=True)
    SigmoidRouter(top_k=1, score_order="after_top_k")(logits).routing.weights.sum().backward()
    assert logits.grad[0, 1] > 0.1


@pytest.mark.parametrize("router", CLASSES)
@pytest.mark.parametrize("extreme", [-1e4, 1e4])
def test_extreme_logits_give_finite_gradients(router, extreme):
    logits = torch.full((2, 4), extreme).requires_grad_()
    decision = router(top_k=2)(logits)
    (decision.routing.weights.sum() + decision.probs.square().sum()).backward()
    assert logits.grad.isfinite().all() and decision.routing.weights.isfinite().all()


# Ties.


@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize("router", CLASSES)
def test_ties_go_to_the_lowest_id_also_among_groups(router, num_tokens):
    logits = torch.zeros(num_tokens, 64)
    for options in ({}, {"score_order": "after_top_k"}, {"num_groups": 8, "top_groups": 4}):
        chosen = router(top_k=8, **options)
        first = chosen(logits).routing.expert_ids
        assert torch.equal(first[0], torch.arange(8))
        for _ in range(20):
            assert torch.equal(chosen(logits).routing.expert_ids, first[:1].expand(num_tokens, 8))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_of_nan_logits_keeps_to_itself(name):
    logits = torch.randn(5, 8)
    logits[2] = float("nan")
    routing = ROUTERS[name](top_k=2)(logits).routing
    assert routing.expert_ids.min() >= -1 and routing.expert_ids.max() < 8
    if "capacity" not in name and name != "position":  # there rows compete for places
        clean = ROUTERS[name](top_k=2)(logits[[0, 1, 3, 4]]).routing
        if name != "forced":
            assert torch.equal(routing.expert_ids[[0, 1, 3, 4]], clean.expert_ids)
            assert torch.equal(routing.weights[[0, 1, 3, 4]], clean.weights)


# The bias is fp32.


def test_bias_decides_with_sigmoid_scores_and_leaves_weights_alone():
    decision = SigmoidRouter(top_k=1)(torch.zeros(3, 2), selection_bias=torch.tensor([7.00, 7.01]))
    assert decision.routing.expert_ids.tolist() == [[1]] * 3
    assert decision.routing.weights.tolist() == [[0.5]] * 3


@pytest.mark.parametrize("router", CLASSES)
def test_scores_are_fp32_under_autocast(router):
    logits = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decision = router(top_k=2)(logits)
    assert decision.probs.dtype == decision.routing.weights.dtype == decision.ranking.dtype == torch.float32
    with pytest.raises(AssertionError, match="must be fp32"):
        router(top_k=2)(logits.bfloat16())


# groups


def test_group_score_is_the_sum_of_its_best_experts():
    # Groups {0,1,2}, {3,4,5}, {6,7,8}; top-4 of 2 groups, so a group counts its two best.
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.5, 0.5, 0.1, 0.4, 0.45, 0.44]])
    kept = keep_top_groups(scores, top_k=4, num_groups=3, top_groups=2)
    # 0.9, 1.0, 0.89: the third is out although each of its experts beats experts 1 and 2.
    assert kept[0, 6:].eq(-torch.inf).all() and torch.equal(kept[0, :6], scores[0, :6])


def test_bias_takes_part_in_the_choice_of_groups():
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 0.1, 0.0])
    router = SigmoidRouter(top_k=1, num_groups=2, top_groups=1)
    assert router(logits).routing.expert_ids.item() == 0
    assert router(logits, selection_bias=bias).routing.expert_ids.item() == 2


@pytest.mark.parametrize("router", CLASSES)
@pytest.mark.parametrize(("groups", "top_groups"), [(8, 4), (4, 2), (2, 1)])
def test_a_token_stays_within_its_groups(router, groups, top_groups):
    logits = torch.randn(200, 64)
    ids = router(top_k=8, num_groups=groups, top_groups=top_groups)(logits).routing.expert_ids
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert max(len({i // (64 // groups) for i in row}) for row in ids.tolist()) <= top_groups


def test_a_token_stays_within_its_groups_whatever_the_bias():
    # Every score with its bias is below zero, so an expert that is left out must be further down than that.
    router = SigmoidRouter(top_k=2, num_groups=2, top_groups=1)
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    biased = router(logits, selection_bias=torch.full((8,), -5.0)).routing.expert_ids
    assert torch.equal(biased, router(logits).routing.expert_ids)


def test_groups_follow_the_published_code_of_deepseek_v3():
    scores = torch.rand(100, 32)
    # Transcribed from the description in the DeepSeek-V3 report, with torch.topk (no ties here).
    best = scores.view(100, 8, 4).topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    mask = torch.zeros(100, 8).scatter_(1, best, 1.0).repeat_interleave(4, dim=1)
    expected = scores.masked_fill(mask == 0, -torch.inf).topk(8).indices
    kept = keep_top_groups(scores, top_k=8, num_groups=8, top_groups=4)
    assert torch.equal(kept.topk(8).indices, expected)


# jitter


def test_jitter_multiplies_within_its_bounds():
    x = torch.full((1000, 4), 2.0, requires_grad=True)
    y = jitter(x, 0.25)
    assert 1.5 <= y.min() < 1.51 and 2.49 < y.max() <= 2.5
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach() / 2.0)


def jitter_twice(rank, world):
    found = []
    for router in ("softmax", "jitter", "jitter"):
        torch.manual_seed(3)
        found.append(run_steps(rank, world, Setup(router=router, steps=2)))
    return [(run["loss"], run["grads"]["blocks.1.moe.gate"]) for run in found]


def test_jitter_repeats_from_the_ranks_generator():
    plain, first, second = ranks(1).run(jitter_twice)[0]
    assert first[0] == second[0] and torch.equal(first[1], second[1])
    assert plain[0] != first[0]


def evaluate_with_jitter(rank, world):
    models = [make_model(Setup(router=router)).eval() for router in ("softmax", "jitter")]
    return [model.loss_sums(local_batch(Setup(), 0, rank, world)).nll.item() for model in models]


def test_jitter_is_off_outside_training():
    plain, jittered = ranks(1).run(evaluate_with_jitter)[0]
    assert plain == jittered


# forced balance


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(16, 2, 8), (4, 1, 4), (8, 8, 8), (24, 3, 9), (128, 8, 64), (4, 4, 16)],
)
def test_forced_balance_is_exact_and_distinct(num_tokens, top_k, num_experts):
    logits = torch.randn(num_tokens, num_experts) + 100 * torch.eye(num_experts)[0]
    decision = SigmoidRouter(top_k=top_k, force_balance=True)(logits)
    assert (decision.counts == num_tokens * top_k // num_experts).all()
    assert all(len(set(row)) == top_k for row in decision.routing.expert_ids.tolist())


def test_forced_balance_deals_out_valid_tokens_only():
    valid = torch.tensor([True, False, True, True, False, False, True])
    decision = SoftmaxRouter(top_k=1, force_balance=True)(torch.randn(7, 4), valid=valid)
    assert decision.counts.tolist() == [1, 1, 1, 1]
    assert (decision.routing.expert_ids[~valid] == -1).all()


def test_forced_balance_spreads_a_tokens_experts_over_ranks():
    ids = balanced_ids(64, top_k=2, num_experts=8, valid=None, device=torch.device("cpu"))
    assert all(len({e // 4 for e in row}) == 2 for row in ids.tolist())  # 2 ranks of 4 experts


def test_forced_balance_trains_the_gate():
    results = ranks(2).run(run_steps, setup=Setup(router="forced", balance="none", ep=2))
    for result in results:
        assert (result["counts"][0] == 8 * 16 * 2 // 8).all()
        assert result["grads"]["blocks.1.moe.gate"].abs().max() > 1e-3


# tokens per rank and micro-batch are too few, or padding too irregular, for each part to be even by itself
CUTS = {
    "whole": {},
    "halves": {"schedule": TwoBatchOverlap},
    "halves_of_micro_batches": {"schedule": TwoBatchOverlap, "accumulation": 2},
    "chunks": {"schedule": partial(ChunkedOverlap, num_chunks=3)},
    "micro_batches": {"accumulation": 4},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.sample(5)
def test_forced_balance_is_even_however_the_batch_is_cut(world, cut, padded):
    setup = Setup(router="forced", balance="none", top_k=1, seq_length=2, padded=padded, ep=world)
    setup = setup.with_(shape=replace(SHAPE, num_experts=4), **CUTS[cut])
    if padded:
        setup = setup.with_(seq_length=7, global_batch=8)
    tokens = local_batch(setup, 0, 0, 1).segments
    total = setup.global_batch * setup.seq_length if tokens is None else int((tokens >= 0).sum())
    for result in ranks(world).run(run_steps, setup=setup):
        for counts in result["counts"][0].tolist():
            assert sum(counts) == total and max(counts) - min(counts) <= (total % 4 > 0)


def dealt_in_validation(rank, world):
    model = make_model(Setup(router="forced"))
    batch = local_batch(Setup(), 0, rank, world)
    model.loss_sums(batch.split(3)[0])  # leaves the deal in the middle
    model.eval()
    return [model.loss_sums(batch).nll.item() for _ in range(2)]


def test_a_forced_choice_in_validation_does_not_depend_on_what_came_before():
    first, second = ranks(1).run(dealt_in_validation)[0]
    assert first == second
