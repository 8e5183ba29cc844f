"""The differentiable library call: asynchronous in forward and in backward, as `transfer.py` is for rows of our own.

    tokens = call.start(x, weights)        the library is called        backward: waits for the reverse call
    ...compute...                          hides it
    rows, row_weights = call.finish(tokens)                             backward: makes the reverse call

Under it are two operators, so that logs, spans, fault injection and recordings see a library's calls where they see
everything else: `sidestream::call_` makes a registered call, `sidestream::wait_call_` waits for it. All calls of a
dispatcher run on one lane: on CUDA a stream of its own, elsewhere at once.

Libraries keep raw pointers. Every tensor that a call read or wrote stays alive until its wait.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.exchange.ops import Channel, Span, new_ticket
from sidestream.launch import phase

CallFn = Callable[[list[Tensor], list[Tensor]], Any]
"""`fn(outs, ins)` fills `outs`, or gives them memory with `adopt`. What it returns stays alive until the wait."""


class Lane(Protocol):
    """Where calls run, one after another."""

    @property
    def handle(self) -> Any:
        """What a library takes as its `stream` argument."""
        ...

    def launch(self, run: Callable[[], None]) -> Any:
        """Run behind everything that the caller's stream has so far; return what `join` waits for."""
        ...

    def join(self, event: Any, outs: Sequence[Tensor]) -> None:
        """Let the caller's stream wait; afterwards it may use `outs`."""
        ...

    def synchronize(self) -> None:
        """Block the host until everything has run."""
        ...


class HostLane:
    """Runs calls at once."""

    handle = 0

    def launch(self, run: Callable[[], None]) -> None:
        run()

    def join(self, event: None, outs: Sequence[Tensor]) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaLane:
    """A CUDA stream. The caller's stream and this one wait for each other through events; the host never does."""

    def __init__(self, device: torch.device) -> None:
        # Of high priority: a transfer's few blocks are scheduled before those of the compute they hide behind.
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)

    @property
    def handle(self) -> int:
        return self.stream.cuda_stream

    def launch(self, run: Callable[[], None]) -> torch.cuda.Event:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            run()
            event = torch.cuda.Event()
            event.record(self.stream)
        return event

    def join(self, event: torch.cuda.Event, outs: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(event)
        for out in outs:
            # A library allocates its results on the lane; inputs need none of this: they live until the wait.
            out.record_stream(current)

    def synchronize(self) -> None:
        self.stream.synchronize()


def lane_for(device: torch.device) -> Lane:
    """A lane of the device's kind."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


@dataclass
class _Flight:
    outs: list[Tensor]
    ins: list[Tensor]
    tag: str
    issued: float
    kept: Any = None
    event: Any = None


@dataclass(eq=False)
class CallChannel(Channel):
    """A channel for library calls, and for what the dispatcher itself exchanges beside them."""

    lane: Lane = field(default_factory=HostLane)
    _calls: dict[int, _Flight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _channels[self.id] = self

    @property
    def pending(self) -> int:
        return super().pending + len(self._calls)

    def close(self) -> None:
        assert not self._calls, f"{len(self._calls)} calls were started and never waited for"
        super().close()
        _channels.pop(self.id, None)


class Registered:
    """A function that `call_` finds by number, for as long as this object lives. A recording must keep it."""

    def __init__(self, fn: CallFn) -> None:
        self.id = next(_fn_ids)
        _fns[self.id] = fn
        _registered[self.id] = self
        weakref.finalize(self, _fns.pop, self.id, None).atexit = False


_channels: dict[int, CallChannel] = {}
_fns: dict[int, CallFn] = {}
_registered: weakref.WeakValueDictionary[int, Registered] = weakref.WeakValueDictionary()
_fn_ids = itertools.count()


def registered(call: int) -> Registered:
    """The object behind a number, to be kept by what will make the call again."""
    return _registered[call]


def adopt(out: Tensor, result: Tensor) -> None:
    """Let an empty `out` take the memory of what a library allocated; fill it if it has memory already.

    A recording that repeats a call with the same `out` gets the result in the place where its readers look.
    """
    if out.numel():
        out.copy_(result)
    else:
        out.set_(result)  # type: ignore[call-overload]


_library = torch.library.Library("sidestream", "FRAGMENT")
_library.define(
    "call_(Tensor(a!)[] outs, Tensor[] ins, int channel, int call, int ticket, str tag) -> ()",
)
_library.define("wait_call_(Tensor(a!)[] outs, int channel, int ticket) -> ()")


@torch.library.impl(_library, "call_", "CompositeExplicitAutograd")
def _call(outs: list[Tensor], ins: list[Tensor], channel: int, call: int, ticket: int, tag: str) -> None:
    """Make a registered call on the channel's lane. `outs` may be read after `wait_call_` with the same ticket.

    Args:
        outs: Caller-owned; empty ones get the memory of what the library allocates.
        ins: Must not change before the wait.
        channel: `CallChannel.id`.
        call: `Registered.id`.
        ticket: From `new_ticket()`.
        tag: Name for spans and logs. Spans of calls have no bytes: libraries do not say.
    """
    ch, fn = _channels[channel], _fns[call]
    if ch.on_start is not None:
        ch.on_start(tag)
    phase.beat(tag)
    flight = _Flight(outs, ins, tag, time.monotonic())

    def run() -> None:
        flight.kept = fn(outs, ins)

    flight.event = ch.lane.launch(run)
    ch._calls[ticket] = flight


@torch.library.impl(_library, "wait_call_", "CompositeExplicitAutograd")
def _wait_call(outs: list[Tensor], channel: int, ticket: int) -> None:
    """Wait for the call with this ticket: on CUDA the current stream does, not the host."""
    ch = _channels[channel]
    flight = ch._calls[ticket]
    wait_began = time.monotonic()
    if ch.on_wait is not None:
        ch.on_wait(flight.tag)
    ch.lane.join(flight.event, flight.outs)
    del ch._calls[ticket]  # only now may the tensors die
    if ch.spans is not None:
        ch.spans.append(Span(flight.tag, flight.issued, wait_began, time.monotonic(), 0, 0))


@torch.library.register_fake("sidestream::call_", lib=_library)
def _call_fake(outs, ins, channel, call, ticket, tag):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sidestream::wait_call_", lib=_library)
def _wait_call_fake(outs, channel, ticket):  # type: ignore[no-untyped-def]
    return None


call_ = torch.ops.sidestream.call_.default
wait_call_ = torch.ops.sidestream.wait_call_.default


class _OneWay:
    """One direction of a call: made once, waited for once."""

    def __init__(
        self, channel: CallChannel, tag: str, fn: CallFn, make_outs: Callable[[], list[Tensor]]
    ) -> None:
        self._channel, self._tag, self._fn, self._make_outs = channel, tag, Registered(fn), make_outs
        self._ticket, self._outs = -1, []  # type: tuple[int, list[Tensor]]

    def launch(self, ins: Sequence[Tensor]) -> list[Tensor]:
        assert not self._outs, f"{self._tag}: made twice"
        self._ticket, self._outs = new_ticket(), self._make_outs()
        call_(self._outs, list(ins), self._channel.id, self._fn.id, self._ticket, self._tag)
        return self._outs

    def join(self) -> list[Tensor]:
        outs, self._outs = self._outs, []
        wait_call_(outs, self._channel.id, self._ticket)
        return outs


class Call:
    """A library call with its reverse. One use.

    Args:
        channel: The dispatcher's channel.
        tag: Name in spans and order logs; the reverse call is `tag + ".backward"`.
        forward: The call, from inputs (differentiable ones first) to outputs (differentiable ones first).
        outs: Makes the outputs of `forward`, with memory or empty.
        num_differentiable: Outputs of `forward` that have a gradient; the others are in `extras` after `finish`.
        backward: The reverse call, from gradients of the outputs to gradients of the inputs; None: has none.
        grads: Makes the outputs of `backward`. Their shapes after the call must be those of the inputs.
        done: Called when the reverse call has been waited for.
        again: Places of inputs that the reverse call reads once more, behind the gradients of the outputs. Nobody
            may write them in between.
    """

    def __init__(
        self,
        channel: CallChannel,
        tag: str,
        *,
        forward: CallFn,
        outs: Callable[[], list[Tensor]],
        num_differentiable: int = 1,
        backward: CallFn | None = None,
        grads: Callable[[], list[Tensor]] = list,
        done: Callable[[], None] = lambda: None,
        again: Sequence[int] = (),
    ) -> None:
        self.forward = _OneWay(channel, tag, forward, outs)
        self.backward = None if backward is None else _OneWay(channel, f"{tag}.backward", backward, grads)
        self.num_differentiable, self.done, self.again = num_differentiable, done, again
        self.extras: list[Tensor] = []
        self.kept: list[Tensor] = []

    def start(self, *ins: Tensor, extra: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Call; return the tokens to give to `finish`. `extra` inputs follow `ins` and have no gradient."""
        return _Start.apply(self, tuple(extra), *ins)

    def finish(self, tokens: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Wait; return the differentiable outputs."""
        return _Wait.apply(self, *tokens)

    def launch(self, *ins: Tensor) -> None:
        """Call without autograd."""
        self.forward.launch([x.contiguous() for x in ins])

    def join(self) -> list[Tensor]:
        """Wait for `launch`; return all outputs."""
        return self.forward.join()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, extra: tuple[Tensor, ...], *ins: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        call.kept = [ins[place].detach() for place in call.again]
        call.launch(*ins, *extra)
        # Shape of the input, no memory: see transfer.py.
        return tuple(x.new_empty(()).expand(x.shape) for x in ins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: Call = ctx.call
        assert call.backward is not None
        grads = call.backward.join()
        same = all(token.data_ptr() == grad.data_ptr() for token, grad in zip(tokens, grads))
        assert same, "a token must have one user, its wait"
        call.done()
        return None, None, *grads


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        outs = call.forward.join()
        call.extras = outs[call.num_differentiable :]
        return tuple(out.detach() for out in outs[: call.num_differentiable])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        call: Call = ctx.call
        assert call.backward is not None, "this call has no reverse"
        # What is still being filled goes back as the tokens' gradient.
        kept, call.kept = call.kept, []
        return None, *call.backward.launch([*(grad.contiguous() for grad in grads), *kept])
