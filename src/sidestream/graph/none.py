"""`graph=none`: every attempt is run as it is written."""

from __future__ import annotations

from collections.abc import Callable

from sidestream.graph.lint import HostRead, HostReadLint, summarize


class NoGraph:
    """Runs attempts eagerly.

    Args:
        lint: Run the first attempt that completes under `HostReadLint`.

    Attributes:
        reads: What the lint found; None as long as it has not run.
    """

    name = "none"

    def __init__(self, *, lint: bool = False) -> None:
        self.lint = lint
        self.reads: list[HostRead] | None = None

    def run(self, attempt: Callable[[], None]) -> None:
        """Call `attempt`, forward and backward of one step."""
        if not self.lint or self.reads is not None:
            attempt()
            return
        with HostReadLint() as lint:
            attempt()
        self.reads = lint.reads

    def report(self) -> list[str]:
        """Lines such as `dispatch/alltoall.py:53 tolist (forward, 2x)`; empty if nothing was read or looked for."""
        return summarize(self.reads or [])
