"""One training step: attempt, check, commit. Plain torch; the Lightning strategy calls it.

    attempt   zero gradients; forward and backward of all micro-batches; the last one reduces the gradients
    check     one reduction over all ranks and one host read: loss, balance, stop flag
    commit    clip, optimizer, balancing bias

Nothing that lasts changes before commit.

Legend: M sequences per micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.data.batch import Batch
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.clip import clip_by_norm, global_norm
from sidestream.parallel.mesh import Parallel
from sidestream.parallel.replicate import Replicate


@dataclass(frozen=True)
class StepReport:
    """What a step did, equal on every rank.

    Attributes:
        loss: Next-token loss, mean over the global batch, nats per token.
        aux: Auxiliary loss, mean over layers-sum and sequences, without its coefficient.
        counts: Per MoE layer, routes per expert over the global batch.
        stop: A rank asked to stop after this step.
        bytes_on_wire: Bytes that all ranks sent to other ranks in this attempt's exchanges.
    """

    loss: float
    aux: float
    counts: Tensor
    stop: bool
    bytes_on_wire: int

    @property
    def load(self) -> float:
        """Largest expert load over the mean load, the worst layer; 1.0 is perfect balance, 0 without MoE layers."""
        if self.counts.numel() == 0:
            return 0.0
        counts = self.counts.double()
        return float((counts.amax(dim=1) / counts.mean(dim=1)).max())


class TrainingStep:
    """Runs steps of one model on one rank.

    Args:
        model: The local part of the model.
        parallel: Groups.
        replicate: Owner of the gradients.
        global_batch_size: Sequences per step over all ranks.
        micro_batch_size: M.
        autocast: bf16 autocast of the forward pass; off means the parameters' dtype.
    """

    def __init__(
        self,
        model: MoETransformer,
        *,
        parallel: Parallel,
        replicate: Replicate,
        global_batch_size: int,
        micro_batch_size: int,
        autocast: bool = False,
    ) -> None:
        self.model, self.parallel, self.replicate = model, parallel, replicate
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.autocast = autocast
        self.params = [p for p in model.parameters() if p.requires_grad]
        device = self.params[0].device
        self._nll = torch.zeros((), dtype=torch.float64, device=device)
        self._aux = torch.zeros((), dtype=torch.float64, device=device)
        self._targets = torch.zeros((), dtype=torch.float64, device=device)
        self._bytes_before = 0

    def precision(self) -> AbstractContextManager[object]:
        """The context of a forward pass. Never around backward: it would cast the router's gradients."""
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self._nll.device.type, dtype=torch.bfloat16)

    def count_targets(self, batch: Batch) -> Tensor:
        """Targets of the global batch, scalar fp64 on the device. A collective only for data with padding."""
        if batch.segments is None:
            return torch.full_like(self._targets, self.global_batch_size * batch.seq_length)
        targets = batch.num_targets().double()
        if self.parallel.world_size > 1:
            dist.all_reduce(targets, group=self.parallel.control)
        return targets.clamp(min=1)

    def attempt(self, batch: Batch) -> None:
        """Forward, backward and reduction of this rank's share of the global batch."""
        self.replicate.zero()
        self.model.ledger.begin_attempt()
        self._nll.zero_()
        self._aux.zero_()
        self._bytes_before = self.model.parts.dispatcher.bytes_sent()
        self._targets.copy_(self.count_targets(batch))
        coefficient = self.model.parts.balance.coefficient
        micro_batches = batch.split(self.micro_batch_size)
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.precision():
                sums = self.model.loss_sums(micro_batch)
            # Divided once, by the global counts; every reduction afterwards is a plain sum.
            loss = sums.nll / self._targets.float() + sums.aux * (coefficient / self.global_batch_size)
            self._nll += sums.nll.detach()
            self._aux += sums.aux.detach()
            with self.replicate.last_micro_batch() if is_last else nullcontext():
                loss.backward()

    def check(self, *, stop_requested: bool = False) -> StepReport:
        """Reduce what the ranks report and read it: the only host read of a step outside the dispatchers.

        Args:
            stop_requested: This rank wants to stop after this step.

        Raises:
            FloatingPointError: On every rank, if the loss is not finite. Nothing has been committed then.
        """
        counts = self.model.ledger.counts
        sent = self.model.parts.dispatcher.bytes_sent() - self._bytes_before
        header = torch.tensor([float(stop_requested), float(sent)], dtype=torch.float64, device=counts.device)
        packed = torch.cat([torch.stack([self._nll, self._aux]), header, counts.double().view(-1)])
        if self.parallel.world_size > 1:
            dist.all_reduce(packed, group=self.parallel.control)
        targets, nll, aux, stop, bytes_on_wire, *flat = torch.cat([self._targets.view(1), packed]).tolist()
        report = StepReport(
            loss=nll / targets,
            aux=aux / self.global_batch_size,
            counts=torch.tensor(flat, dtype=torch.int64).view(counts.shape),
            stop=stop > 0,
            bytes_on_wire=int(bytes_on_wire),
        )
        if not math.isfinite(nll):
            raise FloatingPointError(
                f"the training loss is {report.loss}; lower optimizer.lr, or raise scheduler.warmup_steps"
            )
        return report

    def commit(
        self, report: StepReport, *, optimizer_step: Callable[[], object], max_norm: float | None
    ) -> Tensor:
        """Clip, step the optimizer, update the balancing bias; return the norm before clipping, fp32, on device."""
        group = self.parallel.ep_group if self.parallel.ep_size > 1 else None
        norm = global_norm(self.params, ep_group=group)
        if max_norm is not None:
            clip_by_norm(self.params, norm, max_norm)
        optimizer_step()
        with torch.no_grad():
            on_device = report.counts.to(norm.device)
            for moe, counts in zip(self.model.moe_layers(), on_device):
                self.model.parts.balance.commit(moe.selection_bias, counts)
        return norm
