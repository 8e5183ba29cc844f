"""Gradients under expert parallelism, as numbers that can be checked by hand."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sidestream.dispatch.base import Routing
from sidestream.model.moe import local
from sidestream.parallel.agree import check_replicas
from sidestream.parallel.clip import clip_by_norm, global_norm
from sidestream.parallel.reduction import is_expert
from sidestream.routing.balance import AuxLoss
from sidestream.routing.router import Decision, SoftmaxRouter
from tests.core.build_tiny import (
    DISPATCHERS,
    Setup,
    local_batch,
    make_model,
    make_optimizer,
    make_step,
    parallel_for,
    run_steps,
)
from tests.core.scale_experts import Scales, routing_of
from tests.rank_pool import ranks

# Expert gradients do not grow with the expert-parallel size.


def all_to_one_expert(rank, world, ep):
    model = Scales([1.0] * 4, parallel_for(ep))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).chunk(world)[rank]
    model.backward(model(x, routing_of([[0]] * len(x))).sum() / 4)
    grads = model.scale_grads()
    model.close()
    return grads


@pytest.mark.parametrize(("world", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_expert_gradients_do_not_grow_with_ep(world, ep):
    for grads in ranks(world).run(all_to_one_expert, ep=ep):
        assert grads == [2.5, 0.0, 0.0, 0.0]


def one_token_per_expert(rank, world):
    model = Scales([1.0, 1.0], parallel_for(2))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank]
    model.backward(model(x, routing_of([[0], [1]])).sum() / 4)
    grads = model.scale_grads()
    model.close()
    return grads


def test_each_rank_uses_both_experts():
    assert ranks(2).run(one_token_per_expert) == [[1.0, 1.5], [1.0, 1.5]]


# The clipping norm is one over all ranks, each of which owns other experts.


def clip_on_ranks(rank, world, expert_grads, norm_type, max_norm):
    """One shared parameter and one expert per rank; `None` is a shard without elements."""
    parallel = parallel_for(2)
    mesh = parallel.sparse["ep"]
    mine = expert_grads[rank]
    size = sum(g is not None for g in expert_grads)

    def sharded(values):
        return DTensor.from_local(values, mesh, [Shard(0)], run_check=False, shape=(size,), stride=(1,))

    values = torch.tensor([] if mine is None else [mine])
    expert, shared = nn.Parameter(sharded(torch.zeros_like(values))), nn.Parameter(torch.zeros(1))
    expert.grad, shared.grad = sharded(values), torch.tensor([3.0])
    norm = global_norm([shared, expert], expert_group=parallel.ep_group, norm_type=norm_type)
    clip_by_norm([shared, expert], norm, max_norm)
    return norm.item(), shared.grad.item(), expert.grad.to_local().tolist()


def test_norm_counts_every_expert_once_and_all_ranks_clip_alike():
    first, second = ranks(2).run(clip_on_ranks, expert_grads=[4.0, 12.0], norm_type=2.0, max_norm=6.5)
    assert first[0] == second[0] == 13.0
    assert first[1] == second[1] == pytest.approx(1.5, abs=1e-5)
    assert first[2] == pytest.approx([2.0], abs=1e-5)
    assert second[2] == pytest.approx([6.0], abs=1e-5)


def test_clip_leaves_a_small_norm_alone():
    for norm, shared, _ in ranks(2).run(
        clip_on_ranks, expert_grads=[4.0, 12.0], norm_type=2.0, max_norm=100.0
    ):
        assert (norm, shared) == (13.0, 3.0)


@pytest.mark.parametrize(
    ("expert_grads", "norm_type", "expected"),
    [
        ([4.0, 12.0], math.inf, 12.0),
        ([4.0, 12.0], 3.0, (27 + 64 + 1728) ** (1 / 3)),
        ([4.0, None], 2.0, 5.0),
        ([4.0, None], math.inf, 4.0),
        ([None, 1.0], math.inf, 3.0),
    ],
)
def test_other_norms_and_an_empty_shard(expert_grads, norm_type, expected):
    for norm, _, _ in ranks(2).run(
        clip_on_ranks, expert_grads=expert_grads, norm_type=norm_type, max_norm=100.0
    ):
        assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("norm_type", "expected"), [(2.0, math.sqrt(14.0)), (math.inf, 3.0)])
def test_norm_of_several_tensors_on_one_rank(norm_type, expected):
    params = [nn.Parameter(torch.zeros(size)) for size in (1, 2, 4)]
    params[0].grad, params[1].grad = torch.tensor([-3.0]), torch.tensor([2.0, 1.0])  # the last one has none
    assert global_norm(params, expert_group=None, norm_type=norm_type).item() == pytest.approx(expected)


# The router gets the whole gradient though its experts are on other ranks.


def router_on_ranks(rank, world, ep, dispatcher):
    model = Scales([1.0, 5.0], parallel_for(ep), dispatcher=dispatcher)
    with torch.no_grad():
        model.logits.copy_(torch.tensor([0.0, math.log(3.0)]))
    x = torch.ones(1, requires_grad=True)
    decision = SoftmaxRouter(top_k=2)(model.logits.unsqueeze(0))
    y = model(x, decision.routing)
    model.backward(y.sum() / world)
    logits_grad = model.logits.grad.tolist()
    detached = Routing(decision.routing.expert_ids, decision.routing.weights.detach())
    x.grad = None
    model.backward(model(x, detached).sum())
    model.close()
    return y.item(), logits_grad, x.grad.item()


@pytest.mark.parametrize(
    ("world", "ep", "dispatcher"),
    [
        (1, 1, "local"),
        (1, 1, "alltoall"),
        (2, 1, "local"),
        (2, 1, "alltoall"),
        *((2, 2, name) for name in DISPATCHERS if name != "local"),
    ],
)
def test_router_gets_the_whole_gradient(world, ep, dispatcher):
    for y, logits_grad, x_grad in ranks(world).run(router_on_ranks, ep=ep, dispatcher=dispatcher):
        assert y == pytest.approx(4.0, abs=1e-6)
        assert logits_grad == pytest.approx([-0.75, 0.75], abs=1e-6)
        assert x_grad == pytest.approx(4.0, abs=1e-6)


def expert_elsewhere(rank, world, dispatcher):
    model = Scales([1.0, 5.0], parallel_for(2), dispatcher=dispatcher)
    x = torch.ones(1, requires_grad=True)
    y = model(x, routing_of([[1]]))  # expert 1 sits on rank 1
    model.backward(y.sum() * (rank == 0))  # the loss is rank 0's token alone
    model.close()
    return x.grad.item()


@pytest.mark.parametrize("dispatcher", [name for name in DISPATCHERS if name != "local"])
def test_gradient_comes_back_from_another_rank(dispatcher):
    assert ranks(2).run(expert_elsewhere, dispatcher=dispatcher) == [5.0, 0.0]


# With top-1 a normalised weight is always 1, and the router would not be trained.


@pytest.mark.parametrize("normalize", [False, "auto"])
def test_top_1_trains_the_router(normalize):
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    routing = SoftmaxRouter(top_k=1, normalize=normalize)(logits).routing
    assert routing.expert_ids.tolist() == [[1]] and routing.weights.shape == (1, 1)
    y = 5.0 * routing.weights.sum()
    y.backward()
    assert y.item() == pytest.approx(3.75)
    assert logits.grad[0].tolist() == pytest.approx([-0.9375, 0.9375])


def test_normalised_top_1_is_refused():
    router = SoftmaxRouter(top_k=1, normalize=False)
    router.normalize = True  # what it would do: y = 5 whatever the router says
    logits = torch.tensor([[0.0, math.log(3.0)]], requires_grad=True)
    y = 5.0 * router(logits).routing.weights.sum()
    y.backward()
    assert y.item() == 5.0 and logits.grad.abs().max() == 0
    with pytest.raises(ValueError, match=r"router.normalize=true.*router.top_k=1.*set router.normalize=auto"):
        SoftmaxRouter(top_k=1, normalize=True)


# The auxiliary loss over the global batch is as strong on any number of ranks.

A6_PROBS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.4, 0.6]])
A6_IDS = torch.tensor([[0], [0], [0], [1]])


def decision_of(probs, ids):
    counts = torch.bincount(ids.flatten(), minlength=probs.shape[1])
    return Decision(Routing(ids, probs.gather(1, ids)), probs, counts)


def aux_on_ranks(rank, world, scope):
    """Two sequences of two tokens; what a rank adds to the mean over sequences, and its gradient."""
    probs = A6_PROBS.chunk(world)[rank].clone().requires_grad_()
    decision = decision_of(probs, A6_IDS.chunk(world)[rank])
    loss = AuxLoss(coefficient=1.0, scope=scope).loss(decision, seq_length=2)
    (loss / 2).backward()
    return loss.item() / (2 / world), probs.grad.tolist()


def global_on_ranks(rank, world):
    """The rank's share of the loss over all tokens, the whole of it, and the gradient of the share."""
    probs = A6_PROBS.chunk(world)[rank].clone().requires_grad_()
    decision = decision_of(probs, A6_IDS.chunk(world)[rank])
    counts = decision.counts.clone()
    dist.all_reduce(counts, group=parallel_for(1).control)
    share = AuxLoss(coefficient=1.0, scope="global").global_loss(
        probs.sum(0, keepdim=True), counts.unsqueeze(0), num_tokens=torch.tensor(4.0), top_k=1
    )
    share.backward()
    total = share.detach().clone()
    dist.all_reduce(total, group=parallel_for(1).control)
    return total.item(), probs.grad.tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_global_scope_does_not_depend_on_the_ranks(world):
    for value, grads in ranks(world).run(global_on_ranks):
        assert value == pytest.approx(1.175, abs=1e-6)
        for grad in grads:
            assert grad == pytest.approx([0.375, 0.125], abs=1e-6)


def test_micro_batch_scope_is_per_rank():
    values = [value for value, _ in ranks(2).run(aux_on_ranks, scope="micro_batch")]
    assert values == pytest.approx([1.7, 1.0], abs=1e-6)


def test_sequence_scope_does_not_depend_on_the_ranks():
    (one,), two = ranks(1).run(aux_on_ranks, scope="sequence"), ranks(2).run(aux_on_ranks, scope="sequence")
    assert one[0] == pytest.approx((1.7 + 1.0) / 2, abs=1e-6)
    assert [value for value, _ in two] == pytest.approx([1.7, 1.0], abs=1e-6)
    assert one[1] == two[0][1] + two[1][1]


def test_the_scope_of_balancing_must_be_known():
    with pytest.raises(
        ValueError, match=r"balance.scope=world: expected one of sequence, micro_batch, global"
    ):
        AuxLoss(coefficient=1.0, scope="world")


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_perfect_balance_is_exactly_one(scope, top_k):
    probs = torch.full((4, 4), 0.25)
    ids = torch.arange(4 * top_k).view(4, top_k) % 4
    loss = AuxLoss(coefficient=1.0, scope=scope).loss(decision_of(probs, ids), seq_length=4)
    assert loss.item() == 1.0


def gate_gradient(rank, world, setup):
    """Gradient of the auxiliary loss alone, per layer; and whether evaluation adds one."""
    model = make_model(setup)
    sums = model.loss_sums(local_batch(setup, 0, rank, world))
    if sums.probs is not None:
        num_tokens = torch.tensor(float(setup.global_batch * setup.seq_length))
        sums = replace(
            sums,
            aux=model.parts.balance.global_loss(
                sums.probs, model.ledger.counts, num_tokens=num_tokens, top_k=setup.top_k
            ),
        )
    sums.aux.backward()
    in_training = [moe.gate.grad.abs().max().item() for moe in model.moe_layers()]
    model.eval()
    return in_training, model.loss_sums(local_batch(setup, 0, rank, world)).aux.item()


@pytest.mark.parametrize("balance", ["aux", "aux_micro_batch", "aux_global"])
def test_auxiliary_loss_reaches_every_gate_in_training_only(balance):
    in_training, in_evaluation = ranks(1).run(gate_gradient, setup=Setup(balance=balance))[0]
    assert min(in_training) > 1e-4 and in_evaluation == 0.0


def backpropagated(rank, world, setup):
    model = make_model(setup)
    step, seen = make_step(setup, model, world), []
    backward = torch.Tensor.backward

    def record(loss):
        seen.append(loss.item())
        backward(loss)

    with mock.patch.object(torch.Tensor, "backward", record):
        step.attempt(local_batch(setup, 0, rank, world))
    report = step.check()
    return sum(seen), report.loss, report.aux, model.parts.balance.coefficient


@pytest.mark.parametrize("balance", ["aux", "aux_micro_batch", "aux_global", "bias"])
def test_logged_losses_are_what_was_backpropagated(balance):
    results = ranks(2).run(backpropagated, setup=Setup(balance=balance, ep=2, accumulation=2))
    total = sum(seen for seen, *_ in results)
    for _, loss, aux, coefficient in results:
        assert total == pytest.approx(loss + coefficient * aux, rel=1e-6)


@pytest.mark.parametrize(("balance", "micro_batches_alone"), [("aux_global", 1), ("aux_micro_batch", 2)])
def test_scopes_give_the_same_gradients_on_ranks(balance, micro_batches_alone):
    """`global` over two ranks equals one rank; `micro_batch` on two ranks equals two micro-batches on one."""
    one = ranks(1).run(run_steps, setup=Setup(balance=balance, accumulation=micro_batches_alone))[0]
    for two in ranks(2).run(run_steps, setup=Setup(balance=balance, ep=2)):
        for name, grad in one["grads"].items():
            assert (two["grads"][name] - grad).abs().max() < 5e-6 * grad.abs().max(), name
        assert two["aux"] == pytest.approx(one["aux"], rel=1e-6)


# The optimizer holds the parameters that are trained; replicas stay equal.


def train(rank, world, setup):
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    before = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    in_model = sorted(map(id, model.parameters()))
    in_optimizer = sorted(id(p) for group in optimizer.param_groups for p in group["params"])
    in_buckets = sorted(id(p) for bucket in step.reduction.buckets for p in bucket.params)
    for index in range(setup.steps):
        step.attempt(local_batch(setup, index, rank, world))
        report = step.check()
        step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm)
        assert report.counts.min() > 0, "the test needs every expert used"
    check_replicas(model, step.parallel)
    after = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    experts = {name for name, p in model.named_parameters() if is_expert(p)}
    return in_model, in_optimizer, in_buckets, before, after, experts


def test_every_parameter_is_optimized_once_and_changes():
    setup = Setup(ep=2, optimizer="sgd", max_norm=None)
    for in_model, in_optimizer, in_buckets, before, after, experts in ranks(2).run(train, setup=setup):
        assert in_model == in_optimizer == in_buckets and len(set(in_model)) == len(in_model)
        for name, value in before.items():
            pieces = zip(value, after[name]) if name in experts else [(value, after[name])]
            assert not any(torch.equal(old, new) for old, new in pieces), name


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_replicas_are_bitwise_equal_after_five_steps(world, ep):
    results = ranks(world).run(train, setup=Setup(ep=ep, accumulation=2, steps=5, balance="bias"))
    for rank, (*_, after, experts) in enumerate(results):
        for name, value in after.items():
            twin = rank % ep if name in experts else 0  # the first rank that holds the same values
            assert torch.equal(value, results[twin][4][name]), (
                f"{name} differs between ranks {twin} and {rank}"
            )


def drift(rank, world, name):
    model = make_model(Setup(ep=2))
    with torch.no_grad():
        local(dict(model.named_parameters())[name]).view(-1)[0] += 1e-7 if rank in (1, 3) else 0.0
    try:
        check_replicas(model, parallel_for(2))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_replica_that_drifted_is_named_on_every_rank():
    for message in ranks(4).run(drift, name="blocks.1.moe.shared_expert.down.weight"):
        assert "first: blocks.1.moe.shared_expert.down.weight" in message
    # Ranks 1 and 3 hold the same experts: nothing differs between them.
    assert ranks(4).run(drift, name="blocks.1.moe.experts.w_down") == [""] * 4
