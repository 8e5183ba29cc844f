"""Collects the numbers of a run on rank 0: metrics.jsonl, loggers, progress bar, and the summary for result.json."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers import Logger
from torch import Tensor

from sidestream.lightning.progress import RichProgress
from sidestream.parallel.step import StepReport
from sidestream.profiling.figures import OverlapReport
from sidestream.tracking import expert_load, names
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.load import load_metrics, worst_load
from sidestream.tracking.machine import Peak, waiting_reader

# The first steps pay for allocations and kernel look-ups.
WARMUP_STEPS = 5
UNKNOWN = -1.0  # in what ranks tell each other; a NaN could be taken for one of the step


@dataclass(frozen=True)
class Summary:
    """What a run reached; None where it did not get there. Losses in nats per token."""

    train_loss: float | None
    val_loss: float | None
    tokens: int
    tokens_per_second: float | None
    step_ms: float | None
    waited_share: float | None
    mfu: float | None
    peak_tflops: float | None
    bytes_on_wire: int | None


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """What turns counts and times into metrics.

    Attributes:
        tokens_per_step: Over all ranks.
        flops_per_token: Model FLOPs, forward and backward.
        expert_parallel_size: Ranks that share one copy of the experts.
        max_steps: Steps of the run.
        every: Steps between records.
    """

    tokens_per_step: int
    flops_per_token: float
    expert_parallel_size: int
    max_steps: int
    every: int


class Recorder:
    """Takes one report per step and one number per validation.

    Args:
        rank: Only rank 0 writes; the others only keep the summary.
        folder: The run folder.
        loggers: Mirrors of metrics.jsonl.
        progress: The bar.
        sizes: What turns counts and times into metrics.
        peak: Peak FLOP/s of this rank's device.
        memory: Gives (current, peak) bytes of this rank.
    """

    def __init__(
        self,
        *,
        rank: int,
        folder: RunFolder,
        loggers: Sequence[Logger],
        progress: RichProgress,
        sizes: RunSizes,
        peak: Peak,
        memory: Callable[[], tuple[int, int]],
    ) -> None:
        self._writes = rank == 0
        self._folder, self._loggers, self._progress = folder, loggers, progress
        self._sizes, self._every, self._peak, self._memory = sizes, sizes.every, peak, memory
        self._started = 0.0
        self._durations: list[float] = []
        self._slowest: list[float] = []
        self._losses: list[float] = []
        self._bytes = 0
        self._step = 0
        self._peak_flops: float | None = None  # of all ranks
        self._ranks = 1
        self._load: Tensor | None = None
        self._load_steps = 0
        self._waiting = waiting_reader()
        self._waited_before = self._waiting()
        self._waited = 0.0  # in the last step
        self._waited_shares: list[float] = []
        self._load_window = expert_load.window(every=sizes.every, max_steps=sizes.max_steps)
        self._val_loss: float | None = None
        self.last_validation: int | None = None
        self._earlier: dict[str, Any] = {}  # the last training record of earlier starts

    def begin(self, *, step: int, share: Callable[[Any], Any], bytes_on_wire: int = 0) -> None:
        """Start at `step` committed steps (more than 0 after a resume), knowing what earlier starts recorded.

        Args:
            share: Gives every rank what rank 0 has.
            bytes_on_wire: Bytes sent in the steps until then.
        """
        self._step, self._bytes = step, bytes_on_wire
        records: list[dict[str, Any]] = []
        if self._writes:
            self._folder.cut_metrics(step)
            records = self._folder.read_metrics()
        last = {
            name: record
            for record in records
            for name in (names.TRAIN_LOSS, names.VAL_LOSS)
            if name in record
        }
        last = share(last)
        self._earlier = last.get(names.TRAIN_LOSS, {})
        if validated := last.get(names.VAL_LOSS):
            self._val_loss, self.last_validation = validated[names.VAL_LOSS], validated[names.STEP]

    def own(self) -> dict[str, float]:
        """What this rank adds to the next report, see `TrainingStep.check`; the time is that of the last step."""
        current, peak = self._memory()
        return {
            "seconds": self._durations[-1] if self._durations else 0.0,
            "waited": self._waited,
            "memory": current,
            "peak_memory": peak,
            "peak_flops": self._peak.flops or 0.0,
        }

    def start_step(self) -> None:
        """The clock of a step: from the batch being there to the commit. Validation and saving are outside."""
        self._started, self._waited_before = time.perf_counter(), self._waiting()

    def end_step(self, step: int, report: StepReport, norm: Tensor, *, lr: float) -> None:
        """Record a committed step.

        Args:
            step: Committed steps.
            report: Its report; `per_rank` holds what `own` gave.
            norm: Gradient norm before clipping, scalar; read only on the steps that are recorded.
            lr: Learning rate of the step.
        """
        self._durations.append(time.perf_counter() - self._started)
        before, now = self._waited_before, self._waiting()
        self._waited = UNKNOWN if before is None or now is None else now - before
        self._losses.append(report.loss)
        self._bytes += report.bytes_on_wire
        self._step = step
        peaks = report.per_rank["peak_flops"]
        self._ranks, self._peak_flops = len(peaks), sum(peaks) if min(peaks) > 0 else None
        if len(self._durations) > 1:
            self._slowest.append(max(report.per_rank["seconds"]))
            ranks = list(zip(report.per_rank["waited"], report.per_rank["seconds"]))
            if all(waited >= 0.0 and seconds > 0.0 for waited, seconds in ranks):
                self._waited_shares.append(max(waited / seconds for waited, seconds in ranks))
        if not self._writes:
            return
        self._keep_load(step, report)
        recent = self._durations[-self._every :]
        speed = self._sizes.tokens_per_step * len(recent) / sum(recent)
        counts = report.counts.numpy()
        shown = {
            names.TRAIN_LOSS: report.loss,
            names.TOKENS_PER_SECOND: speed,
            names.LOAD: worst_load(counts),
        }
        self._progress.show(step, shown)
        if step % self._every == 0:
            slowest = self._slowest[-self._every :]
            metrics = load_metrics(counts, num_ranks=self._sizes.expert_parallel_size) | {
                names.TRAIN_LOSS: report.loss,
                names.GRAD_NORM: float(norm),
                names.LR: lr,
                # Both are positive wherever they are computed, so 0 means that no layer has one.
                names.AUX_LOSS: report.aux or None,
                names.Z_LOSS: report.z or None,
                names.DROPPED: report.dropped,
                names.TOKENS_PER_SECOND: speed,
                names.MFU: self._mfu(speed),
                names.STEP_MS: 1e3 * statistics.median(recent),
                names.SLOWEST_STEP_MS: 1e3 * statistics.median(slowest) if slowest else None,
                names.BYTES_ON_WIRE: report.bytes_on_wire,
                names.METADATA_BYTES: report.metadata_bytes,
                names.MEMORY: int(max(report.per_rank["memory"])) or None,
                names.PEAK_MEMORY: int(max(report.per_rank["peak_memory"])),
            }
            self._write(step, {name: metrics[name] for name in names.TRAINING})

    def validation(self, step: int, val_loss: float) -> None:
        """Record a validation after `step` committed steps."""
        self._val_loss, self.last_validation = val_loss, step
        if self._writes:
            self._progress.show_validation(step, val_loss)
            self._write(step, {names.VAL_LOSS: val_loss})

    def overlap(self, step: int, report: OverlapReport) -> None:
        """Record a measurement of overlap after `step` committed steps."""
        if self._writes:
            self._write(
                step,
                {
                    names.OVERLAP_COMPUTE_MS: 1e3 * report.t_comp,
                    names.OVERLAP_COMM_MS: 1e3 * report.t_comm,
                    names.OVERLAP_SERIAL_MS: 1e3 * report.t_serial,
                    names.OVERLAP_OVERLAPPED_MS: 1e3 * report.t_overlap,
                    names.OVERLAP_E_HIDE: report.e_hide,
                    names.OVERLAP_E_COMM: report.e_comm,
                    names.OVERLAP_BOUND: report.bound,
                },
            )

    def _keep_load(self, step: int, report: StepReport) -> None:
        if report.counts.numel() == 0:
            return
        self._load = report.counts.clone() if self._load is None else self._load.add_(report.counts)
        self._load_steps += 1
        if step % self._load_window == 0 or step == self._sizes.max_steps or report.stop:
            record = {names.STEP: step, "steps": self._load_steps, "counts": self._load.tolist()}
            self._folder.append_expert_load(record)
            self._load, self._load_steps = None, 0

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        record = {names.STEP: step, names.TOKENS: step * self._sizes.tokens_per_step, **metrics}
        self._folder.append_metrics(record)
        if self._loggers:
            scalars = flat(record)
            for logger in self._loggers:
                logger.log_metrics(scalars, step=step)

    @property
    def bytes_on_wire(self) -> int:
        """Sent in all committed steps, those of earlier starts among them."""
        return self._bytes

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self._peak_flops is None:
            return None
        return self._sizes.flops_per_token * tokens_per_second / self._peak_flops

    def summary(self) -> Summary:
        """What was reached so far; speeds without the first steps. Without a step: what an earlier start recorded."""
        if not self._durations:
            return self._summary_of_earlier()
        steady = self._durations[WARMUP_STEPS:] or self._durations
        recent = self._losses[-self._every :]
        speed = self._sizes.tokens_per_step * len(steady) / sum(steady)
        return Summary(
            train_loss=statistics.fmean(recent),
            val_loss=self._val_loss,
            tokens=self._step * self._sizes.tokens_per_step,
            tokens_per_second=speed,
            step_ms=1e3 * statistics.median(steady),
            waited_share=self._waited_share(),
            mfu=self._mfu(speed),
            peak_tflops=self._peak_flops / self._ranks / 1e12 if self._peak_flops is not None else None,
            bytes_on_wire=self._bytes,
        )

    def _summary_of_earlier(self) -> Summary:
        found = self._earlier.get
        return Summary(
            train_loss=found(names.TRAIN_LOSS),
            val_loss=self._val_loss,
            tokens=self._step * self._sizes.tokens_per_step,
            tokens_per_second=found(names.TOKENS_PER_SECOND),
            step_ms=found(names.STEP_MS),
            waited_share=None,
            mfu=found(names.MFU),
            peak_tflops=None,
            bytes_on_wire=self._bytes or None,
        )

    def _waited_share(self) -> float | None:
        shares = self._waited_shares[WARMUP_STEPS:] or self._waited_shares
        return statistics.fmean(shares) if shares else None


def flat(record: dict[str, Any]) -> dict[str, float]:
    """A record as loggers take it: numbers only, `<name>/<layer>` for each number of a list, without the step."""
    scalars: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            scalars |= {f"{name}/{layer}": number for layer, number in enumerate(value)}
        elif value is not None and name != names.STEP:
            scalars[name] = value
    return scalars
