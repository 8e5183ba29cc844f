"""Hooks around the parts of a unit: when each was computed, in both passes, and a sleep in its place if asked for.

    attention, attention_before, feed_forward, router, experts, weight_gradients, shared, shared_up, shared_down

The hooks replace bound methods on the instances and are taken away by `close`. In forward a part is what happens
between its call and its return. In backward it is what autograd does between two markers: the one on the part's output,
which is reached first, and the one on its inputs, which has all their gradients when it is reached.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.fusion.late import Late
from sidestream.model.block import DenseBlock, MoEUnit
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.moe import LateWeights, MoE
from sidestream.routing.router import Routed

ASLEEP = (
    "attention",
    "attention_before",
    "feed_forward",
    "experts",
    "weight_gradients",
    "shared",
    "shared_up",
    "shared_down",
)
"""Parts that `compute=sleep` puts to sleep. The router keeps deciding."""
FENCE = "unit"

Key = tuple[int, str, int]
"""Unit, name, and how many of that name the unit had before in this run."""


@dataclass(frozen=True)
class PartSpan:
    """One part in one pass. Times in `time.monotonic()` seconds."""

    key: Key
    backward: bool
    begin: float
    end: float

    @property
    def name(self) -> str:
        return self.key[1]


@dataclass
class Recorded:
    """What a part computed, so that a sleep can stand in for it.

    Attributes:
        output: Its result.
        gradients: Of its inputs.
        seconds: Forward and backward.
    """

    output: Tensor | None = None
    gradients: tuple[Tensor | None, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass
class Tracer:
    """Collects the spans of one run.

    Attributes:
        parts: In the order in which they ended.
        fences: Moments at which a unit's forward ended, or its backward began: (time, backward).
        recorded: Filled while `recording`; read by parts that sleep.
        asleep: Sleep in place of the parts in `ASLEEP`.
        profiling: Also tell torch's profiler.
    """

    parts: list[PartSpan] = field(default_factory=list)
    fences: list[tuple[float, bool]] = field(default_factory=list)
    recorded: dict[Key, Recorded] = field(default_factory=dict)
    recording: bool = False
    asleep: bool = False
    profiling: bool = False
    _count: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))

    def begin_run(self) -> None:
        """Before a forward pass: parts are counted anew."""
        self._count.clear()

    def begin_pass(self) -> None:
        """Forget the spans so far."""
        self.parts, self.fences = [], []

    def part(self, unit: int, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call a part on its tensors."""
        here = _Part(self, name, self._key(unit, name))
        if self.asleep and name in ASLEEP:
            return _Asleep.apply(here, *inputs)
        inputs = _Enter.apply(here, *inputs)
        output = call(*inputs)
        here.leave(backward=False)
        if self.recording:
            self.recorded[here.key] = Recorded(output.detach())
        return _Leave.apply(here, output)

    def _key(self, unit: int, name: str) -> Key:
        number = self._count[unit, name]
        self._count[unit, name] += 1
        return unit, name, number


class _Part:
    """One call of a part."""

    def __init__(self, tracer: Tracer, name: str, key: Key) -> None:
        self.tracer, self.name, self.key = tracer, name, key
        self._begin = 0.0
        self._profiled: Any = None

    def enter(self, *, backward: bool) -> None:
        if self.tracer.profiling:
            self._profiled = torch.profiler.record_function(self.name + (" backward" if backward else ""))
            self._profiled.__enter__()
        self._begin = time.monotonic()

    def leave(self, *, backward: bool) -> None:
        self.tracer.parts.append(PartSpan(self.key, backward, self._begin, time.monotonic()))
        if self._profiled is not None:
            self._profiled.__exit__(None, None, None)
            self._profiled = None

    def sleep(self, *, backward: bool) -> None:
        self.enter(backward=backward)
        rest = self.tracer.recorded[self.key].seconds[backward] - (time.monotonic() - self._begin)
        time.sleep(max(0.0, rest))
        self.leave(backward=backward)


class _Enter(torch.autograd.Function):
    """Identity on the inputs of a part: begins it in forward, ends it in backward."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.part = part
        ctx.set_materialize_grads(False)
        part.enter(backward=False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.part.leave(backward=True)
        if ctx.part.tracer.recording:
            ctx.part.tracer.recorded[ctx.part.key].gradients = grads
        return None, *grads


class _Leave(torch.autograd.Function):
    """Identity on the output of a part: begins it in backward."""

    @staticmethod
    def forward(ctx: Any, part: _Part, output: Tensor) -> Tensor:
        ctx.part = part
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.part.enter(backward=True)
        return None, grad


class _Asleep(torch.autograd.Function):
    """Sleeps as long as the part took; the results are those that it had."""

    @staticmethod
    def forward(ctx: Any, part: _Part, *inputs: Tensor) -> Tensor:
        ctx.part, ctx.like = part, [x.new_empty(()).expand(x.shape) for x in inputs]
        part.sleep(backward=False)
        output = part.tracer.recorded[part.key].output
        assert output is not None
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ctx.part.sleep(backward=True)
        gradients = ctx.part.tracer.recorded[ctx.part.key].gradients
        # Beyond them: weights whose gradients sleep elsewhere. Backward goes there only with a gradient.
        return None, *gradients, *ctx.like[len(gradients) :]


class _Fence(torch.autograd.Function):
    """Identity on the output of a unit: its forward has ended; in backward, it begins."""

    @staticmethod
    def forward(ctx: Any, tracer: Tracer, output: Tensor) -> Tensor:
        ctx.tracer = tracer
        tracer.fences.append((time.monotonic(), False))
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.tracer.fences.append((time.monotonic(), True))
        return None, grad


class Hooks:
    """Puts the hooks on blocks; `close` takes them away.

    Args:
        blocks: Units, and dense blocks that run on their own; the block that a unit runs comes with it.
        tracer: Where spans go.
    """

    def __init__(self, blocks: Sequence[MoEUnit | DenseBlock], tracer: Tracer) -> None:
        self._tracer = tracer
        self._replaced: list[tuple[Any, str]] = []
        for number, block in enumerate(blocks):
            self._tensor_part(number, block, "attention", "attention")
            if isinstance(block, DenseBlock):
                self._tensor_part(number, block, "feed_forward", "feed_forward")
                continue
            if block.before is not None:
                self._tensor_part(number, block.before, "attention", "attention_before")
                self._tensor_part(number, block.before, "feed_forward", "feed_forward")
            self._unit(number, block)

    def close(self) -> None:
        for owner, attribute in self._replaced:
            delattr(owner, attribute)
        self._replaced.clear()

    def _replace(self, owner: Any, attribute: str, function: Callable[..., Any]) -> None:
        setattr(owner, attribute, function)
        self._replaced.append((owner, attribute))

    def _tensor_part(self, unit: int, owner: Any, method: str, name: str) -> None:
        """A method whose first argument is a tensor; further tensors are only read."""
        original = getattr(owner, method)

        def call(x: Tensor, *rest: Any) -> Tensor:
            return self._tracer.part(unit, name, lambda x: original(x, *rest), x)

        self._replace(owner, method, call)

    def _unit(self, number: int, unit: MoEUnit) -> None:
        moe, forward = unit.moe, unit.forward
        self._replace(unit, "forward", lambda h, context: _Fence.apply(self._tracer, forward(h, context)))
        self._replace(moe, "route", self._route(number, moe))
        self._replace(moe.experts, "forward", self._experts(number, moe))
        self._replace(moe.experts, "late_weights", self._late_weights(number, moe))
        if moe.shared_expert is not None:
            self._tensor_part(number, moe, "shared", "shared")
            self._tensor_part(number, moe, "shared_up", "shared_up")
            down = moe.shared_down
            self._replace(
                moe, "shared_down", lambda i, x: self._tracer.part(number, "shared_down", down, i, x)
            )

    def _route(self, number: int, moe: MoE) -> Callable[..., Routed]:
        original = moe.route

        def route(x: Tensor, context: TokenContext = PLAIN, *, avoid: Tensor | None = None) -> Routed:
            routed: list[Routed] = []

            def weights(x: Tensor) -> Tensor:
                routed.append(original(x, context, avoid=avoid))
                return routed[0].decision.routing.weights

            chosen = self._tracer.part(number, "router", weights, x)
            decision = routed[0].decision
            routing = replace(decision.routing, weights=chosen)
            # The rows bypass the markers: in backward they are there only after the reverse dispatch.
            rows = x.reshape(-1, x.shape[-1]).to(routed[0].x_TH.dtype)
            return replace(routed[0], x_TH=rows, decision=replace(decision, routing=routing))

        return route

    def _experts(self, number: int, moe: MoE) -> Callable[..., Tensor]:
        original = moe.experts.forward

        def forward(received: Any, late: LateWeights | None = None) -> Tensor:
            def call(rows: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
                return original(replace(received, rows=rows, row_weights=weights), late)

            inputs: tuple[Tensor, ...] = (received.rows, received.row_weights)
            if late is not None and self._tracer.asleep:
                inputs += late.weights[:1]  # so that backward passes by where the weight gradients sleep
            return self._tracer.part(number, "experts", call, *inputs)

        return forward

    def _late_weights(self, number: int, moe: MoE) -> Callable[..., LateWeights]:
        original, tracer = moe.experts.late_weights, self._tracer

        def late_weights(dtype: torch.dtype) -> LateWeights:
            part = _Part(tracer, "weight_gradients", tracer._key(number, "weight_gradients"))
            if tracer.asleep:
                token = _SleepLater.apply(part, moe.experts.w_gate_up)
                return LateWeights((token, token), (Late(), Late()))
            late = original(dtype)
            _time_both(part, late)
            return late

        return late_weights


class _SleepLater(torch.autograd.Function):
    """In place of the weights: sleeps where autograd would compute their gradients."""

    @staticmethod
    def forward(ctx: Any, part: _Part, weight: Tensor) -> Tensor:
        ctx.part = part
        return torch.empty((), device=weight.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:  # type: ignore[override]
        ctx.part.sleep(backward=True)
        return None, None


def _time_both(part: _Part, late: LateWeights) -> None:
    """Make one part of the two gradients: it begins with the first and ends with the second."""
    todo = len(late.gradients)
    for gradient in late.gradients:
        compute = gradient.compute

        def timed(compute: Callable[[], Tensor] = compute) -> Tensor:
            nonlocal todo
            if todo == len(late.gradients):
                part.enter(backward=True)
            value = compute()
            todo -= 1
            if todo == 0:
                part.leave(backward=True)
                if part.tracer.recording:
                    part.tracer.recorded[part.key] = Recorded()
            return value

        gradient.compute = timed  # type: ignore[method-assign]
