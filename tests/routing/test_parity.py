"""Routers and balances: a step on ranks against a step of one process.

Most options decide token by token and are compared with the whole batch at once. Capacity and quantiles look at the
tokens of one rank's micro-batch. Then the step of W ranks with A micro-batches each equals the step of one process
with W * A micro-batches, which cuts the batch in the same places; against another cut no parity is defined.
"""

from itertools import product

import pytest
import torch

from tests.core.build_tiny import Setup, run_steps
from tests.core.pairwise import cover, pairwise
from tests.core.test_parity import (
    MESHES,
    NORM_TOLERANCE,
    assert_grads_close,
    assert_params_close,
    on_one_rank,
)
from tests.rank_pool import ranks

PER_TOKEN = [
    ("softmax_after", "aux"),
    ("softmax_after", "aux_global_z"),
    ("sigmoid_groups", "bias"),
    ("sigmoid_groups", "aux_global_z"),
    ("sqrtsoftplus", "bias"),
    ("sqrtsoftplus", "aux"),
]
PER_MICRO_BATCH = [
    ("capacity", "aux"),
    ("capacity", "aux_global"),
    ("capacity_padded", "bias"),
    ("position", "none_z"),
    ("softmax", "quantile"),
    ("sqrtsoftplus", "quantile"),
    ("capacity", "quantile"),
]
PATHS = [("alltoall", "grouped"), ("alltoall", "loop"), ("local", "grouped")]
ROWS = [
    row
    for row in product(PER_TOKEN + PER_MICRO_BATCH, PATHS, MESHES, (1, 2), (False, True))
    if row[1][0] != "local" or row[2][0] == 1
]
SAMPLE = pairwise(ROWS)
TRIPLES = [row for row in cover(ROWS, 3) if row not in SAMPLE]


def check(choice, path, mesh, accumulation, padded):
    (router, balance), (dispatcher, fusion), (ep, edp) = choice, path, mesh
    setup = Setup(router=router, balance=balance, padded=padded, optimizer="sgd", max_norm=0.5)
    cuts = ep * edp * accumulation if choice in PER_MICRO_BATCH else 1
    expected = on_one_rank(setup.with_(dispatcher="local", fusion="loop", accumulation=cuts))
    assert expected["norm"][0] > 0.5, "the clip must have something to do"
    setup = setup.with_(dispatcher=dispatcher, fusion=fusion, ep=ep, accumulation=accumulation)
    for result in ranks(ep * edp).run(run_steps, setup=setup):
        assert_grads_close(result["grads"], expected["grads"])
        assert result["norm"][0] == pytest.approx(expected["norm"][0], rel=NORM_TOLERANCE)
        assert_params_close(result["params"], expected["params"], grads=expected["grads"], optimizer="sgd")
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert result["aux"] == pytest.approx(expected["aux"], rel=1e-6)
        assert torch.equal(result["counts"][0], expected["counts"][0])
        for bias, wanted in zip(result["bias"], expected["bias"]):
            # A quantile is a value of the scores, not a count: rounding shows.
            torch.testing.assert_close(bias, wanted, rtol=0, atol=1e-6 if balance == "quantile" else 0)


@pytest.mark.parametrize("row", SAMPLE, ids=str)
@pytest.mark.sample(15)
def test_step_equals_one_process(row):
    check(*row)


@pytest.mark.full
@pytest.mark.parametrize("row", TRIPLES, ids=str)
def test_step_equals_one_process_full(row):
    check(*row)


@pytest.mark.full
@pytest.mark.parametrize("balance", ["aux_global", "quantile"])
def test_sharded_weights_see_the_same_routing(balance):
    """The forward passes ahead of a loss over the global batch, under `fully_shard`."""
    setup = Setup(balance=balance, ep=2, accumulation=2, optimizer="sgd")
    plain = ranks(4).run(run_steps, setup=setup)[0]
    for sharded in ranks(4).run(run_steps, setup=setup.with_(reduction="fully_shard")):
        assert_grads_close(sharded["grads"], plain["grads"])
        assert torch.equal(sharded["counts"][0], plain["counts"][0])
        assert sharded["aux"] == pytest.approx(plain["aux"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("router", "balance"),
    [("sigmoid_groups", "bias"), ("capacity_padded", "aux_global_z"), ("jitter", "quantile")],
)
def test_ten_steps_repeat_bit_for_bit(router, balance):
    setup = Setup(router=router, balance=balance, ep=2, accumulation=2, steps=10)
    first, second = (ranks(2).run(seeded_steps, setup=setup)[0] for _ in range(2))
    assert first["loss"] == second["loss"] and first["norm"] == second["norm"]
    assert all(torch.equal(second["params"][name], value) for name, value in first["params"].items())
    assert all(map(torch.equal, first["bias"], second["bias"]))


def seeded_steps(rank, world, setup):
    torch.manual_seed(rank)
    return run_steps(rank, world, setup)
