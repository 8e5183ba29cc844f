"""What every fusion promises.

Legend: S slots, H features, F expert width, L local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.conformance.suite import Property
from sidestream.conformance.values import output_problem
from sidestream.dispatch.base import Received
from sidestream.fusion.late import Late
from sidestream.fusion.loop import LoopExperts

HIDDEN, WIDTH, SLOTS, TAIL = 32, 48, 40, 6
_NAMES = (
    "output",
    "gradient of the rows",
    "gradient of the row weights",
    "gradient of w_gate_up",
    "gradient of w_down",
)
# Of the largest value: sums in another order; of bf16, rounding at every step.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
_ENDS = [16, 16, SLOTS - TAIL]  # the second expert has no row


def _inputs(*, width: int = WIDTH, dtype: torch.dtype = torch.float32, slots: int = SLOTS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    weights = torch.rand(slots, generator=draw)
    gate_up, down = randn(3, HIDDEN, 2 * width) / HIDDEN**0.5, randn(3, width, HIDDEN) / width**0.5
    return [randn(slots, HIDDEN), weights, gate_up, down]


def _pass(
    fusion: Any, inputs: list[Tensor], *, ends: list[int], tail: float = 0.0, late: bool = False
) -> Any:
    """Output and gradients of what lies before the last end, or what is wrong with the output."""
    rows, weights, gate_up, down = (t.clone().requires_grad_() for t in inputs)
    end = ends[-1]
    given, shares = rows.clone(), weights.clone()
    given[end:], shares[end:] = tail, tail
    received = Received(given, shares, torch.tensor(ends, dtype=torch.int32))
    if late:
        puts = (Late(), Late())
        out = fusion(received, puts[0].token(gate_up), puts[1].token(down), puts)
    else:
        out = fusion(received, gate_up, down)
    if (problem := output_problem("its result", out, like=rows, rows=end)) is not None:
        return problem
    draw = torch.Generator().manual_seed(1)
    gradient = torch.randn(out.shape, generator=draw).to(out.dtype)
    gradient[end:] = tail
    out.backward(gradient)
    of_leaves = [
        t.grad if t.grad is not None else torch.full_like(t, torch.nan)
        for t in (rows, weights, gate_up, down)
    ]
    return [out.detach()[:end], of_leaves[0][:end], of_leaves[1][:end], *of_leaves[2:]]


def compare(found: Any, right: Any, tolerance: float) -> str | None:
    """The first of output and gradients that differs by more than so much of its largest value, in one clause."""
    if isinstance(found, str):
        return found
    for name, one, other in zip(_NAMES, found, right):
        scale = float(other.abs().max()) if other.numel() else 1.0
        error = float((one - other).abs().max().nan_to_num(torch.inf)) if other.numel() else 0.0
        if not error <= tolerance * (scale or 1.0):
            return f"{name} is off by {error / (scale or 1.0):.2g} of its largest value"
    return None


def _rule(dtype: torch.dtype) -> Any:
    def check(fusion: Any) -> str | None:
        inputs = _inputs(dtype=dtype)
        found, right = (_pass(f, inputs, ends=_ENDS) for f in (fusion, LoopExperts()))
        return compare(found, right, _TOLERANCE[dtype])

    return check


def _tail(fusion: Any) -> str | None:
    inputs = _inputs()
    found, right = (_pass(fusion, inputs, ends=_ENDS, tail=tail) for tail in (torch.nan, 0.0))
    return found if isinstance(found, str) else compare(found, right, 0.0)


def _idle(fusion: Any) -> str | None:
    found = _pass(fusion, _inputs(slots=0), ends=[0, 0, 0])
    if isinstance(found, str):
        return found
    for name, value in zip(_NAMES, found):
        if not bool((value == 0).all()):
            return f"{name} is not zero without a row; a rank without rows must stay in the graph"
    return None


def _late(fusion: Any) -> str | None:
    inputs = _inputs()
    return compare(_pass(fusion, inputs, ends=_ENDS, late=True), _pass(fusion, inputs, ends=_ENDS), 0.0)


def _odd(fusion: Any) -> str | None:
    inputs = _inputs(width=33)
    found, right = (_pass(f, inputs, ends=_ENDS) for f in (fusion, LoopExperts()))
    return compare(found, right, _TOLERANCE[torch.float32])


FUSION = [
    Property("(silu(rows w_gate) * (rows w_up) * row weight) w_down, as fusion=loop", _rule(torch.float32)),
    Property("the same in bf16", _rule(torch.bfloat16)),
    Property("what lies past the last offset is not read", _tail),
    Property("a rank without rows has gradients of zero", _idle),
    Property(
        "weight gradients that are put off are the same", _late, lambda f: getattr(f, "delays_wgrad", False)
    ),
    Property("an odd expert width", _odd),
]
