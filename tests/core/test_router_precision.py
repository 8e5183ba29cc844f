"""Precision of the router and place of the routing weight."""

import io
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from sidestream.model.moe import Ledger, MoE, MoEParts
from sidestream.overlap.path import RoutedPath
from sidestream.routing.balance import ExpertBias
from sidestream.routing.router import SoftmaxRouter
from tests.core.build_tiny import DISPATCHERS, FUSIONS, SHAPE
from tests.core.scale_experts import routing_of, run_path, wire


def moe_layer(*, num_experts=2, hidden_size=1, top_k=1, update_rate=0.001):
    """One MoE layer without ranks, balanced by a bias; parameters are zero."""
    shape = replace(SHAPE, num_experts=num_experts, hidden_size=hidden_size)
    parts = MoEParts(
        router=SoftmaxRouter(top_k=top_k),
        balance=ExpertBias(update_rate=update_rate),
        dispatcher=wire("local", num_experts=num_experts),
        fusion=FUSIONS["loop"](),
        expert_range=(0, num_experts),
    )
    ledger = Ledger(torch.zeros(1, num_experts, dtype=torch.int64))
    moe = MoE(shape, parts, layer=0, ledger=ledger)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    return moe


def decide(moe, x):
    """What the router of the layer decides for `x` `[T, H]`."""
    seen, router = [], moe.parts.router

    def record(logits, **kwargs):
        seen.append(router(logits, **kwargs))
        return seen[0]

    moe.parts = replace(moe.parts, router=record)
    moe.routed_path(x.unsqueeze(0))
    moe.parts = replace(moe.parts, router=router)
    return seen[0]


# The balancing bias stays fp32.


@pytest.mark.parametrize(
    "cast",
    [
        lambda moe: moe.to(torch.bfloat16),
        lambda moe: moe.bfloat16(),
        lambda moe: moe.half(),
        lambda moe: torch.nn.Sequential(moe).to("cpu", torch.bfloat16)[0],
    ],
)
def test_bias_and_gate_keep_their_bits_in_a_cast(cast):
    moe = moe_layer()
    with torch.no_grad():
        moe.selection_bias.fill_(1.001)
        moe.gate.fill_(1.001)
    moe.gate.grad = torch.full_like(moe.gate, 1.001)
    moe = cast(moe)
    assert moe.experts.w_down.dtype != torch.float32
    for tensor in (moe.selection_bias, moe.gate, moe.gate.grad):
        assert tensor.dtype == torch.float32 and (tensor == torch.tensor(1.001)).all()
    moe.to("meta")
    assert moe.selection_bias.is_meta and moe.gate.is_meta and moe.gate.dtype == torch.float32


def test_bias_is_fp32_under_a_bf16_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = moe_layer()
    finally:
        torch.set_default_dtype(torch.float32)
    assert moe.selection_bias.dtype == moe.gate.dtype == torch.float32
    assert moe.experts.w_down.dtype == torch.bfloat16


def test_bias_survives_saving_and_loading():
    saved = moe_layer(update_rate=1.001).to(torch.bfloat16)
    buffer = saved.selection_bias
    saved.parts.balance.commit(buffer, torch.tensor([4, 0]))
    assert saved.selection_bias is buffer and buffer.tolist() == pytest.approx([-1.001, 1.001])
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loaded = moe_layer().to(torch.bfloat16)
    loaded.load_state_dict(torch.load(file))
    loaded.to(torch.bfloat16)
    assert loaded.selection_bias.dtype == torch.float32
    assert torch.equal(loaded.selection_bias, buffer)


def test_a_small_difference_of_biases_decides_and_weights_stay_unbiased():
    moe = moe_layer().to(torch.bfloat16)
    moe.selection_bias.copy_(torch.tensor([7.00, 7.01]))  # both 7.0 in bf16
    decision = decide(moe, torch.ones(3, 1, dtype=torch.bfloat16))
    assert decision.routing.expert_ids.tolist() == [[1]] * 3
    assert decision.routing.weights.tolist() == [[0.5]] * 3


# Probabilities are fp32 when the top k are chosen.


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_gate_and_probabilities_are_fp32(precision):
    moe = moe_layer()
    with torch.no_grad():
        moe.gate.copy_(torch.tensor([[1.000], [1.001]]))  # equal in bf16
    x = torch.ones(1, 1)
    if precision == "bf16-true":
        moe, x = moe.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        decision = decide(moe, x)
    assert decision.routing.expert_ids.tolist() == [[1]]
    assert decision.probs.dtype == decision.routing.weights.dtype == torch.float32


def test_choices_equal_fp64():
    moe = moe_layer(num_experts=64, hidden_size=256, top_k=8)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        moe.gate.normal_(generator=generator)
    x = torch.randn(10_000, 256, generator=generator).to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ids = decide(moe, x).routing.expert_ids
    exact = (x.double() @ moe.gate.double().t()).topk(8).indices
    differ = (ids.sort(dim=1).values != exact.sort(dim=1).values).any(dim=1)
    assert differ.float().mean() <= 1e-4  # a bf16 gate changes 2.5 % of the rows, bf16 probabilities 0.2 %


# Where and how often the routing weight is applied.


def run_experts(dispatcher, fusion, x, routing, w_gate_up, w_down):
    def experts(received):
        return FUSIONS[fusion]()(received, w_gate_up, w_down)

    num_experts, hidden = w_gate_up.shape[:2]
    wired = wire(dispatcher, num_experts=num_experts, hidden=hidden)
    y = run_path(RoutedPath(x, routing, dispatcher=wired, experts=experts))
    wired.close()
    return y


@pytest.mark.parametrize(("dispatcher", "fusion"), [*product(DISPATCHERS, FUSIONS)])
def test_weight_is_applied_once_to_the_output(dispatcher, fusion):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, generator=generator)
    gate_up, down = (torch.randn(2, 16, n, generator=generator) for n in (32, 16))
    gate, up = (x @ gate_up[1]).chunk(2, dim=-1)
    exact = (F.silu(gate) * up) @ down[1]
    for weight in (1.0, 0.5, 0.25):
        y = run_experts(dispatcher, fusion, x, routing_of([[1]], [[weight]]), gate_up, down)
        # On the input it would go through silu(gate) * up; applied twice it would be squared.
        torch.testing.assert_close(y, weight * exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [(False, [0.625, 0.25]), (True, [0.714286, 0.285714]), ("auto", [0.714286, 0.285714])],
)
def test_weights_with_and_without_normalisation(normalize, expected):
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]])
    routing = SoftmaxRouter(top_k=2, normalize=normalize)(logits).routing
    assert routing.expert_ids.tolist() == [[2, 1]]
    assert routing.weights[0].tolist() == pytest.approx(expected, abs=1e-6)
