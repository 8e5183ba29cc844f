"""Shared and routed experts side by side, by numbers worked out by hand.

A unit whose attention adds nothing, whose shared expert doubles and whose routed experts triple (H = 1).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from sidestream.dispatch.base import Dispatcher, Received
from sidestream.model.context import PLAIN
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.path import RoutedPath
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.routing.router import Decision, Routed
from tests.core.build_tiny import parallel_for
from tests.core.scale_experts import routing_of, scale_rows, wire
from tests.rank_pool import ranks

TOKENS = 6
SCHEDULES: dict[str, Callable[..., Any]] = {
    "shared_expert": SharedExpertOverlap,
    "chunked": ChunkedOverlap,
    "two_batch": TwoBatchOverlap,
    "shortcut": partial(ShortcutOverlap, tap="pos1", tap_norm=False, slot=1),
    "shortcut_last": partial(ShortcutOverlap, tap="pos1", tap_norm=False, slot=2),
}


class Work(Function):
    """Times a factor, in both passes after a random pause, as if it had been a while under way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, pause: Callable[[], None]) -> Tensor:
        ctx.factor, ctx.pause = factor, pause
        pause()
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.pause()
        return grad * ctx.factor, None, None


def scale_unit(dispatcher: Dispatcher, pause: Callable[[], None]) -> Any:
    """What a schedule uses of a unit."""

    def experts(received: Received) -> Tensor:
        rows = Work.apply(received.rows, 1.0, pause)
        return scale_rows(Received(rows, received.row_weights, received.offsets), torch.tensor([3.0]))

    def route(x: Tensor, context: Any) -> Routed:
        x_TH = x.reshape(-1, 1)
        routing = routing_of([[token % 2] for token in range(len(x_TH))])  # half of the rows travel
        decision = Decision(routing, probs=torch.zeros(len(x_TH), 2), counts=torch.zeros(2))
        return Routed(x_TH, decision, torch.zeros(len(x_TH), 2), x.shape[1])

    def path(routed: Routed, **switches: bool) -> RoutedPath:
        options = {"dispatcher": dispatcher, "experts": experts, "serial": switches.get("serial", False)}
        return RoutedPath(routed.x_TH, routed.decision.routing, **options)

    moe = SimpleNamespace(
        route=route,
        path=path,
        report=lambda *parts: None,
        routed_path=lambda x, context: path(route(x, context)),
        shared=lambda x: Work.apply(x, 2.0, pause),
        shared_up=lambda x: Work.apply(x, 1.0, pause),
        shared_down=lambda inner, x: Work.apply(inner, 2.0, pause),
        shared_expert=object(),
    )
    return SimpleNamespace(
        attention=lambda h, context: Work.apply(h, 0.0, pause),
        norm=lambda x: x,
        dropout=lambda x: x,
        moe=moe,
        before=None,
        extra={},
        training=True,
    )


def run(
    rank: int, world: int, make: Callable[[], Any], *, whole: bool, repeat: int = 1, pause_s: float = 0.0
) -> list[tuple[Tensor, Tensor]]:
    """What the unit adds to `x`, and the gradient of its sum, each time on the same whole or fractional numbers."""
    dispatcher: Any = wire("deep_ep", num_experts=2, group=parallel_for(world).ep_group, top_k=1)
    draw = random.Random(rank)

    def pause(tag: str = "") -> None:
        if pause_s:
            time.sleep(pause_s * draw.random() ** 3)

    dispatcher.channel.on_start = pause
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(2, TOKENS // 2, 1, generator=generator)
    if whole:
        values = torch.arange(1.0, TOKENS + 1).view_as(values) + 10 * rank
    results = []
    for _ in range(repeat):
        x = values.clone().requires_grad_()
        added = make()(scale_unit(dispatcher, pause), x, PLAIN) - x
        added.sum().backward()
        results.append((added.detach(), x.grad))
    dispatcher.close()
    return results


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.full
def test_shared_and_routed_add_5x_with_gradient_5_a_hundred_times(name: str) -> None:
    for rank, results in enumerate(
        ranks(2).run(run, make=SCHEDULES[name], whole=True, repeat=100, pause_s=0.0005)
    ):
        expected = 5 * (torch.arange(1.0, TOKENS + 1) + 10 * rank)
        for added, grad in results:
            assert torch.equal(added.flatten(), expected)
            assert torch.equal(grad.flatten(), torch.full((TOKENS,), 5.0))


@pytest.mark.parametrize("name", SCHEDULES)
def test_overlap_on_and_off_are_bitwise_equal(name: str) -> None:
    makes = (SCHEDULES[name], partial(SCHEDULES[name], enabled=False))
    on, off = (ranks(2).run(run, make=make, whole=False, pause_s=0.02) for make in makes)
    for ((added, grad),), ((added_off, grad_off),) in zip(on, off):
        assert torch.equal(added, added_off) and torch.equal(grad, grad_off)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, TOKENS, TOKENS + 2])
def test_chunks_change_no_sum(num_chunks: int) -> None:
    """Row by row nothing depends on the cut; chunks without tokens travel as well."""
    make = partial(ChunkedOverlap, num_chunks=num_chunks)
    chunked, plain = (ranks(2).run(run, make=m, whole=False) for m in (make, NoOverlap))
    for ((added, grad),), ((added_plain, grad_plain),) in zip(chunked, plain):
        assert torch.equal(added, added_plain) and torch.equal(grad, grad_plain)
