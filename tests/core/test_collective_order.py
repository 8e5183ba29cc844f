"""Order of collectives, and activation checkpointing: without overlap and with every schedule."""

import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.routing import router
from tests.core.build_tiny import SHAPE, Setup, full, local_batch, make_model, make_optimizer, make_step
from tests.rank_pool import ranks

# Every rank issues collectives in the same order.

COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather_single", "reduce_scatter_single")


def recorded_order(rank, world, setup, skew, pause_s=0.003):
    """Every collective of some steps as (group, operation, tensor class), with random pauses before each."""
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    parallel = step.parallel
    names = {id(getattr(parallel, f"{n}_group")): n for n in ("ep", "edp", "dp")} | {
        id(parallel.control): "control"
    }
    pauses, log = random.Random(rank), []

    def recorded(name, operation):
        def record(*args, **kwargs):
            time.sleep(pauses.random() * pause_s)
            tensor = args[0] if args else kwargs["output"]
            # Row counts differ between ranks, so an exchange is known by its width.
            shape = tensor.shape[1:] if name == "all_to_all_single" else tensor.shape
            log.append((names[id(kwargs["group"])], name, tuple(shape)))
            return operation(*args, **kwargs)

        return record

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, recorded(name, getattr(dist, name))))
        for index in range(setup.steps):
            for moe in model.moe_layers():
                moe.selection_bias.zero_()[: SHAPE.num_experts // 2] = skew
            step.attempt(local_batch(setup, index, rank, world))
            report = step.check()
            step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm)
    return log


@pytest.mark.parametrize("fusion", ["loop", "grouped"])
@pytest.mark.parametrize("balance", ["bias", "aux_global"])
@pytest.mark.sample(2)
def test_collectives_have_one_order_on_all_ranks(fusion, balance):
    setup = Setup(ep=2, accumulation=2, steps=3, balance=balance, fusion=fusion)
    free, skewed = (ranks(4).run(recorded_order, setup=setup, skew=skew) for skew in (0.0, 100.0))
    assert {group for group, _, _ in free[0]} == {"ep", "edp", "dp", "control"}
    for log in [*free, *skewed]:  # nor does an idle rank change the order
        assert log == free[0]


# Schedule, and routings of a layer and micro-batch.
OVERLAPS = {
    "shared_expert": (SharedExpertOverlap, 1),
    "chunked": (partial(ChunkedOverlap, num_chunks=3), 1),
    "two_batch": (TwoBatchOverlap, 2),
    "shortcut": (partial(ShortcutOverlap, slot=1, mix="cg1"), 1),  # pos2, then pos1
}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize(
    ("reduction", "late"),
    [("replicate", True), pytest.param("fully_shard", False, marks=pytest.mark.full)],
)
def test_collectives_have_one_order_for_every_schedule(name, reduction, late):
    schedule = partial(OVERLAPS[name][0], delay_wgrad=late)
    setup = Setup(ep=2, accumulation=2, steps=2, balance="bias", reduction=reduction, schedule=schedule)
    free, skewed = (ranks(4).run(recorded_order, setup=setup, skew=skew) for skew in (0.0, 100.0))
    # Exchanges, and reductions of dense weights and of experts, one among the others.
    assert {group for group, _, _ in free[0]} == {"ep", "edp", "dp", "control"}
    for log in [*free, *skewed]:
        assert log == free[0]


@pytest.mark.full
@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.timeout(600)
def test_collectives_keep_their_order_over_fifty_steps_with_long_pauses(name):
    setup = Setup(ep=2, accumulation=2, steps=50, balance="bias", schedule=OVERLAPS[name][0])
    first, second = ranks(2).run(recorded_order, setup=setup, skew=0.0, pause_s=0.02, limit_s=500)
    assert first == second and len(first) % setup.steps == 0


# Recomputing in backward repeats neither the routing, which might choose otherwise, nor an exchange.


class FlippingTopK:
    """Ties go to the lowest id on every odd call and to the highest on every even one."""

    def __init__(self):
        self.calls = 0

    def __call__(self, scores, k):
        self.calls += 1
        if self.calls % 2:
            return torch.arange(k).expand(len(scores), k)
        return (scores.shape[1] - 1 - torch.arange(k)).expand(len(scores), k)


def gradients_and_transfers(rank, world, setup):
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


def check_checkpointing(plain, *, routings, chosen):
    recomputed = plain.with_(shape=replace(SHAPE, activation_checkpointing=True))
    without, with_ = (ranks(2).run(gradients_and_transfers, setup=setup) for setup in (plain, recomputed))
    for (grads, transfers, calls, counts), (grads_2, transfers_2, calls_2, counts_2) in zip(without, with_):
        assert calls == calls_2 == 4 * routings  # two layers, two micro-batches
        assert transfers == transfers_2 == without[0][1]
        assert len(set(transfers.values())) == 1  # each exchange of a plan once, in both passes
        assert torch.equal(counts, counts_2) and counts.count_nonzero() == chosen
        for name, grad in grads.items():
            assert torch.equal(grad, grads_2[name]), name
    return transfers


@pytest.mark.parametrize("fusion", ["loop", "grouped"])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing_repeats_neither_routing_nor_exchanges(fusion, autocast):
    setup = Setup(ep=2, fusion=fusion, autocast=autocast, accumulation=2)
    assert set(check_checkpointing(setup, routings=1, chosen=4).values()) == {4}


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.parametrize("late", [False, True])
def test_checkpointing_repeats_neither_routing_nor_exchanges_in_any_schedule(name, late):
    make, routings = OVERLAPS[name]
    setup = Setup(ep=2, accumulation=2, schedule=partial(make, delay_wgrad=late))
    # Of halves the second gets the other experts.
    transfers = check_checkpointing(setup, routings=routings, chosen=4 * routings)
    plans = {"chunked": 3, "two_batch": 2}.get(name, 1)
    assert set(transfers.values()) == {4 * plans}
