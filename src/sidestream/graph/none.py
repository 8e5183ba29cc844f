"""`graph=none`: every attempt is run as it is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sidestream.data.batch import Batch
from sidestream.graph.base import GraphCounts


class NoGraph:
    """Runs attempts and updates eagerly.

    Args:
        lint: The run ends with a report of what in a step a graph could not repeat, see `graph/check.py`.
    """

    name = "none"

    def __init__(self, *, lint: bool = False) -> None:
        self.lint = lint

    def open(self, device: torch.device, barrier: Callable[[], None]) -> None:
        """Nothing to prepare."""

    def place(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def bind(self, batch: Batch) -> Batch:
        return batch

    def run(self, attempt: Callable[[], None], **_: Any) -> None:
        """Call `attempt`."""
        attempt()

    def update(self, update: Callable[[], None]) -> None:
        """Call `update`."""
        update()

    def counts(self) -> GraphCounts | None:
        return None

    def close(self) -> None:
        """Nothing to give up."""
