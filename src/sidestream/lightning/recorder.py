"""Collects the numbers of a run on rank 0: metrics.jsonl, loggers, progress bar, and the summary for result.json."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch.loggers import Logger
from torch import Tensor

from sidestream.lightning.progress import RichProgress
from sidestream.parallel.step import StepReport
from sidestream.tracking import names
from sidestream.tracking.folder import RunFolder

# The first steps pay for allocations and kernel look-ups.
WARMUP_STEPS = 5


@dataclass(frozen=True)
class Summary:
    """What a run reached; None where it did not get there. Losses in nats per token."""

    train_loss: float | None
    val_loss: float | None
    tokens: int
    tokens_per_second: float | None
    step_ms: float | None
    bytes_on_wire: int


class Recorder:
    """Takes one report per step and one number per validation.

    Args:
        rank: Only rank 0 writes; the others only keep the summary.
        folder: The run folder.
        loggers: Mirrors of metrics.jsonl.
        progress: The bar.
        tokens_per_step: Over all ranks.
        every: Steps between records.
    """

    def __init__(
        self,
        *,
        rank: int,
        folder: RunFolder,
        loggers: Sequence[Logger],
        progress: RichProgress,
        tokens_per_step: int,
        every: int,
    ) -> None:
        self._writes = rank == 0
        self._folder, self._loggers, self._progress = folder, loggers, progress
        self._tokens_per_step, self._every = tokens_per_step, every
        self._started = 0.0
        self._durations: list[float] = []
        self._window = 0
        self._losses: list[float] = []
        self._bytes = 0
        self._step = 0
        self._val_loss: float | None = None
        self.last_validation: int | None = None

    def begin(self, *, step: int) -> None:
        """Start at `step` committed steps (more than 0 after a resume)."""
        self._step = step
        if self._writes:
            self._folder.cut_metrics(step)

    def start_step(self) -> None:
        """The clock of a step: from the batch being there to the commit. Validation and saving are outside."""
        self._started = time.perf_counter()

    def end_step(self, step: int, report: StepReport, norm: Tensor, *, lr: float) -> None:
        """Record a committed step.

        Args:
            step: Committed steps.
            report: Its report.
            norm: Gradient norm before clipping, scalar; read only on the steps that are recorded.
            lr: Learning rate of the step.
        """
        self._durations.append(time.perf_counter() - self._started)
        self._losses.append(report.loss)
        self._bytes += report.bytes_on_wire
        self._step = step
        if not self._writes:
            return
        recent = self._durations[-self._every :]
        speed = self._tokens_per_step * len(recent) / sum(recent)
        metrics = {
            names.TRAIN_LOSS: report.loss,
            names.LOAD: report.load,
            names.TOKENS_PER_SECOND: speed,
        }
        self._progress.show(step, metrics)
        if step % self._every == 0:
            metrics |= {
                names.AUX_LOSS: report.aux,
                names.GRAD_NORM: float(norm),
                names.LR: lr,
                names.STEP_MS: 1e3 * statistics.median(recent),
                names.BYTES_ON_WIRE: report.bytes_on_wire,
            }
            self._write(step, metrics)

    def validation(self, step: int, val_loss: float) -> None:
        """Record a validation after `step` committed steps."""
        self._val_loss, self.last_validation = val_loss, step
        if self._writes:
            self._progress.show_validation(step, val_loss)
            self._write(step, {names.VAL_LOSS: val_loss})

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        record = {names.STEP: step, names.TOKENS: step * self._tokens_per_step, **metrics}
        self._folder.append_metrics(record)
        for logger in self._loggers:
            logger.log_metrics({k: v for k, v in record.items() if k != names.STEP}, step=step)

    def summary(self) -> Summary:
        """What was reached so far; speeds without the first steps."""
        steady = self._durations[WARMUP_STEPS:] or self._durations
        recent = self._losses[-self._every :]
        return Summary(
            train_loss=statistics.fmean(recent) if recent else None,
            val_loss=self._val_loss,
            tokens=self._step * self._tokens_per_step,
            tokens_per_second=self._tokens_per_step * len(steady) / sum(steady) if steady else None,
            step_ms=1e3 * statistics.median(steady) if steady else None,
            bytes_on_wire=self._bytes,
        )
