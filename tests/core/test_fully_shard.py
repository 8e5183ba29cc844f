"""`strategy=fully_shard`: the same numbers as one process, with every tensor in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.parallel.reduction import local
from tests.core.build_tiny import Setup, make_model, run_steps
from tests.rank_pool import ranks

# fp32: sums over ranks and micro-batches are taken in another order.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    setup = Setup(dispatcher="local", fusion="loop", optimizer="sgd", balance="bias", steps=2)
    return ranks(1).run(run_steps, setup=setup)[0]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("world", "ep"),
    [
        (2, 1),
        (2, 2),
        (4, 2),
        pytest.param(4, 1, marks=pytest.mark.full),
        pytest.param(4, 4, marks=pytest.mark.full),
    ],
)
@pytest.mark.sample(3)
def test_gradients_norm_and_parameters_equal_one_process(
    reference: dict[str, Any], world: int, ep: int, accumulation: int
) -> None:
    setup = Setup(
        ep=ep, accumulation=accumulation, reduction="fully_shard", optimizer="sgd", balance="bias", steps=2
    )
    for result in ranks(world).run(run_steps, setup=setup):
        for kind in ("grads", "params"):
            assert result[kind].keys() == reference[kind].keys()
            for name, expected in reference[kind].items():
                torch.testing.assert_close(
                    result[kind][name], expected, rtol=1e-4, atol=TOLERANCE, msg=f"{kind} of {name}"
                )
        assert result["norm"] == pytest.approx(reference["norm"], rel=1e-5)
        assert all(torch.equal(a, b) for a, b in zip(result["bias"], reference["bias"]))


def held(rank: int, world: int, setup: Setup) -> int:
    model = make_model(setup)
    return sum(local(p).numel() for p in model.parameters())


def test_each_rank_holds_its_share() -> None:
    whole = ranks(1).run(held, setup=Setup(reduction="replicate"))[0]
    for ep in (1, 2):
        shares = ranks(2).run(held, setup=Setup(reduction="fully_shard", ep=ep))
        # FSDP cuts along the first dimension, so shares may differ by a row per tensor.
        assert sum(shares) == whole
        assert max(shares) < 0.55 * whole
