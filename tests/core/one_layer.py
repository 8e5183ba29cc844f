"""One routed layer: dispatch, experts, combine, with NaN wherever nobody may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sidestream.dispatch.base import Dispatcher, Plan, Received, Routing
from sidestream.fusion.grouped import GroupedExperts
from tests.core.poison import NAN, poison_rows, poison_tail

EXPERTS = GroupedExperts()


def run_layer(
    dispatcher: Dispatcher,
    x: Tensor,
    routing: Routing,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    layer: int = 0,
    tail: float = NAN,
    look: Callable[[Plan, Received], None] = lambda plan, received: None,
) -> Tensor:
    """`[T, H]` -> `[T, H]`. `look` sees the plan and what the experts get; `tail` is in rows nobody may read."""
    plan = dispatcher.plan(routing, layer=layer)
    received = dispatcher.dispatch(x, plan).wait()
    look(plan, received)
    out = EXPERTS(poison_tail(received, tail), w_gate_up, w_down)
    return dispatcher.combine(poison_rows(out, received.offsets, tail), plan).wait()


def check_received(received: Received, *, alignment: int, num_slots: int) -> None:
    """What every dispatcher promises about the rows it hands to the experts."""
    rows, weights, offsets = received.rows, received.row_weights, received.offsets
    assert rows.is_contiguous() and rows.shape[0] == weights.shape[0] == num_slots
    assert weights.dtype == torch.float32 and offsets.dtype == torch.int32
    ends: list[Any] = offsets.tolist()
    assert all(end % alignment == 0 for end in ends) and ends == sorted(ends) and ends[-1] <= num_slots
    assert received.host_offsets in (None, ends)
    assert not received.exact or ends[-1] == num_slots
    padding = weights[: ends[-1]] == 0  # no test routes with a weight of zero
    assert rows[: ends[-1]][padding].count_nonzero() == 0
    assert rows[: ends[-1]].isfinite().all() and weights[: ends[-1]].isfinite().all()
