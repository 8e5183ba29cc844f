"""The parts of a unit: when each was computed, in both passes, and a sleep in its place if asked for.

    attention, attention_before, feed_forward, router, experts, weight_gradients, shared, shared_up, shared_down

The parts report themselves, see `overlap.recorder`. In forward a part is what happens between its call and its return.
In backward it is what autograd does between two markers: the one on the part's output, which is reached first, and the
one on its inputs, which has all their gradients when it is reached.
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

from sidestream.dispatch.base import Received
from sidestream.fusion.late import Late
from sidestream.model.block import DenseBlock, MoEUnit
from sidestream.model.moe import LateWeights
from sidestream.overlap.recorder import SILENT, Recorder
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
        gradients: The gradients of its inputs.
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


class Listening:
    """Lets blocks report to a tracer; `close` makes them silent again.

    Args:
        blocks: Units, and dense blocks that run on their own; the block that a unit runs comes with it.
        tracer: Where spans go.
    """

    def __init__(self, blocks: Sequence[MoEUnit | DenseBlock], tracer: Tracer) -> None:
        self._blocks = blocks
        for number, block in enumerate(blocks):
            _record(block, _UnitRecorder(tracer, number))

    def close(self) -> None:
        for block in self._blocks:
            _record(block, SILENT)


def _record(block: MoEUnit | DenseBlock, recorder: Recorder) -> None:
    if isinstance(block, MoEUnit):
        block.record(recorder)
    else:
        block.recorder = recorder


class _UnitRecorder(Recorder):
    """The spans of one unit."""

    def __init__(self, tracer: Tracer, unit: int) -> None:
        self._tracer, self._unit = tracer, unit

    def part(self, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return self._tracer.part(self._unit, name, call, *inputs)

    def router(self, call: Callable[[Tensor], Routed], x: Tensor) -> Routed:
        routed: list[Routed] = []

        def weights(x: Tensor) -> Tensor:
            routed.append(call(x))
            return routed[0].decision.routing.weights

        chosen = self.part("router", weights, x)
        decision = routed[0].decision
        routing = replace(decision.routing, weights=chosen)
        # The rows bypass the markers: in backward they are there only after the reverse dispatch.
        rows = x.reshape(-1, x.shape[-1]).to(routed[0].x_TH.dtype)
        return replace(routed[0], x_TH=rows, decision=replace(decision, routing=routing))

    def experts(self, call: Callable[[Received, Any], Tensor], received: Received, late: Any) -> Tensor:
        def on_rows(rows: Tensor, weights: Tensor, *_: Tensor) -> Tensor:
            return call(replace(received, rows=rows, row_weights=weights), late)

        inputs: tuple[Tensor, ...] = (received.rows, received.row_weights)
        if late is not None and self._tracer.asleep:
            inputs += late.weights[:1]  # so that backward passes by where the weight gradients sleep
        return self.part("experts", on_rows, *inputs)

    def late_weights(
        self, call: Callable[[torch.dtype], LateWeights], dtype: torch.dtype, parameter: Tensor
    ) -> LateWeights:
        name = "weight_gradients"
        part = _Part(self._tracer, name, self._tracer._key(self._unit, name))
        if self._tracer.asleep:
            token = _SleepLater.apply(part, parameter)
            return LateWeights((token, token), (Late(), Late()))
        late = call(dtype)
        _time_both(part, late)
        return late

    def unit(self, output: Tensor) -> Tensor:
        return _Fence.apply(self._tracer, output)


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

    def timed(compute: Callable[[], Tensor]) -> Tensor:
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

    for gradient in late.gradients:
        gradient.around = timed
