"""`graph.lint=true`: does a step do anything that a graph could not repeat? The run ends with the answer.

The first steps run as they are written; which memory the last of them uses is remembered. The next one is recorded.
Found is what a tape or a CUDA graph would fail on, or would silently get wrong, whether `graph=step` is set or not.
"""

from __future__ import annotations

from collections.abc import Callable

from sidestream.config.errors import PlainError
from sidestream.data.batch import Batch
from sidestream.graph.findings import Finding, lines
from sidestream.graph.recording import Outside
from sidestream.graph.static import StaticBatch
from sidestream.graph.step import MIN_WARMUP
from sidestream.graph.tape import observe, record


class LintFinished(PlainError):
    """Ends a run on every rank.

    Attributes:
        lines: One per place, with the number of the rank where not all ranks found it; empty: clean.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__(
            f"graph.lint: {len(found)} places that a graph cannot repeat: {'; '.join(found) or 'none'}"
        )
        self.lines = found


class StepLint:
    """Looks at the first attempts."""

    def __init__(self) -> None:
        self._static, self._seen = StaticBatch(), 0
        self._known: Outside | None = None
        self.findings: list[Finding] = []

    def bind(self, batch: Batch) -> Batch:
        """The batch is a declared input of the step, as it is for a step graph."""
        return self._static.bind(batch)

    def run(
        self,
        attempt: Callable[[], None],
        *,
        ready: bool,
        agree: Callable[[list[str]], list[list[str]]],
    ) -> None:
        """Make an attempt, or record one.

        Args:
            attempt: Forward, backward and reduction.
            ready: Nothing about the schedule is still being decided; until then attempts are only made.
            agree: Gathers what the ranks found.

        Raises:
            LintFinished: After the recorded one.
        """
        if self._seen < MIN_WARMUP or not ready:
            self._seen += 1
            self._known = observe(attempt)
            return
        self.findings = record(attempt, self._known).findings
        every = agree(lines(self.findings))
        raise LintFinished(_merged(every))


def _merged(every: list[list[str]]) -> list[str]:
    common = [line for line in every[0] if all(line in found for found in every)]
    own = [f"rank {rank}: {line}" for rank, found in enumerate(every) for line in found if line not in common]
    return common + own
