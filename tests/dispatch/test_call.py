"""The differentiable library call: when calls happen, what they keep alive, and what a recording sees."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.exchange.call import (
    Call,
    CallChannel,
    CudaLane,
    Registered,
    adopt,
    call_,
    lane_for,
    wait_call_,
)
from sidestream.exchange.ops import new_ticket
from tests.dispatch.adapters import LateLane


def doubled(outs, ins):
    outs[0].copy_(2 * ins[0])


def doubling(channel, log=None, **options):
    """y = 2 x, the work as late as the lane allows; `log` gets the order of calls and of their work."""

    def late(name):
        def fn(outs, ins):
            if log is not None:
                log.append(f"{name} called")

            def work():
                if log is not None:
                    log.append(f"{name} ran")
                outs[0].copy_(2 * ins[0])

            channel.lane.stream.enqueue(work)

        return fn

    def outs():
        return [torch.full((3,), torch.nan)]

    return Call(
        channel,
        "double",
        forward=late("forward"),
        outs=outs,
        backward=late("backward"),
        grads=outs,
        **options,
    )


def late_channel():
    return CallChannel(None, lane=LateLane())


def test_both_passes_call_at_once_and_wait_late():
    channel, log = late_channel(), []
    channel.on_start = lambda tag: log.append(f"start {tag}")
    channel.on_wait = lambda tag: log.append(f"wait {tag}")
    call = doubling(channel, log, done=lambda: log.append("done"))
    x = torch.ones(3, requires_grad=True)
    before = x * 1
    before.register_hook(lambda grad: log.append("gradient"))
    tokens = call.start(before)
    assert channel.pending == 1
    log.append("compute")
    (y,) = call.finish(tokens)
    assert y.tolist() == [2.0] * 3 and channel.pending == 0
    y.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert x.grad.tolist() == [2.0, 4.0, 6.0] and channel.pending == 0
    there = ["start double", "forward called", "compute", "wait double", "forward ran"]
    back = [
        "start double.backward",
        "backward called",
        "wait double.backward",
        "backward ran",
        "done",
        "gradient",
    ]
    assert log == there + back
    channel.close()


def test_calls_in_flight_finish_in_any_order():
    channel = late_channel()
    leaves = [torch.full((3,), float(i), requires_grad=True) for i in range(3)]
    calls = [doubling(channel) for _ in leaves]
    tokens = [call.start(x * 1) for call, x in zip(calls, leaves)]
    assert channel.pending == 3
    outs = {i: calls[i].finish(tokens[i])[0] for i in (1, 2, 0)}
    assert [outs[i].tolist() for i in range(3)] == [[2.0 * i] * 3 for i in range(3)]
    sum((i + 1) * outs[i].sum() for i in range(3)).backward()
    assert [x.grad.tolist() for x in leaves] == [[2.0 * (i + 1)] * 3 for i in range(3)]


def test_a_token_has_one_user():
    call, x = doubling(late_channel()), torch.ones(3, requires_grad=True)
    (token,) = call.start(x * 1)
    (y,) = call.finish((token,))
    with pytest.raises(AssertionError, match="a token must have one user"):
        (y.sum() + token.sum()).backward()


def test_close_reports_a_call_that_nobody_waited_for():
    channel = late_channel()
    call = doubling(channel)
    call.launch(torch.ones(3))
    with pytest.raises(AssertionError, match="1 calls were started and never waited for"):
        channel.close()
    with pytest.raises(AssertionError, match="double: made twice"):
        call.launch(torch.ones(3))
    assert call.join()[0].tolist() == [2.0] * 3
    channel.close()


def test_what_a_call_sees_lives_until_its_wait_and_no_longer():
    channel, kept = late_channel(), []

    def fn(outs, ins):
        scratch = ins[0] + 1
        kept.append(StorageWeakRef(scratch.untyped_storage()))
        channel.lane.stream.enqueue(lambda: None)
        return scratch

    call = Call(channel, "keep", forward=fn, outs=lambda: [torch.empty(3)])
    x = torch.ones(3)
    seen = StorageWeakRef(x.untyped_storage())
    call.launch(x)
    del x
    assert not seen.expired() and not kept[0].expired()
    call.join()
    assert seen.expired() and kept[0].expired()


def test_a_graph_that_is_dropped_frees_its_calls():
    channel = late_channel()
    call, x = doubling(channel), torch.ones(3, requires_grad=True)
    (y,) = call.finish(call.start(x * 1))
    number = call.backward._fn.id
    ticket, out = new_ticket(), [torch.full((3,), torch.nan)]
    call_(out, [torch.ones(3)], channel.id, number, ticket, "again")  # the graph keeps it
    wait_call_(out, channel.id, ticket)
    gc.disable()  # by reference counts alone: ranks must free at the same point
    try:
        del call, y
        with pytest.raises(KeyError):
            call_(out, [torch.ones(3)], channel.id, number, new_ticket(), "gone")
    finally:
        gc.enable()


def test_an_output_takes_the_memory_of_the_library_and_a_repeated_call_fills_it():
    channel = CallChannel(None)
    results = []

    def fn(outs, ins):
        results.append(2 * ins[0])
        adopt(outs[0], results[-1][1:])

    fn_ = Registered(fn)
    out, x = torch.empty(0), torch.arange(3.0)
    for repeat in range(2):
        ticket = new_ticket()
        call_([out], [x], channel.id, fn_.id, ticket, "adopt")
        wait_call_([out], channel.id, ticket)
        assert out.tolist() == [2.0 + repeat * 2, 4.0 + repeat * 2]
        assert out.data_ptr() == results[0][1:].data_ptr()
        x += 1
    empty = torch.empty(0)
    adopt(empty, torch.empty(0, 5))
    assert empty.shape == (0, 5)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sidestream":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def test_a_recording_sees_the_calls_and_can_repeat_them():
    channel = CallChannel(None)
    call = Call(channel, "double", forward=doubled, outs=lambda: [torch.empty(3)])
    x = torch.ones(3)
    with Recorder() as recorder:
        call.launch(x)
        (out,) = call.join()
    assert [func for func, _ in recorder.seen] == [call_, wait_call_]
    assert call_._schema.arguments[0].alias_info.is_write
    x.fill_(5.0)
    for func, args in recorder.seen:
        func(*args)
    assert out.tolist() == [10.0] * 3


def test_extras_and_inputs_without_gradient():
    channel = CallChannel(None)

    def forward(outs, ins):
        outs[0].copy_(ins[0] * ins[1])
        outs[1].copy_(ins[2] + 1)

    def backward(outs, ins):
        outs[0].copy_(ins[0])
        outs[1].copy_(-ins[0])

    call = Call(
        channel,
        "two",
        forward=forward,
        outs=lambda: [torch.empty(2), torch.empty(2, dtype=torch.int64)],
        backward=backward,
        grads=lambda: [torch.empty(2), torch.empty(2)],
    )
    a, b = torch.ones(2, requires_grad=True), torch.full((2, 2), 3.0, requires_grad=True)
    tokens = call.start(a * 1, b.t()[0], extra=(torch.tensor([7, 8]),))
    assert [token.shape for token in tokens] == [(2,), (2,)]
    (y,) = call.finish(tokens)
    assert y.tolist() == [3.0, 3.0] and call.extras[0].tolist() == [8, 9]
    y.sum().backward()
    assert a.grad.tolist() == [1.0, 1.0] and b.grad.tolist() == [[-1.0, 0.0], [-1.0, 0.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs 1 CUDA device")
def test_lane_on_a_gpu_waits_for_inputs_and_is_waited_for():
    device = torch.device("cuda")
    lane = lane_for(device)
    assert isinstance(lane, CudaLane)
    channel = CallChannel(None, lane=lane)

    def slow(outs, ins):
        torch.cuda._sleep(20_000_000)
        adopt(outs[0], 2 * ins[0])  # allocated on the lane

    call = Call(
        channel,
        "slow",
        forward=slow,
        outs=lambda: [torch.empty(0, device=device)],
        backward=slow,
        grads=lambda: [torch.empty(0, device=device)],
    )
    x = torch.ones(1 << 20, device=device, requires_grad=True)
    torch.cuda._sleep(20_000_000)  # the input is late as well
    tokens = call.start(x * 3)
    noise = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(4)]  # wants freed memory
    (y,) = call.finish(tokens)
    (y * y).sum().backward()
    assert torch.equal(y, torch.full_like(y, 6.0)) and torch.equal(x.grad, torch.full_like(x, 72.0))
    assert len(noise) == 4
    channel.close()
