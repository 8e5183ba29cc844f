"""Order of collectives, and activation checkpointing (cases f1, f4)."""

import random
import time
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sidestream.routing import router
from tests.core.build_tiny import SHAPE, Setup, full, local_batch, make_model, make_optimizer, make_step
from tests.rank_pool import ranks

# f1: collectives are issued in different order on different ranks


def f1_order(rank, world, setup, skew):
    """Every collective of some steps as (group, operation, tensor class), with random pauses before each."""
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    parallel = step.parallel
    names = {id(getattr(parallel, f"{n}_group")): n for n in ("ep", "edp", "dp")} | {
        id(parallel.control): "control"
    }
    pauses, log = random.Random(rank), []

    def recorded(operation):
        def record(tensor, *args, **kwargs):
            time.sleep(pauses.random() * 0.003)
            # Row counts differ between ranks, so an exchange is known by its width.
            shape = (
                tuple(tensor.shape[1:])
                if operation.__name__.startswith("all_to_all")
                else tuple(tensor.shape)
            )
            log.append((names[id(kwargs["group"])], operation.__name__, shape))
            return operation(tensor, *args, **kwargs)

        return record

    patches = [
        mock.patch.object(dist, op.__name__, recorded(op)) for op in (dist.all_reduce, dist.all_to_all_single)
    ]
    with patches[0], patches[1]:
        for index in range(setup.steps):
            for moe in model.moe_layers():
                moe.selection_bias.zero_()[: SHAPE.num_experts // 2] = skew
            step.attempt(local_batch(setup, index, rank, world))
            report = step.check()
            step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm)
    return log


@pytest.mark.parametrize("fusion", ["loop", "grouped"])
@pytest.mark.parametrize("balance", ["bias", "aux_global"])
def test_f1_collectives_have_one_order_on_all_ranks(fusion, balance):
    setup = Setup(ep=2, accumulation=2, steps=3, balance=balance, fusion=fusion)
    free, skewed = (ranks(4).run(f1_order, setup=setup, skew=skew) for skew in (0.0, 100.0))
    assert {group for group, _, _ in free[0]} == {"ep", "edp", "dp", "control"}
    for log in [*free, *skewed]:  # nor does an idle rank change the order
        assert log == free[0]


# f4: recompute routes differently from the forward pass


class FlippingTopK:
    """Ties go to the lowest id on every odd call and to the highest on every even one."""

    def __init__(self):
        self.calls = 0

    def __call__(self, scores, k):
        self.calls += 1
        if self.calls % 2:
            return torch.arange(k).expand(len(scores), k)
        return (scores.shape[1] - 1 - torch.arange(k)).expand(len(scores), k)


def f4_gradients(rank, world, setup):
    model = make_model(setup)
    step = make_step(setup, model, world)
    for moe in model.moe_layers():
        moe.gate.data.zero_()  # every score is a tie
    transfers, flipping = Counter(), FlippingTopK()
    model.parts.dispatcher.channel.on_start = lambda tag: transfers.update([tag])
    with mock.patch.object(router, "top_k_stable", flipping):
        step.attempt(local_batch(setup, 0, rank, world))
    model.parts.dispatcher.close()  # finds a transfer that nobody waited for
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    return grads, transfers, flipping.calls, model.ledger.counts.clone()


@pytest.mark.parametrize("fusion", ["loop", "grouped"])
@pytest.mark.parametrize("autocast", [False, True])
def test_f4_checkpointing_repeats_neither_routing_nor_exchanges(fusion, autocast):
    plain = Setup(ep=2, fusion=fusion, autocast=autocast, accumulation=2)
    recomputed = plain.with_(shape=replace(SHAPE, activation_checkpointing=True))
    without, with_ = (ranks(2).run(f4_gradients, setup=setup) for setup in (plain, recomputed))
    for (grads, transfers, calls, counts), (grads_2, transfers_2, calls_2, counts_2) in zip(without, with_):
        assert calls == calls_2 == 4  # two layers, two micro-batches
        assert transfers == transfers_2 == without[0][1]
        assert set(transfers.values()) == {4}
        assert torch.equal(counts, counts_2) and counts.count_nonzero() == 4
        for name, grad in grads.items():
            assert torch.equal(grad, grads_2[name]), name
