"""Balancing: what does not depend on how a batch is cut, z-loss, quantile balancing, padding."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from sidestream.parallel.overflow import BudgetKeeper
from sidestream.routing.balance import AuxLoss, ExpertBias, switch_loss
from sidestream.routing.quantile import QuantileBalance, load_quantile
from sidestream.routing.router import SigmoidRouter, SoftmaxRouter
from sidestream.routing.scores import z_loss
from tests.core.build_tiny import SHAPE, Setup, local_batch, make_model, make_step, run_steps
from tests.rank_pool import ranks

CUTS = [
    (world, ep, accumulation)
    for world, ep in [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]
    for accumulation in (1, 2, 4)
]
CUTS = [cut for cut in CUTS if 8 // cut[0] >= cut[2]]


@lru_cache
def whole(setup):
    """One process, the whole batch at once."""
    return ranks(1).run(run_steps, setup=setup)[0]


def assert_same_step(actual, expected):
    for name, grad in expected["grads"].items():
        assert (actual["grads"][name] - grad).abs().max() < 5e-6 * grad.abs().max(), name
    assert actual["aux"] == pytest.approx(expected["aux"], rel=1e-6)
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert torch.equal(actual["counts"][0], expected["counts"][0])


@pytest.mark.parametrize(("world", "ep", "accumulation"), CUTS)
@pytest.mark.parametrize("balance", ["aux_global", "aux"])
@pytest.mark.sample(6)
def test_auxiliary_gradients_do_not_depend_on_how_a_batch_is_cut(balance, world, ep, accumulation):
    # A large coefficient: next to the language-model loss a wrong auxiliary gradient must not hide.
    for padded in (False, True):
        setup = Setup(balance=f"{balance}_strong", padded=padded)
        cut = setup.with_(ep=ep, accumulation=accumulation)
        for result in ranks(world).run(run_steps, setup=cut):
            assert_same_step(result, whole(setup))


def test_global_scope_is_the_textbook_loss_of_the_whole_batch():
    # One process and one micro-batch: `micro_batch` needs no counts from elsewhere.
    assert_same_step(
        whole(Setup(balance="aux_global_strong")), whole(Setup(balance="aux_micro_batch_strong"))
    )
    different = whole(Setup(balance="aux_strong"))
    assert different["aux"] != pytest.approx(whole(Setup(balance="aux_global_strong"))["aux"], rel=1e-3)


def rehearsed(rank, world, setup, p):
    """Counts known before the first backward, those at the end, and the forward passes of an attempt."""
    setup = setup.with_(shape=replace(SHAPE, dropout=p))
    model = make_model(setup)
    step = make_step(setup, model, world)
    known, passes = [], []
    original, forward = step._global_counts, model.loss_sums
    step._global_counts = lambda rest: known.append(original(rest)) or known[-1]
    model.loss_sums = lambda batch: passes.append(len(batch)) or forward(batch)
    step.attempt(local_batch(setup, 0, rank, world))
    report = step.check()
    step.reduction.close()
    return known, report.counts, passes


@pytest.mark.parametrize("router", ["softmax", "jitter"])
def test_counts_ahead_are_those_of_the_step_also_with_dropout_and_jitter(router):
    setup = Setup(balance="aux_global", router=router, ep=2, accumulation=4)
    for known, counts, passes in ranks(2).run(rehearsed, setup=setup, p=0.2):
        assert len(known) == 1 and torch.equal(known[0], counts)
        assert passes == [1] * 7  # 4 and 3 more


def test_global_scope_costs_no_forward_pass_without_accumulation():
    (_, _, passes), _ = ranks(2).run(rehearsed, setup=Setup(balance="aux_global", ep=2), p=0.0)
    assert passes == [4]


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_routes_are_counted_before_any_is_dropped(scope):
    logits = torch.randn(32, 4) + torch.tensor([2.0, 0.0, 0.0, 0.0])
    options = {}, {"expert_capacity_factor": 0.5}, {"expert_capacity_factor": 0.5, "pad_to_capacity": True}
    losses = [
        AuxLoss(coefficient=1.0, scope=scope).loss(SoftmaxRouter(top_k=2, **o)(logits), seq_length=8).item()
        for o in options
    ]
    assert losses[0] == losses[1] == losses[2]


# z-loss


def test_z_loss_leaves_padding_out():
    logits = torch.tensor([[0.0, 0.0], [10.0, 10.0]], requires_grad=True)
    masked = z_loss(logits, torch.tensor([True, False]))
    masked.backward()
    assert masked.item() == pytest.approx(0.48045, abs=1e-5)
    assert logits.grad[1].abs().max() == 0 and logits.grad[0].min() > 0
    assert z_loss(logits, None).item() / 2 == pytest.approx(57.41, abs=1e-2)
    nan = torch.tensor([[0.0, 0.0], [math.nan, 1.0]])
    assert z_loss(nan, torch.tensor([True, False])).item() == pytest.approx(0.48045, abs=1e-5)


def z_of(rank, world, setup):
    model = make_model(setup)
    step = make_step(setup, model, world)
    step.attempt(local_batch(setup, 0, rank, world))
    report = step.check()
    gates = [moe.gate.grad.clone() for moe in model.moe_layers()]
    step.reduction.close()
    return report.z, gates


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss_is_a_mean_over_valid_tokens_however_the_batch_is_cut(padded):
    setup = Setup(balance="none_z", padded=padded)
    ((z, gates),) = ranks(1).run(z_of, setup=setup)
    ((_, without),) = ranks(1).run(z_of, setup=setup.with_(balance="none"))
    assert z > 0 and not torch.allclose(gates[0], without[0], rtol=1e-2)
    for world, ep, accumulation in [(1, 1, 4), (2, 2, 2), (4, 2, 1)]:
        for found, grads in ranks(world).run(z_of, setup=setup.with_(ep=ep, accumulation=accumulation)):
            assert found == pytest.approx(z, rel=1e-6)
            for actual, expected in zip(grads, gates):
                assert (actual - expected).abs().max() < 5e-6 * expected.abs().max()


@pytest.mark.parametrize("balance", ["none", "aux", "bias"])
def test_without_a_coefficient_there_is_no_z(balance):
    assert ranks(1).run(z_of, setup=Setup(balance=balance))[0][0] is None


# bias


def test_bias_follows_the_load_of_sigmoid_scores():
    balance, bias, router = ExpertBias(update_rate=0.01), torch.zeros(8), SigmoidRouter(top_k=2)
    logits = torch.randn(256, 8) + torch.linspace(1.0, -1.0, 8)
    before = router(logits, selection_bias=bias).counts
    for _ in range(100):
        balance.commit(bias, router(logits, selection_bias=bias).counts)
    after = router(logits, selection_bias=bias)
    assert before.max() > 1.5 * 64 and after.counts.max() < 1.15 * 64
    expected = torch.sigmoid(logits).gather(1, after.routing.expert_ids)
    torch.testing.assert_close(after.routing.weights, expected / expected.sum(1, keepdim=True))


# quantile balancing

# alpha, the second largest: .1, .2, .3, .4. score - alpha: .8, .6, .4, 0 and 0, 0, 0, .2.
SCORES = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.4, 0.6]])


def test_quantile_by_hand():
    # T * k / E = 2, so the third largest.
    found = load_quantile(SCORES, torch.zeros(2), top_k=1, valid=None)
    assert found.tolist() == pytest.approx([0.4, 0.0], abs=1e-6)


def test_quantile_of_shifted_scores():
    bias = torch.tensor([-0.6, 0.0])
    # biased .3 .1, .2 .2, .1 .3, -.2 .6; alpha .1, .2, .1, -.2; margins .8 .6 .6 .6 and 0, 0, .2, .8
    found = load_quantile(SCORES, bias, top_k=1, valid=None)
    assert found.tolist() == pytest.approx([0.6, 0.0], abs=1e-6)


def test_quantile_leaves_padding_out():
    padded = torch.cat([SCORES, torch.tensor([[1.0, 0.0], [math.nan, math.nan]])])
    valid = torch.tensor([True] * 4 + [False] * 2)
    found = load_quantile(padded, torch.zeros(2), top_k=1, valid=valid)
    assert found.tolist() == pytest.approx([0.4, 0.0], abs=1e-6)
    assert load_quantile(padded, torch.zeros(2), top_k=1, valid=valid & False).isinf().all()


def test_quantile_commit_averages_smooths_and_centres():
    balance, bias = QuantileBalance(ema=0.5), torch.tensor([-0.1, 0.1])
    # Two estimates, [.4, 0] and [.2, .2]: mean [.3, .1]; beta = .5 [.1, -.1] + .5 [.3, .1] = [.2, 0], centred [.1, -.1]
    observed = torch.tensor([0.6, 0.2, 2.0], dtype=torch.float64)
    address = bias.data_ptr()
    balance.commit(bias, torch.zeros(2), observed)
    assert bias.tolist() == pytest.approx([-0.1, 0.1], abs=1e-6) and bias.data_ptr() == address
    balance.commit(bias, torch.zeros(2), torch.zeros(3, dtype=torch.float64))
    assert bias.tolist() == pytest.approx([-0.1, 0.1], abs=1e-6)  # padding alone changes nothing


def test_observing_padding_alone_is_no_estimate():
    balance = QuantileBalance(ema=0.0)
    decision = SoftmaxRouter(top_k=1)(torch.randn(4, 2), valid=torch.zeros(4, dtype=torch.bool))
    assert balance.observe(decision, torch.zeros(2)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("router", [SoftmaxRouter, SigmoidRouter])
def test_quantile_evens_a_skewed_load(router):
    balance, bias, route = QuantileBalance(ema=0.0), torch.zeros(8), router(top_k=2)
    logits = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(2.0, -2.0, 8)
    loads = []
    for _ in range(20):
        decision = route(logits, selection_bias=bias)
        loads.append(decision.counts.max().item() / 128)
        balance.commit(bias, decision.counts, balance.observe(decision, bias))
    assert loads[0] > 2.0 and loads[-1] < 1.1


def quantile_attempt(rank, world, setup):
    """Biases before and after check, then after commit."""
    model = make_model(setup)
    step = make_step(setup, model, world)
    biases = []
    for _ in range(2):  # an attempt that is repeated, as after an overflow
        step.attempt(local_batch(setup, 0, rank, world))
        report = step.check()
        biases.append([moe.selection_bias.clone() for moe in model.moe_layers()])
    step.commit(report, optimizer_step=lambda: None, max_norm=None)
    biases.append([moe.selection_bias.clone() for moe in model.moe_layers()])
    step.reduction.close()
    return biases, report.observed


def test_quantile_changes_nothing_before_commit_and_counts_an_attempt_once():
    results = ranks(2).run(quantile_attempt, setup=Setup(balance="quantile", ep=2, accumulation=2))
    for (first, second, committed), observed in results:
        assert not any(bias.any() for bias in first + second)
        assert all(bias.abs().max() > 1e-4 and bias.mean().abs() < 1e-7 for bias in committed)
        assert (observed[:, -1] == 4).all()  # 2 ranks, 2 micro-batches
    for a, b in zip(results[0][0][2], results[1][0][2]):
        assert torch.equal(a, b)


# counts that fp32 cannot hold


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_bias_moves_by_exact_counts(dtype):
    balance, bias = ExpertBias(update_rate=0.001), torch.zeros(384)
    even = torch.full((384,), 1_966_081, dtype=dtype)  # their sum in fp32 is not 384 times that
    balance.commit(bias, even)
    assert not bias.any()
    even[3] += 384
    balance.commit(bias, even)
    assert bias[3] == torch.tensor(-0.001) and (bias[torch.arange(384) != 3] == torch.tensor(0.001)).all()


def test_one_route_more_than_fp32_can_tell_moves_a_bias():
    balance, bias = ExpertBias(update_rate=1.0), torch.zeros(2)
    balance.commit(bias, torch.tensor([2**24 + 1, 2**24]))
    assert bias.tolist() == [-1.0, 1.0]


def test_the_auxiliary_loss_divides_exact_counts():
    # 2**24 + 1 is no number of fp32: there the share of the first expert would be a whole 1 / (2**24 + 1) too small.
    tokens = 2**24 + 1
    probs, counts = torch.tensor([[1.0, 0.0]]), torch.tensor([[tokens, 0]])
    for number in (tokens, torch.tensor(tokens), torch.tensor([[float(tokens)]], dtype=torch.float64)):
        loss = switch_loss(probs * tokens, counts, num_tokens=number, top_k=1)
        assert loss.tolist() == [2.0] and loss.dtype == torch.float32


# what a rehearsal moves and drops comes again in the attempt


def counted(rank, world, setup):
    """What the first step says that it dropped and sent."""
    model = make_model(setup)
    step = make_step(setup, model, world)
    step.budget = BudgetKeeper(
        model.parts.dispatcher, step.parallel, device=torch.device("cpu"), mean_rows=32 * setup.top_k
    )
    step.budget.mode = "drop"
    batch = local_batch(setup, 0, rank, world)
    passes, forward = [], model.loss_sums
    model.loss_sums = lambda part: passes.append(len(part)) or forward(part)
    found = []
    for _ in range(2):  # an attempt that is repeated counts once, too
        step.attempt(batch)
        report = step.check()
        found.append((report.lost, report.bytes_on_wire, report.metadata_bytes, report.counts.tolist()))
    assert step.budget.resolve(overflowed=report.overflowed, dropped=report.lost)
    trained = vars(step.budget.counts).copy()
    step.budget.guard(lambda: model.eval().loss_sums(batch).nll)
    assert vars(step.budget.counts) == trained, "validation is no training"
    assert found[0] == found[1]
    step.reduction.close()
    model.parts.dispatcher.close()
    return found[0], trained["dropped"], len(passes)


@pytest.mark.parametrize("dispatcher", ["alltoall", "deep_ep"])
def test_a_rehearsal_and_validation_count_nothing(dispatcher):
    # Weights are the same in the first step, so what is chosen, dropped and sent is, too.
    setup = Setup(ep=2, accumulation=2, dispatcher=dispatcher, capacity_factor=0.25, balance="none")
    plain = ranks(2).run(counted, setup=setup)
    rehearsed = ranks(2).run(counted, setup=setup.with_(balance="aux_global"))
    for (expected, dropped, passes), (found, dropped_too, more) in zip(plain, rehearsed):
        assert more == passes + 2  # one micro-batch of two, in both attempts
        assert expected[0] > 0 and found == expected and dropped == dropped_too == expected[0]


def test_the_loss_of_a_micro_batch_counts_once_for_each_of_its_sequences():
    decision = SoftmaxRouter(top_k=1)(torch.randn(8, 4))
    loss = AuxLoss(coefficient=1.0, scope="micro_batch").loss(decision, seq_length=4)
    once = switch_loss(decision.probs.sum(0), decision.counts, num_tokens=8, top_k=1)
    assert loss.item() == pytest.approx(2 * once.item())
