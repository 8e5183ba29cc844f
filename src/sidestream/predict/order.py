"""The order of work of a schedule: its own `__call__`, on a unit that computes nothing and writes down what is asked.

The tensors are on torch's meta device: they have shapes and no values. So a schedule is written once, and a user's own
is known as well as a shipped one.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sidestream.dispatch.base import Received, Routing
from sidestream.model.context import PLAIN, TokenContext
from sidestream.overlap.path import Path, RoutedPath
from sidestream.overlap.recorder import SILENT, Recorder
from sidestream.overlap.slots import SlotSearch
from sidestream.routing.router import Decision, Routed

if TYPE_CHECKING:
    from sidestream.model.config import ModelShape
    from sidestream.overlap.base import Schedule


@dataclass(frozen=True)
class Entry:
    """One entry of a forward pass through a unit.

    Attributes:
        kind: `part` is work; `start` and `wait` are those of a transfer.
        name: attention, attention_before, feed_forward, router, experts, weight_gradients, shared, shared_up or
            shared_down; dispatch.counts, dispatch or combine.
        share: Share of the unit's tokens that it is about.
        transfer: Number of the transfer, in the order of the starts; -1 for work.
    """

    kind: Literal["part", "start", "wait"]
    name: str
    share: float = 1.0
    transfer: int = -1


def orders(
    schedule: Schedule, shape: ModelShape, *, sequences: int, seq_length: int, top_k: int, before: bool
) -> list[list[Entry]]:
    """Run a schedule on a recording unit: one order of work, or one for each slot that it may still choose.

    Args:
        before: There is a dense block in front for a schedule that reads inside it.

    Raises:
        ValueError: It does not run on tensors without values, or does not wait for what it starts.
    """

    def run(schedule: Schedule) -> list[Entry]:
        unit = _RecordingUnit(schedule, shape, tokens=sequences * seq_length, top_k=top_k, before=before)
        h = torch.empty(sequences, seq_length, shape.hidden_size)
        schedule(unit, h, replace(PLAIN, before=PLAIN if before else None))
        unit.log.check()
        return unit.log.entries

    slots = schedule.slots
    with torch.device("meta"), torch.no_grad():
        try:
            first = run(schedule)
            if slots is None or slots.fixed is not None:
                return [first]
            found = []
            for slot in range(slots.num_steps + 1):
                fixed = copy(schedule)
                fixed.slots = SlotSearch(fixed=slot, enabled=False)
                found.append(run(fixed))
            return found
        except Exception as error:
            said = str(error).partition("\n")[0]
            raise ValueError(f"{type(error).__name__}{': ' if said else ''}{said}") from error


class _Log:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.entries: list[Entry] = []
        self._transfers = 0

    def part(self, name: str, tokens: int) -> None:
        self.entries.append(Entry("part", name, tokens / self.tokens))

    def part_of(self, name: str) -> Callable[..., Tensor]:
        """A part that takes a residual stream `[B, S, H]` and returns one."""

        def call(x: Tensor, *_: Any) -> Tensor:
            self.part(name, x[..., 0].numel())
            return torch.empty_like(x)

        return call

    def start(self, name: str, tokens: int) -> Entry:
        """Write the start of a transfer; the result is the wait for it."""
        begun = Entry("start", name, tokens / self.tokens, self._transfers)
        self._transfers += 1
        self.entries.append(begun)
        return replace(begun, kind="wait")

    def check(self) -> None:
        for kind, other in (("start", "wait"), ("wait", "start")):
            numbers = {entry.transfer for entry in self.entries if entry.kind == other}
            lone = next((e for e in self.entries if e.kind == kind and e.transfer not in numbers), None)
            if lone is not None:
                raise ValueError(f"{lone.name} has a {kind} and no {other}")


class _RecordingUnit:
    """What a schedule sees of `MoEUnit`."""

    training = False
    recorder = SILENT

    def __init__(
        self, schedule: Schedule, shape: ModelShape, *, tokens: int, top_k: int, before: bool
    ) -> None:
        self.log = log = _Log(tokens)
        self.extra = nn.ModuleDict(schedule.extra(shape))
        self.attention = log.part_of("attention")
        names = {"attention": "attention_before", "feed_forward": "feed_forward"}
        self.before = (
            SimpleNamespace(**{method: log.part_of(name) for method, name in names.items()})
            if before
            else None
        )
        self.norm = self.dropout = torch.empty_like
        self.moe = _RecordingMoE(log, shape, top_k=top_k, serial=not schedule.enabled)

    def record(self, recorder: Recorder) -> None:
        self.recorder = recorder


class _RecordingMoE:
    """What a schedule sees of `MoE`."""

    def __init__(self, log: _Log, shape: ModelShape, *, top_k: int, serial: bool) -> None:
        self._log, self._num_experts, self._top_k, self._serial = log, shape.num_experts, top_k, serial
        self.shared_expert = object() if shape.shared_width else None
        self.shared = log.part_of("shared")

    def route(self, x: Tensor, context: TokenContext = PLAIN, *, avoid: Tensor | None = None) -> Routed:
        x_TH = x.reshape(-1, x.shape[-1])
        num_tokens = len(x_TH)
        self._log.part("router", num_tokens)
        ids = torch.empty(num_tokens, self._top_k, dtype=torch.int64)
        scores = torch.empty(num_tokens, self._num_experts)
        counts = torch.empty(self._num_experts, dtype=torch.int64)
        decision = Decision(Routing(ids, torch.empty(ids.shape)), probs=scores, counts=counts)
        return Routed(x_TH, decision, scores, x.shape[1])

    def path(self, routed: Routed, *, serial: bool | None = None, delay_wgrad: bool = False) -> Path:
        serial = self._serial if serial is None else serial
        return RoutedPath(
            routed.x_TH,
            routed.decision.routing,
            dispatcher=_Mover(self._log, late=delay_wgrad, serial=serial),  # type: ignore[arg-type]
            experts=_Experts(self._log),
            serial=serial,
            delay_wgrad=delay_wgrad,
        )

    def routed_path(
        self,
        x: Tensor,
        context: TokenContext = PLAIN,
        *,
        serial: bool | None = None,
        delay_wgrad: bool = False,
        avoid: Tensor | None = None,
    ) -> Path:
        return self.path(self.route(x, context, avoid=avoid), serial=serial, delay_wgrad=delay_wgrad)

    def report(self, *parts: Routed) -> None:
        pass

    def shared_up(self, x: Tensor) -> Tensor:
        assert self.shared_expert is not None, "there is no shared expert"
        return self._log.part_of("shared_up")(x)

    def shared_down(self, inner: Tensor, x: Tensor) -> Tensor:
        assert self.shared_expert is not None, "there is no shared expert"
        return self._log.part_of("shared_down")(x)


class _Mover:
    """A dispatcher of one path. The counts are waited for at once: no dispatcher does anything meanwhile."""

    def __init__(self, log: _Log, *, late: bool, serial: bool) -> None:
        self._log, self._late, self._serial = log, late, serial

    def plan(self, routing: Routing, *, layer: int = 0) -> int:
        tokens = len(routing.expert_ids)
        self._log.entries.append(self._log.start("dispatch.counts", tokens))
        return tokens

    def dispatch(self, x: Tensor, plan: int) -> _Pending:
        # Read backwards, what lies between start and wait is between the reverse transfer's start and its wait.
        if self._late and self._serial:
            self._log.part("weight_gradients", plan)
        wait = self._log.start("dispatch", plan)
        if self._late and not self._serial:
            self._log.part("weight_gradients", plan)
        return _Pending(self._log, wait, Received(x, x[:, 0], torch.empty(0)))

    def combine(self, rows: Tensor, plan: int) -> _Pending:
        return _Pending(self._log, self._log.start("combine", plan), rows)


class _Pending:
    def __init__(self, log: _Log, wait: Entry, value: Any) -> None:
        self._log, self._wait, self._value = log, wait, value

    def wait(self) -> Any:
        self._log.entries.append(self._wait)
        return self._value


class _Experts:
    def __init__(self, log: _Log) -> None:
        self._log = log

    def __call__(self, received: Received, late: Any = None) -> Tensor:
        self._log.part("experts", len(received.rows))
        return torch.empty_like(received.rows)

    def late_weights(self, dtype: torch.dtype) -> None:
        """They are where the rows leave, see `_Mover`."""
