"""The tape on small functions: what it repeats, what it refuses, and how it uses memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.exchange.call import CallChannel, Registered, call_, wait_call_
from sidestream.exchange.ops import Channel, new_ticket, start_, wait_
from sidestream.graph.arena import ALIGNMENT, plan
from sidestream.graph.program import lifetimes, needed_entries
from sidestream.graph.tape import CaptureError, Tape, TapeBackend, observe, record

ONES = torch.ones(1, dtype=torch.int64)


def taped(fn: Callable[[], None]) -> Tape:
    """Record `fn`, whose outside memory is what it uses now."""
    return Tape(fn, observe(fn), poison=True)


def replayed(body: Callable[[Tensor], Tensor], x: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """What `body` gives for `new`, from a recording made with `x`, and as it is written."""
    static, out = x.clone(), torch.zeros_like(body(x))

    def fn() -> None:
        out.copy_(body(static))

    tape = taped(fn)
    static.copy_(new)
    tape.replay()
    return out.clone(), body(new)


BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "out variants": lambda x: (x @ x.t()).softmax(-1).sum(0) + x.mean() * 2.0 - x.cumsum(0).amax(1) / 3.0,
    "copies without one": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    )[0, 0],
    "views of views": lambda x: x.t()[1:].unsqueeze(0).expand(2, -1, -1).reshape(-1, 4)[::2],
    "in place": lambda x: x.clone().mul_(2).relu_().index_add_(0, torch.arange(2), x[:2]),
    "reserved and filled": lambda x: x.new_empty(4, 4).copy_(x).add_(x.new_zeros(4).fill_(3)),
    "several results": lambda x: torch.cat([*x.sort(dim=1), *x.topk(2, dim=0)[:1]]).sum(0),
    "casts": lambda x: (x.bfloat16() @ x.bfloat16().t()).float().double().half().to(x.dtype),
    "made of nothing": lambda x: (
        torch.full((4, 4), 0.5) + torch.ones(4) + torch.zeros(4).scatter(0, torch.arange(2), 1.0) + x
    ),
    "to be left out": lambda x: (x.exp(), x * 2)[1],
}


@pytest.mark.parametrize("name", BODIES)
def test_a_replay_computes_what_the_function_does(name: str) -> None:
    x, new = torch.randn(4, 4), torch.randn(4, 4)
    found, expected = replayed(BODIES[name], x, new)
    assert torch.equal(found, expected)


def test_forward_and_backward_with_accumulation_into_gradients() -> None:
    w, x, loss = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4), torch.zeros(())
    w.grad = torch.zeros_like(w)

    def fn() -> None:
        assert w.grad is not None
        w.grad.zero_()
        for part in x.split(4):
            value = F.silu(part @ w).pow(2).mean()
            value.backward()
            loss.copy_(value.detach())

    tape = taped(fn)
    with torch.no_grad():
        x.normal_()
        w.normal_()
    tape.replay()
    found = (loss.clone(), w.grad.clone())
    fn()
    assert torch.equal(found[0], loss) and torch.equal(found[1], w.grad)


def test_random_numbers_are_drawn_afresh_and_repeat_with_the_seed() -> None:
    """Dropout differs between replays, and equals the eager one from the same seed."""
    out = torch.zeros(3, 64)

    def fn() -> None:
        out[0].copy_(F.dropout(torch.ones(64), 0.5))
        out[1].copy_(torch.rand(64))
        out[2].uniform_()

    tape = taped(fn)
    results = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        tape.replay()
        results.append(out.clone())
    torch.manual_seed(1)
    fn()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], out)
    assert not any(torch.equal(a, b) for a, b in zip(results[1], results[2]))


def test_a_replay_holds_what_it_needs() -> None:
    """Tensors made inside die with the recording's function; their memory is the tape's."""
    out = torch.zeros(64)
    tape = taped(lambda: out.copy_(torch.arange(64.0).mul(2).add(1)))  # type: ignore[arg-type,return-value]
    garbage = [torch.full((64,), 7.0) for _ in range(100)]
    tape.replay()
    assert torch.equal(out, torch.arange(64.0) * 2 + 1) and len(garbage) == 100
    tape.close()
    with pytest.raises(AssertionError, match="closed"):
        tape.replay()


def test_an_exchange_is_issued_again_and_the_buffers_between_are_not_reused() -> None:
    channel, x, out = Channel(None), torch.randn(8, 4), torch.zeros(8, 4)
    counts, tags = torch.full((1,), 8), []
    channel.on_start = tags.append

    def fn() -> None:
        received, ticket = torch.empty(8, 4), new_ticket()
        sent = x * 2
        start_(received, sent, counts, counts, channel.id, ticket, "dispatch")
        del sent
        beside = (x + 1).exp().log()  # memory of the same size, while the rows travel
        wait_(received, channel.id, ticket)
        out.copy_(received + beside)

    tape = taped(fn)
    x.normal_()
    tape.replay()
    assert torch.allclose(out, x * 2 + (x + 1).exp().log(), equal_nan=True)
    assert tags == ["dispatch"] * 3
    channel.close()


def test_what_is_sent_lives_until_its_wait() -> None:
    """A transport may read it late: its memory must not be given to the compute that hides the transfer."""
    channel, x, out, counts = Channel(None), torch.randn(8, 4), torch.zeros(8, 4), torch.full((1,), 8)

    def fn() -> None:
        received, ticket = torch.empty(8, 4), new_ticket()
        start_(received, x * 2, counts, counts, channel.id, ticket, "dispatch")
        beside = (x + 1).exp()
        wait_(received, channel.id, ticket)
        out.copy_(received + beside)

    recording = record(fn, None)
    entries = needed_entries(recording)
    names = [entry.name for entry in entries]
    sent = entries[names.index("sidestream::start_")].leaves[1].storage
    assert lifetimes(recording, entries)[sent] == (
        names.index("sidestream::start_") - 1,
        names.index("sidestream::wait_"),
    )
    channel.close()


def test_a_draw_that_nobody_reads_still_moves_the_generator() -> None:
    out = torch.zeros(8)

    def fn() -> None:
        torch.rand(5)
        out.uniform_()

    tape = taped(fn)
    torch.manual_seed(3)
    tape.replay()
    found = out.clone()
    torch.manual_seed(3)
    fn()
    assert torch.equal(found, out)


def test_a_library_call_that_allocates_keeps_its_place() -> None:
    from sidestream.exchange.call import adopt

    channel, x, out = CallChannel(None), torch.randn(4), torch.zeros(4)

    def double(outs: list[Tensor], ins: list[Tensor]) -> None:
        adopt(outs[0], ins[0] * 2)  # as a library that owns its result

    def fn() -> None:
        call, received, ticket = Registered(double), torch.empty(0), new_ticket()
        call_([received], [x], channel.id, call.id, ticket, "dispatch")
        wait_call_([received], channel.id, ticket)
        out.copy_(received)

    tape = taped(fn)
    for _ in range(3):
        x.normal_()
        tape.replay()
        assert torch.equal(out, x * 2)
    channel.close()


# ---- Refusals


class Cached:
    """Holds a tensor that was not there when the step was observed."""

    value = torch.zeros(4)


def unjoined() -> None:
    channel, ticket = Channel(None), new_ticket()
    start_(torch.empty(1), torch.zeros(1), ONES, ONES, channel.id, ticket, "dispatch")


def shapes(x: Tensor) -> None:
    x[x > 0].sum()


STATE = torch.zeros(4)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a value is read": (lambda: STATE.sum().item(), "item (forward, 1x): host read"),
    "a size depends on values": (lambda: shapes(STATE), "data-dependent shape"),
    "memory nobody wrote": (lambda: STATE.copy_(torch.empty(4)), "never written"),
    "a number of the host": (lambda: STATE.add_(torch.tensor([1.0, 2.0, 3.0, 4.0])), "host constant"),
    "memory that moves": (lambda: torch.zeros(2).resize_(64), "moving memory"),
    "an exchange nobody waits for": (unjoined, "unjoined exchange"),
    "memory of nowhere": (lambda: STATE.add_(Cached.value), "undeclared input"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_repeat_is_refused_with_its_place(name: str) -> None:
    fn, expected = REFUSED[name]
    known = observe(fn)
    Cached.value = torch.zeros(4)  # made anew between two steps, and not copied to a fixed place
    with pytest.raises(CaptureError) as caught:
        Tape(fn, known)
    assert expected in str(caught.value)
    assert f"graph/test_tape.py:{fn.__code__.co_firstlineno}" in str(caught.value) or name in (
        "a size depends on values",
        "an exchange nobody waits for",
    )


def test_a_wait_for_an_exchange_of_an_earlier_step_is_found() -> None:
    channel, ticket, out = Channel(None), new_ticket(), torch.empty(1)
    start_(out, torch.zeros(1), ONES, ONES, channel.id, ticket, "dispatch")
    found = record(partial(wait_, out, channel.id, ticket), None).findings
    assert [(f.kind, f.what) for f in found] == [
        ("unjoined exchange", "wait_ for an exchange started earlier")
    ]
    channel.close()


def test_a_cache_that_is_there_before_is_an_input() -> None:
    table = torch.arange(4.0)
    backend, out = TapeBackend(), torch.zeros(4)
    seen = backend.warm_up(lambda: out.copy_(table), last=True)  # type: ignore[arg-type,return-value]
    tape = backend.capture(lambda: out.copy_(table), seen)  # type: ignore[arg-type,return-value]
    table.add_(1)
    tape.replay()
    assert torch.equal(out, torch.arange(4.0) + 1)


# ---- Memory


@pytest.mark.parametrize("seed", range(20))
def test_storages_that_are_needed_together_do_not_overlap(seed: int) -> None:
    draw = random.Random(seed)
    begins = [draw.randrange(60) for _ in range(80)]
    spans = {i: (b, b + draw.randrange(12)) for i, b in enumerate(begins)}
    sizes = {i: draw.choice([0, 4, 64, 100, 4096, 10_000]) for i in spans}
    found = plan(spans, sizes)
    for i, (first, last) in spans.items():
        assert found.offsets[i] % ALIGNMENT == 0 and found.offsets[i] + sizes[i] <= found.nbytes
        for j in range(i):
            together = spans[j][0] <= last and first <= spans[j][1]
            apart = (
                found.offsets[i] + sizes[i] <= found.offsets[j]
                or found.offsets[j] + sizes[j] <= found.offsets[i]
            )
            assert apart or not together
    assert found.live_peak <= found.nbytes <= 2 * found.live_peak


def test_free_places_side_by_side_are_one() -> None:
    # The third takes the place of the first two, whichever of them is given back first.
    for order in ((0, 1), (1, 0)):
        spans = {0: (0, 1 + order[0]), 1: (0, 1 + order[1]), 2: (3, 4)}
        assert plan(spans, {0: ALIGNMENT, 1: ALIGNMENT, 2: 2 * ALIGNMENT}).nbytes == 2 * ALIGNMENT


def test_a_chain_takes_the_memory_of_its_links() -> None:
    """A hundred results of 4 MB one after another: two are needed at a time."""
    x, out = torch.randn(1024, 1024), torch.zeros(1024, 1024)

    def fn() -> None:
        y = x
        for _ in range(100):
            y = y * 1.01
        out.copy_(y)

    assert taped(fn).nbytes <= 2 * 4 * 2**20 + ALIGNMENT
