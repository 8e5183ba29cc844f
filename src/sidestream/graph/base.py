"""How attempts are run: the protocol of the `graph` group, and of what records for it.

static = graph.bind(batch)                 inputs at fixed addresses
graph.run(attempt, key=..., ...)           as it is written, or from a recording
graph.update(update)                       clip and optimizer, the same
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sidestream.data.batch import Batch


@dataclass
class GraphCounts:
    """What became of a run's attempts.

    Attributes:
        backend: `cuda` or `tape`.
        captures: Recordings of the attempt.
        replays: Attempts from a recording.
        eager: Attempts that ran as they are written: warm-up, and again after the budget has grown.
        capture_seconds: Longest capture, with the recording's memory planned.
        nbytes: Memory of the recordings; 0 where the device's allocator owns it.
    """

    backend: str
    captures: int = 0
    replays: int = 0
    eager: int = 0
    capture_seconds: float = 0.0
    nbytes: int = 0


class StepRunner(Protocol):
    """An option of the `graph` group, on one rank."""

    name: str
    lint: bool

    def open(self, device: torch.device, barrier: Callable[[], None]) -> None:
        """Before training.

        Args:
            device: The model's device.
            barrier: Brings all ranks together.
        """
        ...

    def place(self) -> AbstractContextManager[Any]:
        """Around what makes the autograd state of parameters: where `run` will run."""
        ...

    def bind(self, batch: Batch) -> Batch:
        """The batch where attempts may read it."""
        ...

    def run(
        self,
        attempt: Callable[[], None],
        *,
        key: Any,
        ready: bool,
        rehearsal: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Make an attempt.

        Args:
            attempt: Reads and writes only memory that lasts; the batch is a bound one.
            key: Whatever a recording depends on; another one is another recording. Equal on all ranks.
            ready: Nothing about the schedule is still being decided.
            rehearsal: Context in which `attempt` may run without leaving a trace.
        """
        ...

    def update(self, update: Callable[[], None]) -> None:
        """Clip and step the optimizer."""
        ...

    def counts(self) -> GraphCounts | None:
        """None where nothing is recorded."""
        ...

    def close(self) -> None:
        """Give up recordings; before the process groups."""
        ...


class Recorded(Protocol):
    """A captured function."""

    seconds: float

    @property
    def nbytes(self) -> int:
        """Memory that it owns."""
        ...

    def replay(self) -> None:
        """Do again what was captured."""
        ...

    def close(self) -> None:
        """Give it up."""
        ...


class Backend(Protocol):
    """What captures.

    Attributes:
        runs: A capture executes what it records.
    """

    name: str
    runs: bool

    def place(self) -> AbstractContextManager[Any]:
        """See `StepRunner.place`."""
        ...

    def warm_up(self, fn: Callable[[], None], *, last: bool) -> Any:
        """Run `fn` as it will be captured; `last`: the next one is. What it returns then is for `capture`."""
        ...

    def capture(self, fn: Callable[[], None], seen: Any) -> Recorded:
        """Record `fn`, given what its last warm-up returned."""
        ...

    def close(self) -> None:
        """Give up what captures share."""
        ...
