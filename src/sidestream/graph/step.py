"""`graph=step`: the attempt of a whole optimizer step is captured once and replayed.

    warm-up    the first attempts run as they are written
    capture    forward, backward and reduction of all micro-batches, in a rehearsal that leaves no trace
    replay     inputs are copied to where the recording reads them; nothing of the model's Python runs

What a recording depends on is its key: the receive budget. The shapes of the batch are fixed (`StaticBatch`). After an
overflow the budget grows, the same micro-batches are attempted again as they are written, and so is the next step: what
the first of the two makes and keeps, the second one finds. The one behind them is captured anew.
With `include_optimizer` clipping and the optimizer's step are a second recording, behind the check.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sidestream.data.batch import Batch
from sidestream.graph.base import Backend, GraphCounts, Recorded
from sidestream.graph.cuda import CudaBackend
from sidestream.graph.static import StaticBatch
from sidestream.graph.tape import TapeBackend

log = logging.getLogger(__name__)

MIN_WARMUP = 2


class StepGraph:
    """Captures and replays. See `graph/base.py` for the protocol.

    Args:
        backend: `cuda`, `tape`, or `auto`: `cuda` on a GPU, `tape` on a CPU.
        warmup_steps: Attempts before the first capture, at least 2: what the first one makes and keeps, the second
            one must find.
        include_optimizer: Capture clipping and the optimizer's step too.
        lint: See `NoGraph`.
    """

    name = "step"

    def __init__(
        self,
        *,
        backend: str = "auto",
        warmup_steps: int = 2,
        include_optimizer: bool = False,
        lint: bool = False,
    ) -> None:
        self.backend, self.include_optimizer, self.lint = backend, include_optimizer, lint
        self._backend: Backend | None = None
        self._barrier: Callable[[], None] = lambda: None
        self._static = StaticBatch()
        self._attempt, self._update = _Slot(warmup_steps), _Slot(warmup_steps)
        self._counts = GraphCounts(backend)

    def open(self, device: torch.device, barrier: Callable[[], None]) -> None:
        kind = ("cuda" if device.type == "cuda" else "tape") if self.backend == "auto" else self.backend
        if (kind == "cuda") != (device.type == "cuda"):
            raise ValueError(f"graph.backend={kind}: the model is on {device.type}; set graph.backend=auto")
        self._backend = CudaBackend(device) if kind == "cuda" else TapeBackend()
        self._barrier, self._counts = barrier, GraphCounts(kind)

    def place(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._backend is None else self._backend.place()

    def bind(self, batch: Batch) -> Batch:
        return self._static.bind(batch)

    def run(
        self,
        attempt: Callable[[], None],
        *,
        key: Any,
        ready: bool,
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        slot, backend = self._attempt, self._backend
        assert backend is not None, "open() first"
        slot.expect(key)
        if slot.recorded is None and not (slot.warm and ready):
            self._counts.eager += 1
            slot.warm_up(backend, attempt)
            return
        recorded = slot.recorded
        if recorded is None:
            self._barrier()
            with rehearsal():
                recorded = slot.capture(backend, attempt)
            self._counts.captures += 1
            self._note(recorded, "attempt")
        self._counts.replays += 1
        recorded.replay()

    def update(self, update: Callable[[], None]) -> None:
        """Clip and step the optimizer, from a recording with `include_optimizer`."""
        slot, backend = self._update, self._backend
        assert backend is not None, "open() first"
        if not self.include_optimizer:
            update()
        elif slot.recorded is not None:
            slot.recorded.replay()
        elif not slot.warm:
            slot.warm_up(backend, update)
        else:
            recorded = slot.capture(backend, update)
            self._note(recorded, "update")
            if not backend.runs:
                recorded.replay()

    def _note(self, recorded: Recorded, what: str) -> None:
        counts = self._counts
        counts.capture_seconds = max(counts.capture_seconds, recorded.seconds)
        counts.nbytes = sum(
            s.recorded.nbytes for s in (self._attempt, self._update) if s.recorded is not None
        )
        log.info("graph: captured the %s in %.2f s", what, recorded.seconds)

    def restart(self) -> None:
        """Forget the recording of the attempt: warm up and capture again."""
        self._attempt.restart()

    def counts(self) -> GraphCounts:
        return self._counts

    def close(self) -> None:
        for slot in (self._attempt, self._update):
            slot.drop()
        if self._backend is not None:
            self._backend.close()
        self._backend = None


class _Slot:
    """One function on its way from warm-up to a recording."""

    def __init__(self, warmup: int) -> None:
        self.recorded: Recorded | None = None
        self._key: Any = None
        self._seen: Any = None
        self._left = warmup

    @property
    def warm(self) -> bool:
        return self._left <= 0

    def expect(self, key: Any) -> None:
        """Give up the recording if it was made for another key: new memory needs new warm-up steps."""
        if self._key is not None and self._key != key:
            self.restart()
        self._key = key

    def restart(self) -> None:
        self.drop()
        self._left = max(MIN_WARMUP, self._left)

    def warm_up(self, backend: Backend, fn: Callable[[], None]) -> None:
        self._left -= 1
        self._seen = backend.warm_up(fn, last=self._left <= 0)

    def capture(self, backend: Backend, fn: Callable[[], None]) -> Recorded:
        seen, self._seen = self._seen, None
        self.recorded = backend.capture(fn, seen)
        return self.recorded

    def drop(self) -> None:
        if self.recorded is not None:
            self.recorded.close()
            self.recorded = None
