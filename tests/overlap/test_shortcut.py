"""`overlap=shortcut` computes the paper's equations, and puts the experts where they cost least."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestream.model.block import MoEUnit
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.transformer import MoETransformer
from sidestream.overlap.shortcut import ShortcutOverlap
from tests.core.build_tiny import Setup, full, make_model
from tests.overlap.runs import PAIRS
from tests.overlap.transcription import Paper, pair
from tests.rank_pool import ranks

# The transcription computes in fp64 from the same fp32 numbers, so this is the rounding of the model alone, as a
# share of the largest element of an output or a gradient.
TOLERANCE = 1e-6
SEQUENCES, LENGTH = 2, 8


def variants() -> list[tuple[dict[str, Any], int]]:
    """Options of the schedule, and the router's top-k."""
    taps, mixes, norms = (
        ("pos1", "pos2", "pos3"),
        ("add", "cg1", "cg2"),
        itertools.product((False, True), repeat=2),
    )
    switches = [{"tap_norm": tap_norm, "post_norm": post_norm} for tap_norm, post_norm in norms]
    single = [
        ({"tap": tap, "mix": mix, **switch}, top_k)
        for tap, mix, switch in itertools.product(taps, mixes, switches)
        for top_k in (1, 2)
        # Two experts (ScMoE-2) with the authors' norms only.
        if top_k == 1 or switch == {"tap_norm": True, "post_norm": False}
    ]
    double = [({"tap": tap, "double_gating": True, **switch}, 1) for tap in taps for switch in switches]
    return single + double


def build(options: dict[str, Any], top_k: int, *, lone: bool = False, shared: bool = True) -> MoETransformer:
    shape = replace(PAIRS, num_shared_experts=int(shared and not options.get("double_gating")))
    if lone:  # an MoE block behind nothing
        shape = replace(shape, num_layers=1, moe_layers=(0,))
    return make_model(
        Setup(
            dispatcher="local", top_k=top_k, shape=shape, schedule=lambda: ShortcutOverlap(slot=1, **options)
        )
    )


def weights_of(module: torch.nn.Module | None) -> dict[str, Tensor] | None:
    """Parameters by name, as fp64 leaves."""
    if module is None:
        return None
    return {name: full(p).double().requires_grad_() for name, p in module.named_parameters()}


def by_model(unit: MoEUnit, context: TokenContext, h: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the unit: the input's, and the parameters' by name."""
    y = unit(h, context)
    y.backward(up)
    blocks = {"unit": unit} if unit.before is None else {"unit": unit, "before": unit.before}
    grads = {
        f"{b}.{name}": full(p.grad) for b, block in blocks.items() for name, p in block.named_parameters()
    }
    return {"y": y.detach(), "dh": h.grad, **grads}


def by_paper(unit: MoEUnit, h: Tensor, up: Tensor, paper: Paper) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The same by the transcription, and the experts that each token uses."""
    weights = {"unit": weights_of(unit), "before": weights_of(unit.before)}
    x = h.detach().double().requires_grad_()
    outputs, chosen = zip(*(pair(sequence, weights["unit"], weights["before"], paper) for sequence in x))
    y = torch.stack(outputs)
    y.backward(up.double())
    grads = {
        f"{b}.{name}": value.grad for b, block in weights.items() for name, value in (block or {}).items()
    }
    return {"y": y.detach(), "dh": x.grad, **grads}, list(itertools.chain(*chosen))


def compare(
    rank: int, world: int, options: dict[str, Any], top_k: int, paper: Paper, **model_options: Any
) -> dict[str, Any]:
    """Deviations by name, relative to the largest element; the gate's gradient; the chosen experts."""
    model = build(options, top_k, **model_options)
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide a norm in the wrong place
            parameter.data += 0.2 * draw(parameter.shape)
    h, up = (draw(SEQUENCES, LENGTH, 64) for _ in range(2))
    [(unit, context)] = model.units([PLAIN] * len(model.blocks))
    found = by_model(unit, context, h.requires_grad_(), up)
    expected, chosen = by_paper(unit, h, up, paper)
    assert found.keys() == expected.keys()
    off = {
        name: (
            (value.double() - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-30)
        ).item()
        for name, value in found.items()
    }
    return {
        "off": off,
        "gate": found["unit.moe.gate"],
        "chosen": chosen,
        "counts": model.ledger.counts.clone(),
    }


def paper_of(options: dict[str, Any], top_k: int, **changes: Any) -> Paper:
    names = ("tap", "mix", "double_gating")
    return Paper(**{name: options[name] for name in names if name in options} | {"top_k": top_k} | changes)


@pytest.mark.parametrize(("options", "top_k"), variants())
def test_outputs_and_gradients_are_those_of_the_equations(options: dict[str, Any], top_k: int) -> None:
    (result,) = ranks(1).run(compare, options=options, top_k=top_k, paper=paper_of(options, top_k))
    worst = max(result["off"], key=result["off"].get)
    assert result["off"][worst] < TOLERANCE, f"{worst}: {result['off'][worst]}"
    assert result["gate"].abs().max() > 1e-3
