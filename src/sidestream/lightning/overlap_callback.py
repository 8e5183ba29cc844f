"""`callbacks.overlap_report.every_n_steps`: measures, during training, how much of the exchanges is hidden."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from sidestream.data.batch import Batch
from sidestream.model.transformer import MoETransformer
from sidestream.profiling.bench import SHOWN, Bench, Measured
from sidestream.profiling.exchange import channel_of
from sidestream.profiling.figures import OverlapReport, ratio
from sidestream.profiling.picture import both_arms
from sidestream.profiling.work import UnitWork, preserved, unit_input
from sidestream.tracking.result import OverlapResult

log = logging.getLogger(__name__)

ROUNDS = 3


class ReportOverlap(Callback):
    """After some commits, measures the unit of the first MoE layer on the step's first micro-batch. Collective.

    The run stays what it would have been, bit for bit: see `preserved`.

    Args:
        steps: After which commits.

    Attributes:
        last: The last report; None before the first.
        last_step: The commit after which that was; 0 before the first.
    """

    def __init__(self, *, steps: range) -> None:
        self.steps = steps
        self.last: OverlapReport | None = None
        self.last_step = 0
        self._arms: dict[str, Any] | None = None  # what the picture shows, on rank 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """What a config cannot tell: which transport `auto` has become."""
        if not self.steps:
            return
        try:
            channel_of(pl_module.model)
        except ValueError as error:
            self.steps = range(0)
            if trainer.is_global_zero:
                log.warning("callbacks.overlap_report: switched off: %s", error)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step not in self.steps:
            return
        recipe = pl_module.recipe
        micro_batch = batch.split(recipe.micro_batch_size)[0]
        measured = measure_unit(pl_module.model, micro_batch, autocast=recipe.autocast)
        self.last, self.last_step = measured.report(), step
        pl_module.recorder.overlap(step, self.last)
        group = pl_module.parallel_strategy.parallel.control
        ranks: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(ranks, [measured.bars(arm) for arm in SHOWN], group=group)
        if trainer.is_global_zero:
            self._arms = both_arms(measured, ranks)

    def picture(self, title: str) -> dict[str, Any] | None:
        """What `profiling.picture.save` draws of the last report, on rank 0; None before the first."""
        if self.last is None or self._arms is None:
            return None
        lines = [
            f"{title}: one MoE unit after step {self.last_step}",
            f"{ROUNDS} rounds during training; serial above, overlapped below",
        ]
        figures = f"E_hide {ratio(self.last.e_hide)}, at most {ratio(self.last.bound)} with this schedule"
        return {"title": lines, "figures": figures, **self._arms}

    def result(self) -> OverlapResult | None:
        """The entry `overlap` of result.json."""
        if self.last is None:
            return None
        return OverlapResult(
            compute_ms=1e3 * self.last.t_comp,
            comm_ms=1e3 * self.last.t_comm,
            serial_ms=1e3 * self.last.t_serial,
            overlapped_ms=1e3 * self.last.t_overlap,
            e_hide=self.last.e_hide,
            e_comm=self.last.e_comm,
            bound=self.last.bound,
        )


def measure_unit(
    model: MoETransformer, batch: Batch, *, autocast: bool, rounds: int = ROUNDS, warmup: int = 1
) -> Measured:
    """Measure the unit of the first MoE layer of a model in training, and leave the model as it was. Collective."""
    device = batch.inputs.device.type
    precision = partial(torch.autocast, device, dtype=torch.bfloat16, enabled=autocast)
    with preserved(model, channel_of(model)), torch.enable_grad():
        model.eval()  # no dropout on the way to the unit
        unit, h, context = unit_input(model, batch, precision=precision)
        bench = Bench(UnitWork(model, unit, h, context, precision=precision))
        try:
            bench.record()
            return bench.measure(rounds=rounds, warmup=warmup)
        finally:
            bench.close()
