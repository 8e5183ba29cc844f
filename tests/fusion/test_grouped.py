"""`fusion=grouped` for widths that the grouped product of torch does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Received
from sidestream.fusion import base
from sidestream.fusion.base import gated_activation, resolve_alignment
from sidestream.fusion.grouped import GroupedExperts
from sidestream.fusion.late import Late
from sidestream.fusion.loop import LoopExperts

OFFSETS = [5, 5, 20]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def passed(fusion: Any, tensors: list[Tensor], *, late: bool = False) -> list[Tensor]:
    """Output and gradients, without what lies past the last offset."""
    rows, weights, gate_up, down = (t.clone().requires_grad_() for t in tensors)
    received = Received(rows, weights, torch.tensor(OFFSETS, dtype=torch.int32))
    if late:
        puts = (Late(), Late())
        out = fusion(received, puts[0].token(gate_up), puts[1].token(down), puts)
    else:
        out = fusion(received, gate_up, down)
    assert out.shape == rows.shape and out.is_contiguous()
    end = OFFSETS[-1]
    out[:end].float().square().sum().backward()
    return [out.detach()[:end], rows.grad[:end], weights.grad[:end], gate_up.grad, down.grad]  # type: ignore[index,list-item]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "width"), [(32, 33), (32, 100), (34, 32), (7, 5), (32, 32)])
@pytest.mark.parametrize("late", [False, True])
def test_any_width_is_computed(dtype: torch.dtype, hidden: int, width: int, late: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(24, hidden, generator=draw)
    rows[OFFSETS[-1] :] = torch.nan  # nobody may read it
    tensors = [
        rows.to(dtype),
        torch.rand(24, generator=draw),
        (torch.randn(3, hidden, 2 * width, generator=draw) / hidden**0.5).to(dtype),
        (torch.randn(3, width, hidden, generator=draw) / width**0.5).to(dtype),
    ]
    found = passed(GroupedExperts(), tensors, late=late)
    for one, other in zip(found, passed(LoopExperts(), tensors)):
        assert (one - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


def test_the_gated_product_and_its_gradient_are_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_BLOCK", 30)  # three rows: blocks of rows, and a rest
    gate_up, weights = torch.randn(20, 20, requires_grad=True), torch.rand(20, requires_grad=True)
    gate, up = gate_up.chunk(2, dim=-1)
    plain, grad = F.silu(gate) * up * weights.unsqueeze(-1), torch.randn(20, 10)
    ours = gated_activation(gate_up, weights)
    torch.testing.assert_close(ours, plain)
    for found, expected in zip(*(torch.autograd.grad(y, (gate_up, weights), grad) for y in (ours, plain))):
        torch.testing.assert_close(found, expected)


def test_rows_of_bf16_are_padded_on_a_cpu() -> None:
    alignment = {
        (dtype, device): resolve_alignment("auto", dtype=dtype, device_type=device)
        for dtype in (torch.float32, torch.bfloat16)
        for device in ("cpu", "cuda")
    }
    assert alignment.pop((torch.bfloat16, "cpu")) == 16 and set(alignment.values()) == {1}
    assert resolve_alignment(8, dtype=torch.bfloat16, device_type="cpu") == 8


def test_a_late_gradient_is_the_sum_of_all_that_was_put_off() -> None:
    late, weight = Late(), torch.zeros(2, requires_grad=True)
    for _ in range(2):  # nothing of one backward pass is left in the next
        late.put_off(lambda: torch.tensor([1.0, 2.0]), weight)
        late.put_off(lambda: torch.tensor([10.0, 20.0]), weight)
        assert late.compute().tolist() == [11.0, 22.0]
