"""Models with every feature on: a step on ranks against one process, fp32."""

from itertools import product

import pytest

from tests.core.build_tiny import Setup, run_steps
from tests.core.test_parity import (
    GRAD_TOLERANCE,
    MESHES,
    NORM_TOLERANCE,
    assert_grads_close,
    assert_params_close,
    reference,
)
from tests.model.shapes import SHAPES
from tests.rank_pool import ranks

ROWS = list(product(("everything", "everything_latent"), MESHES, (1, 2)))
SAMPLE = [("everything", (2, 1), 2), ("everything_latent", (1, 2), 1)]


def check(model, mesh, accumulation):
    ep, edp = mesh
    setup = Setup(shape=SHAPES[model], ep=ep, accumulation=accumulation, optimizer="sgd")
    expected = reference(setup)
    for result in ranks(ep * edp).run(run_steps, setup=setup):
        assert_grads_close(result["grads"], expected["grads"], GRAD_TOLERANCE)
        assert_params_close(result["params"], expected["params"], grads=expected["grads"], optimizer="sgd")
        assert result["norm"][0] == pytest.approx(expected["norm"][0], rel=NORM_TOLERANCE)
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize(("model", "mesh", "accumulation"), SAMPLE, ids=str)
def test_step_equals_one_process(model, mesh, accumulation):
    check(model, mesh, accumulation)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "mesh", "accumulation"), [row for row in ROWS if row not in SAMPLE], ids=str
)
def test_step_equals_one_process_full(model, mesh, accumulation):
    check(model, mesh, accumulation)
