"""Degenerate routing: idle ranks, empty groups, routes to nobody, NaN, ties, padding."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from sidestream.data.batch import Batch
from sidestream.dispatch.base import Received, Routing
from sidestream.fusion.grouped import GroupedExperts
from sidestream.fusion.loop import LoopExperts
from sidestream.overlap.path import RoutedPath
from sidestream.parallel.reduction import local
from sidestream.routing.balance import AuxLoss
from sidestream.routing.router import Decision, SoftmaxRouter, top_k_stable
from tests.core.build_tiny import (
    DISPATCHERS,
    FUSIONS,
    SHAPE,
    Setup,
    full,
    local_batch,
    make_model,
    make_optimizer,
    make_step,
    parallel_for,
    run_steps,
)
from tests.core.poison import NAN, poisoned_memory
from tests.core.scale_experts import Scales, routing_of, run_path, scale_rows, wire
from tests.rank_pool import ranks


@pytest.fixture
def nan_memory():
    with poisoned_memory():
        yield


# A rank without tokens takes part in the exchanges of backward.


def scales_on_ranks(rank, world, ep):
    """One step with everything on expert 0, one with balanced routes."""
    model = Scales([2.0, 3.0], parallel_for(ep))
    found = []
    for ids in ([[0], [0], [0], [0]], [[0], [1], [1], [0]]):
        x = torch.tensor([1.0, 2.0, 3.0, 4.0]).chunk(world)[rank].requires_grad_()
        routing = routing_of(list(torch.tensor(ids).chunk(world)[rank].tolist()))
        model.backward((model(x, routing) ** 2).sum() / 4)
        found.append((x.grad.tolist(), model.scale_grads()))
        with torch.no_grad():
            model.scales -= 0.01 * model.scales.grad
    model.close()
    return found


def test_idle_rank_takes_part_in_backward_and_the_next_step_is_right():
    (one,) = ranks(1).run(scales_on_ranks, ep=1)
    assert one[0][1] == [30.0, 0.0]
    two = ranks(2).run(scales_on_ranks, ep=2)
    for step in range(2):
        assert two[0][step][0] + two[1][step][0] == pytest.approx(one[step][0])
        assert two[0][step][1] == two[1][step][1] == pytest.approx(one[step][1])


def model_on_ranks(rank, world, setup):
    """Two steps of the micro model: all routes to the first half of the experts, then free routing."""
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    log, steps = [], []
    if setup.dispatcher != "local":
        model.parts.dispatcher.channel.on_start = log.append
    for index, favour in enumerate((100.0, 0.0)):
        for moe in model.moe_layers():
            moe.selection_bias.zero_()[: SHAPE.num_experts // 2] = favour
        step.attempt(local_batch(setup, index, rank, world))
        steps.append({name: full(p.grad) for name, p in model.named_parameters()})
        report = step.check()
        step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm)
    return steps, log


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.sample(2)
def test_idle_rank_with_real_experts(fusion, checkpointing):
    shape = replace(SHAPE, activation_checkpointing=checkpointing)
    setup = Setup(balance="bias", optimizer="sgd", shape=shape)
    ((expected, _),) = ranks(1).run(model_on_ranks, setup=setup.with_(dispatcher="local", fusion="loop"))
    first, second = ranks(2).run(model_on_ranks, setup=setup.with_(ep=2, fusion=fusion))
    assert first[1] == second[1] and "dispatch.routes.backward" in first[1]
    for steps, _ in (first, second):
        for actual, reference in zip(steps, expected):
            for name, grad in reference.items():
                assert (actual[name] - grad).abs().max() <= 5e-6 * grad.abs().max(), name
        idle = steps[0]["blocks.1.moe.experts.w_down"][SHAPE.num_experts // 2 :]
        assert idle.abs().max() == 0


@pytest.mark.parametrize("fusion", [LoopExperts(), GroupedExperts()], ids=lambda f: f.name)
@pytest.mark.parametrize("host_offsets", [[0, 0, 0], None])
def test_empty_input_stays_attached(fusion, host_offsets, nan_memory):
    rows, weights = torch.zeros(0, 8, requires_grad=True), torch.zeros(0, requires_grad=True)
    w_gate_up = torch.randn(3, 8, 16, requires_grad=True)
    w_down = torch.randn(3, 8, 8, requires_grad=True)
    offsets = torch.zeros(3, dtype=torch.int32)
    out = fusion(Received(rows, weights, offsets, host_offsets), w_gate_up, w_down)
    assert out.shape == (0, 8)
    out.sum().backward()
    assert rows.grad.shape == (0, 8) and weights.grad.shape == (0,)
    assert w_gate_up.grad.abs().max() == 0 and w_down.grad.abs().max() == 0


# Rows past the last offset of a grouped matrix product are never written, and never read.


@pytest.mark.parametrize("fusion", [LoopExperts(), GroupedExperts()], ids=lambda f: f.name)
@pytest.mark.parametrize("tail", [NAN, 1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tail_rows_never_matter(fusion, tail, dtype, nan_memory):
    """What lies past the last offset of rows, weights and the output's gradient changes no bit before it."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    rows, weights = randn(8, 16), torch.rand(8, generator=generator)
    w_gate_up, w_down, up = randn(3, 16, 32), randn(3, 16, 16), randn(8, 16)
    offsets = torch.tensor([3, 3, 5], dtype=torch.int32)

    def run(rows, weights, up):
        """Two steps; gradients add up."""
        leaves = [t.to(d).requires_grad_() for t, d in zip((rows, weights), (dtype, torch.float32))]
        params = [w.to(dtype).requires_grad_() for w in (w_gate_up, w_down)]
        for _ in range(2):
            out = fusion(Received(*leaves, offsets), *params)
            out.backward(up.to(dtype))
        return out.detach(), [t.grad for t in leaves], [p.grad for p in params]

    exact_out, exact_inputs, exact_params = run(rows[:5], weights[:5], up[:5])
    rows[5:], weights[5:], up[5:] = tail, tail, tail
    out, inputs, params = run(rows, weights, up)
    assert torch.equal(out[:5], exact_out)
    for actual, expected in zip(inputs, exact_inputs):
        assert torch.equal(actual[:5], expected)
    for actual, expected in zip(params, exact_params):
        assert torch.equal(actual, expected) and actual[1].abs().max() == 0


# Routes to nobody (expert -1), NaN beside them, one expert twice, NaN logits.


@pytest.fixture
def dispatch_scales():
    """Scale experts on one rank. Closing at the end finds a transfer that nobody waited for."""
    opened = []

    def run(name, x, routing, scales):
        opened.append(wire(name, num_experts=len(scales)))
        experts = partial(scale_rows, scales=torch.tensor(scales))
        return run_path(RoutedPath(x, routing, dispatcher=opened[-1], experts=experts))

    yield run
    for dispatcher in opened:
        dispatcher.close()


@pytest.mark.parametrize("name", DISPATCHERS)
def test_routes_to_nobody_never_matter(name, dispatch_scales):
    x = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    weights = torch.tensor([[0.5, NAN], [0.25, 0.75], [0.5, 0.5]], requires_grad=True)
    routing = Routing(torch.tensor([[0, -1], [1, 0], [-1, -1]]), weights)
    y = dispatch_scales(name, x, routing, [10.0, 100.0])
    y.sum().backward()
    assert y.flatten().tolist() == [5.0, 65.0, 0.0]
    assert x.grad.flatten().tolist() == [5.0, 32.5, 0.0]
    assert weights.grad.tolist() == [[10.0, 0.0], [200.0, 20.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", DISPATCHERS)
def test_counts_leave_out_routes_to_nobody(name):
    dispatcher = wire(name, num_experts=2)
    plan = dispatcher.plan(routing_of([[0, -1], [1, 0], [-1, -1]]))
    received = dispatcher.dispatch(torch.ones(3, 1), plan).wait()
    assert received.offsets.tolist() == [2, 3]
    assert received.rows[:3].flatten().tolist() == [1.0, 1.0, 1.0]
    dispatcher.close()


@pytest.mark.parametrize("name", DISPATCHERS)
def test_the_same_expert_twice(name, dispatch_scales):
    x = torch.tensor([[4.0]], requires_grad=True)
    y = dispatch_scales(name, x, routing_of([[0, 0]], [[0.5, 0.25]]), [10.0, 100.0])
    y.sum().backward()
    assert y.item() == 30.0 and x.grad.item() == 7.5


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_auxiliary_loss_takes_routes_to_nobody(scope):
    ids, probs = torch.tensor([[0, -1], [1, 0]]), torch.full((2, 2), 0.5)
    decision = Decision(routing_of(ids.tolist()), probs, torch.tensor([2, 1]))
    loss = AuxLoss(coefficient=1.0, scope=scope).loss(decision, seq_length=2)
    assert loss.item() == 0.75  # three of four routes


def test_a_row_of_nan_logits_keeps_to_itself(dispatch_scales):
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    logits[2] = torch.tensor([1.0, 0.0, -1.0, -1.0])  # {0, 1}, as NaN gives
    clean = SoftmaxRouter(top_k=2)(logits)
    logits[2] = NAN
    dirty = SoftmaxRouter(top_k=2)(logits)
    assert dirty.routing.expert_ids.min() >= 0 and dirty.routing.expert_ids.max() < 4
    assert torch.equal(dirty.routing.expert_ids, clean.routing.expert_ids)
    others = [0, 1, 3, 4]
    x = torch.randn(5, 1)
    for name in DISPATCHERS:
        y = [dispatch_scales(name, x, d.routing, [1.0, 2.0, 3.0, 4.0]) for d in (clean, dirty)]
        assert torch.equal(y[0][others], y[1][others]) and y[1][2].isnan()


def nan_gate(rank, world):
    setup = Setup(ep=2)
    model = make_model(setup)
    step = make_step(setup, model, world)
    with torch.no_grad():
        model.moe_layers()[0].gate.fill_(NAN)
    step.attempt(local_batch(setup, 0, rank, world))
    with pytest.raises(FloatingPointError, match="the training loss is nan"):
        step.check()


def test_a_router_that_is_not_finite_is_reported_on_every_rank():
    ranks(2).run(nan_gate)


def gradient_that_is_not_finite(rank, world):
    """The loss is fine, one gradient on one rank is not."""
    setup = Setup(ep=2)
    model = make_model(setup)
    step = make_step(setup, model, world)
    step.attempt(local_batch(setup, 0, rank, world))
    if rank == 1:
        model.moe_layers()[0].experts.w_down.grad.to_local().view(-1)[0] = float("inf")
    with pytest.raises(FloatingPointError, match="the gradient norm is inf"):
        step.check()


def test_a_gradient_that_is_not_finite_is_not_committed_on_any_rank():
    ranks(2).run(gradient_that_is_not_finite)


def broken_replica(rank, world, where):
    """A gradient that is not finite in one replica only, behind the reduction: what every rank says."""
    setup = Setup(ep=2)
    model = make_model(setup)
    step = make_step(setup, model, world)
    step.attempt(local_batch(setup, 0, rank, world))
    if rank == 1:
        grads = {"expert": model.moe_layers()[1].experts.w_down.grad, "dense": model.head.weight.grad}
        local(grads[where]).view(-1)[-1] = NAN
    committed = []
    with pytest.raises(FloatingPointError) as caught:
        step.commit(step.check(), optimizer_step=lambda: committed.append(rank))
    step.reduction.close()
    assert not committed
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "name"), [("expert", "blocks.2.moe.experts.w_down"), ("dense", "head.weight")]
)
def test_a_replica_whose_gradient_is_not_finite_stops_all_ranks_with_one_message(where, name):
    said = ranks(4).run(broken_replica, where=where)
    assert len(set(said)) == 1
    assert said[0].startswith(f"the gradient norm is nan on rank 1, from the gradient of {name}; lower ")


def test_row_offsets_are_64_bit():
    plan = wire("local", num_experts=2).plan(routing_of([[0], [1]]))
    assert plan.layout.row_of_slot.dtype == plan.layout.slot_of_row.dtype == torch.int64


# Ties.


@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 2), (64, 8)])
def test_ties_go_to_the_lowest_id(num_tokens, num_experts, top_k):
    logits = torch.zeros(num_tokens, num_experts)
    expected = torch.arange(top_k).expand(num_tokens, top_k)
    for _ in range(20):
        assert torch.equal(SoftmaxRouter(top_k=top_k)(logits).routing.expert_ids, expected)


def test_a_tie_break_does_not_bias_unequal_scores():
    scores = torch.tensor([[0.5, math.nextafter(0.5, 1.0)]], dtype=torch.float64).repeat(1000, 1)
    assert torch.equal(top_k_stable(scores, 1), torch.ones(1000, 1, dtype=torch.int64))
    scores = torch.tensor([[0.5, 0.5]]).repeat(1000, 1)
    scores[:, 1] = torch.nextafter(scores[:, 1], torch.tensor(1.0))
    assert torch.equal(top_k_stable(scores, 1), torch.ones(1000, 1, dtype=torch.int64))


# Padding is not counted in load balancing.

B6_VALID = torch.tensor([True, False, True, False])


def logits_on_ranks(padding):
    """Two tokens with probability .9 and .3 of expert 0, and padding between them."""
    probs = torch.tensor([0.9, padding, 0.3, padding])
    return torch.stack([probs.log(), (1 - probs).log()], dim=1)


def aux_on_ranks(scope, decision):
    """The loss of one sequence that is the whole batch."""
    balance = AuxLoss(coefficient=1.0, scope=scope)
    if not balance.needs_global_counts:
        return balance.loss(decision, seq_length=4)
    num_tokens = torch.tensor(4.0) if decision.valid is None else decision.valid.sum().clamp(min=1).float()
    return balance.global_loss(decision.probs.sum(0), decision.counts, num_tokens=num_tokens, top_k=1)


@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "global"])
def test_padding_is_not_balanced(scope):
    grads = []
    for padding in (0.8, 0.2):
        logits = logits_on_ranks(padding).requires_grad_()
        decision = SoftmaxRouter(top_k=1)(logits, valid=B6_VALID)
        assert decision.counts.tolist() == [1, 1]
        assert decision.routing.expert_ids.flatten().tolist() == [0, -1, 1, -1]
        loss = aux_on_ranks(scope, decision)
        loss.backward()
        assert loss.item() == pytest.approx(1.0, abs=1e-6)
        assert logits.grad[1].tolist() == logits.grad[3].tolist() == [0.0, 0.0]
        grads.append(logits.grad)
    assert torch.equal(*grads)
    without_mask = SoftmaxRouter(top_k=1)(logits_on_ranks(0.8))
    loss = aux_on_ranks(scope, without_mask)
    assert loss.item() == pytest.approx(1.2, abs=1e-6)


@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "global"])
def test_no_valid_token_gives_a_finite_loss(scope):
    logits = torch.randn(4, 2, requires_grad=True)
    decision = SoftmaxRouter(top_k=1)(logits, valid=torch.zeros(4, dtype=torch.bool))
    loss = aux_on_ranks(scope, decision)
    loss.backward()
    assert loss.item() == 0.0 and logits.grad.abs().max() == 0.0


def padding_content(rank, world, setup, token):
    model = make_model(setup)
    step = make_step(setup, model, world)
    batch = local_batch(setup, 0, rank, world)
    step.attempt(replace(batch, inputs=batch.inputs.masked_fill(batch.segments < 0, token)))
    report = step.check()
    return {name: full(p.grad) for name, p in model.named_parameters()}, report.counts, report.loss


@pytest.mark.parametrize("balance", ["aux", "bias"])
def test_what_padding_holds_changes_nothing(balance):
    setup = Setup(padded=True, balance=balance, ep=2)
    (one, *rest), (other, *other_rest) = (
        ranks(2).run(padding_content, setup=setup, token=token)[0] for token in (0, 1)
    )
    assert torch.equal(rest[0], other_rest[0]) and rest[1] == other_rest[1]
    valid = int((local_batch(setup, 0, 0, 1).segments >= 0).sum())
    assert (rest[0].sum(dim=1) == valid * setup.top_k).all()
    assert all(torch.equal(grad, other[name]) for name, grad in one.items())


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("balance", ["aux", "aux_global", "bias"])
@pytest.mark.sample(2)
def test_a_rank_with_nothing_but_padding(balance, fusion):
    setup = Setup(padded=True, balance=balance, steps=2, optimizer="sgd")
    (one,) = ranks(1).run(run_steps, setup=setup.with_(dispatcher="local", fusion="loop"))
    for ep in (1, 2):
        results = ranks(2).run(run_steps, setup=setup.with_(ep=ep, fusion=fusion))
        for two in results:
            assert two["transfers"] == results[0]["transfers"]
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert two["aux"] == pytest.approx(one["aux"], rel=1e-6)
            assert torch.equal(two["counts"][0], one["counts"][0])
            for name, grad in one["grads"].items():
                assert (two["grads"][name] - grad).abs().max() <= 5e-6 * grad.abs().max(), name


def packed_on_ranks(rank, world):
    """Gradient of the summed loss of two documents: packed in a row with padding, and each in a row of its own."""
    model = make_model(Setup(dispatcher="local", balance="none"))
    packed = local_batch(Setup(padded=True), 0, 0, 1)
    found = []
    for separate in (False, True):
        model.zero_grad()
        for row in range(2):
            inputs, targets, segments = (t[row] for t in (packed.inputs, packed.targets, packed.segments))
            pieces = [segments == 0, segments == 1] if separate else [torch.ones_like(segments).bool()]
            for piece in pieces:
                batch = Batch(inputs[piece][None], targets[piece][None], None if separate else segments[None])
                model.loss_sums(batch).nll.backward()
        found.append({name: full(p.grad) for name, p in model.named_parameters()})
    return found


def test_packed_documents_do_not_see_each_other():
    packed, separate = ranks(1).run(packed_on_ranks)[0]
    for name, grad in separate.items():
        assert (packed[name] - grad).abs().max() <= 5e-6 * grad.abs().max(), name
