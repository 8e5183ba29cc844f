"""`backend=tape`: the CPU twin of a CUDA graph. The rules are the same, so a CPU can tell whether a step keeps them.

    look      a step runs as it is written; which memory it uses without having made it is remembered
    capture   the next one runs once more, and every operator is recorded with where its tensors lie
    replay    the operators alone, in the same order, in the same places

A replay runs no Python of the model and no autograd. Random numbers are drawn afresh, exchanges are issued and waited
for where they were. A value read by the host, a size that depends on values, memory that is another in every step,
memory that nobody wrote, an exchange that is not waited for: the capture fails and says where.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sidestream.graph.findings import Finding, lines
from sidestream.graph.lint import HostReadLint
from sidestream.graph.program import Program
from sidestream.graph.recording import Outside, Recording


class CaptureError(RuntimeError):
    """A step that cannot be repeated from a recording.

    Attributes:
        findings: What was found.
    """

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("graph=step: the step cannot be captured: " + "; ".join(lines(findings)))
        self.findings = findings


def observe(fn: Callable[[], None]) -> Outside:
    """Run `fn`; return the memory that it used and did not make."""
    with Recording(keep=False) as recording:
        fn()
    return recording.outside()


def record(fn: Callable[[], None], known: Outside | None) -> Recording:
    """Run `fn` and record it, host reads among the findings."""
    with HostReadLint() as lint, Recording(known=known) as recording:
        fn()
    recording.findings = [*lint.findings, *recording.findings]
    return recording


class Tape:
    """One captured function.

    Args:
        fn: Reads and writes only memory that lives longer than the tape.
        known: What an earlier step used, see `observe`.
        poison: Fill the tape's memory with NaN before the first replay; for tests.

    Raises:
        CaptureError: `fn` does what a graph cannot repeat.

    Attributes:
        seconds: That recording and planning took.
    """

    def __init__(self, fn: Callable[[], None], known: Outside | None, *, poison: bool = False) -> None:
        begin = time.perf_counter()
        recording = record(fn, known)
        if recording.findings:
            raise CaptureError(recording.findings)
        self._program: Program | None = Program(recording)
        if poison:
            self._program.arena.fill_(0xFF)
        self.seconds = time.perf_counter() - begin

    @property
    def nbytes(self) -> int:
        """Memory of the tape itself."""
        return 0 if self._program is None else self._program.plan.nbytes

    def replay(self) -> None:
        """Run the recorded operators."""
        assert self._program is not None, "closed"
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for call in self._program.calls:
                call()

    def close(self) -> None:
        """Give the memory back."""
        self._program = None


class TapeBackend:
    """Makes tapes; see `StepGraph` for the protocol."""

    name = "tape"
    runs = True

    def place(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def warm_up(self, fn: Callable[[], None], *, last: bool) -> Outside | None:
        if last:
            return observe(fn)
        fn()
        return None

    def capture(self, fn: Callable[[], None], seen: Any) -> Tape:
        return Tape(fn, seen)

    def close(self) -> None:
        """Tapes own what they use."""
