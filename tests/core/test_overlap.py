"""Overlap is possible: work between start and finish hides a transfer, in forward and in backward."""

from functools import partial

import pytest
import torch
from torch.autograd import Function

from sidestream.dispatch.base import Received
from sidestream.exchange import link, ops
from sidestream.exchange.link import ThrottledLink
from sidestream.exchange.ops import Channel
from sidestream.exchange.transfer import Transfer
from sidestream.overlap.fork import fork
from sidestream.overlap.path import RoutedPath
from sidestream.routing.router import SoftmaxRouter
from tests.clock import virtual_time
from tests.core.build_tiny import parallel_for
from tests.core.scale_experts import scale_rows, wire
from tests.rank_pool import ranks


class _Work(Function):
    """Identity that calls `action(name)` in both passes, as compute that takes part in the graph."""

    @staticmethod
    def forward(ctx, x, action, name):
        ctx.action, ctx.name = action, name
        action(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.action(ctx.name)
        return grad, None, None


# Time.

TRANSFER_S, WORK_S = 0.05, 0.06


def measure(rank, world, overlapped):
    """Seconds of forward and of backward, and of the waits, by a clock that only sleeping moves on."""
    with virtual_time(link, ops) as clock:
        # The rate is out of the way: a transfer takes its latency.
        channel = Channel(parallel_for(world).ep_group, ThrottledLink(gbps=1e9, latency_us=TRANSFER_S * 1e6))
        channel.spans = []
        counts = torch.full((world,), 8)
        x, h = torch.ones(8 * world, 4, requires_grad=True), torch.ones(1, requires_grad=True)
        transfer = Transfer(channel, counts, counts, "rows")
        work = partial(_Work.apply, h, lambda _: clock.sleep(WORK_S), "work")
        began = clock.now
        if overlapped:
            token = transfer.start(x, num_received=8 * world)
            y = work()
            rows = transfer.finish(token)
        else:
            rows = transfer.finish(transfer.start(x, num_received=8 * world))
            y = work()
        loss = rows.sum() + y.sum()
        forward, began = clock.now - began, clock.now
        loss.backward()
        backward = clock.now - began
    waits = {span.tag: span.completed - span.wait_began for span in channel.spans}
    channel.close()
    return forward, backward, waits


def test_work_hides_a_slow_transfer_in_both_passes():
    for *serial, _ in ranks(2).run(measure, overlapped=False):
        assert serial == pytest.approx([TRANSFER_S + WORK_S] * 2, abs=1e-6)
    for *hidden, _ in ranks(2).run(measure, overlapped=True):
        assert hidden == pytest.approx([max(TRANSFER_S, WORK_S)] * 2, abs=1e-6)


def test_waiting_costs_only_what_is_left():
    for *_, waits in ranks(2).run(measure, overlapped=True):
        assert waits == pytest.approx({"rows": 0.0, "rows.backward": 0.0}, abs=1e-6)
    for *_, waits in ranks(2).run(measure, overlapped=False):
        assert waits == pytest.approx({"rows": TRANSFER_S, "rows.backward": TRANSFER_S}, abs=1e-6)


# Order.


def log_schedule(rank, world, schedule):
    """What happens in forward and in backward, under a schedule written against `RoutedPath`."""
    parallel = parallel_for(world)
    dispatcher = wire("alltoall", num_experts=2, group=parallel.ep_group)
    log = []
    dispatcher.channel.on_start = lambda tag: log.append(f"start {tag}")
    dispatcher.channel.on_wait = lambda tag: log.append(f"wait {tag}")
    generator = torch.Generator().manual_seed(rank)
    h = torch.randn(6, 1, generator=generator).requires_grad_()
    logits = torch.randn(6, 2, generator=generator).requires_grad_()
    scales = torch.tensor([[2.0], [3.0]])[rank].requires_grad_()

    def experts(received):
        rows = _Work.apply(received.rows, log.append, "experts")
        return scale_rows(Received(rows, received.row_weights, received.offsets), scales)

    def make_path(tap):
        return RoutedPath(tap, SoftmaxRouter(top_k=2)(logits).routing, dispatcher=dispatcher, experts=experts)

    y = schedule(h, make_path, lambda name, x: _Work.apply(x, log.append, name))
    forward = list(log)
    log.clear()
    y.square().sum().backward()
    dispatcher.close()
    return forward, list(log), [y.detach(), h.grad, logits.grad, scales.grad]


def shortcut(h, make_path, work):
    tap, h, residual = fork(h, 3)
    path = make_path(tap)
    path.start("dispatch")
    a = residual + work("attention", h)
    path.finish("dispatch")
    path.run("experts")
    path.start("combine")
    a, current = fork(a, 2)
    s = work("shared", current)
    return a + s + path.finish("combine")


def shortcut_serial(h, make_path, work):
    tap, h, residual = fork(h, 3)
    path = make_path(tap)
    path.start("dispatch")
    path.finish("dispatch")
    a = residual + work("attention", h)
    path.run("experts")
    path.start("combine")
    routed = path.finish("combine")
    a, current = fork(a, 2)
    s = work("shared", current)
    return a + s + routed


FORWARD = """start dispatch.counts, wait dispatch.counts, start dispatch.routes, start dispatch, attention,
wait dispatch.routes, wait dispatch, experts, start combine, shared, wait combine"""
BACKWARD = """start combine.backward, shared, wait combine.backward, experts, start dispatch.backward,
start dispatch.routes.backward, attention, wait dispatch.backward, wait dispatch.routes.backward"""


def test_backward_mirrors_the_order_of_forward():
    for forward, backward, _ in ranks(2).run(log_schedule, schedule=shortcut):
        assert forward == FORWARD.replace("\n", " ").split(", ")
        assert backward == BACKWARD.replace("\n", " ").split(", ")


def test_a_serial_schedule_hides_nothing():
    for forward, backward, _ in ranks(2).run(log_schedule, schedule=shortcut_serial):
        assert forward.index("wait dispatch") < forward.index("attention") < forward.index("experts")
        assert backward.index("wait combine.backward") == backward.index("start combine.backward") + 1
        assert backward.index("attention") < backward.index("start dispatch.backward")


def test_overlapped_equals_serial_bit_for_bit():
    overlapped, serial = (ranks(2).run(log_schedule, schedule=s) for s in (shortcut, shortcut_serial))
    for (*_, one), (*_, other) in zip(overlapped, serial):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("run", "experts")], "experts run out of order"),
        ([("start", "combine")], "combine started out of order"),
        ([("finish", "dispatch")], "dispatch finished out of order"),
        ([("start", "dispatch"), ("start", "dispatch")], "dispatch started out of order"),
    ],
)
def test_stages_out_of_order_are_refused(calls, message):
    dispatcher = wire("local", num_experts=2)
    routing = SoftmaxRouter(top_k=1)(torch.zeros(2, 2)).routing
    path = RoutedPath(
        torch.ones(2, 1), routing, dispatcher=dispatcher, experts=lambda received: received.rows
    )
    *before, (method, stage) = calls
    for earlier, its_stage in before:
        getattr(path, earlier)(its_stage)
    with pytest.raises(AssertionError, match=message):
        getattr(path, method)(stage)
