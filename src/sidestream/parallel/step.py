"""One training step: attempt (prepare and run), check, commit. Plain torch; the Lightning strategy calls it.

    prepare   what the host does: counts, random numbers kept, gradients where they belong
    run       what the device does: zero gradients; forward and backward of all micro-batches; the last one reduces
              the gradients. Of fixed shapes it can be recorded and replayed (`graph/`)
    check     one reduction over all ranks and one host read: loss, balance, stop flag, overflow
    commit    clip, optimizer, balancing bias

Nothing that lasts changes before commit.

Legend: M sequences per micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.data.batch import Batch
from sidestream.exchange.ops import Channel, add_bytes, byte_counters, sum_over
from sidestream.launch import phase
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.clip import clip_by_norm, global_norm
from sidestream.parallel.mesh import Parallel
from sidestream.parallel.overflow import BudgetKeeper
from sidestream.parallel.reduction import Reduction, local


@dataclass(frozen=True)
class StepReport:
    """What a step did, equal on every rank.

    Attributes:
        loss: Next-token loss, mean over the global batch, nats per token.
        aux: Auxiliary loss, mean over layers-sum and sequences, without its coefficient.
        counts: Per MoE layer, routes per expert over the global batch.
        stop: A rank asked to stop after this step.
        bytes_on_wire: Bytes that all ranks sent to other ranks in this attempt's exchanges.
        metadata_bytes: How many of these are counts and routing weights; the rest are rows.
        z: Router z-loss, layers-sum of the mean over valid tokens, without its coefficient; None if none is computed.
        dropped: Routes dropped over the global batch; None if nothing can be dropped.
        overflowed: MoE layers, summed over ranks, that needed more rows than the static budget; the attempt is
            repeated then, unless routes may be dropped.
        lost: Routes dropped for lack of budget.
        observed: Per MoE layer, what the balance observed, see `Ledger`; no rows unless it does.
        per_rank: What each rank gave to `check` as `own`: name -> one number per rank.
        grad_norm: Norm of all gradients before clipping.
    """

    loss: float
    aux: float
    counts: Tensor
    stop: bool
    bytes_on_wire: int
    metadata_bytes: int = 0
    z: float | None = None
    dropped: int | None = None
    overflowed: int = 0
    lost: int = 0
    observed: Tensor = field(default_factory=lambda: torch.zeros(0))
    per_rank: dict[str, list[float]] = field(default_factory=dict)
    grad_norm: float = 0.0


_CALM_DOWN = "lower optimizer.lr, or raise scheduler.warmup_steps"


def _not_finite(model: MoETransformer) -> list[str]:
    """Names of the parameters whose gradient on this rank is not finite. Reads the device."""
    grads = [(name, local(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    return [name for name, grad in grads if not bool(grad.isfinite().all())]


class TrainingStep:
    """Runs steps of one model on one rank.

    Args:
        model: The local part of the model.
        parallel: Groups.
        reduction: Owner of the gradients, attached.
        global_batch_size: Sequences per step over all ranks.
        micro_batch_size: M.
        autocast: bf16 autocast of the forward pass; off means the parameters' dtype.
        budget: Keeper of the dispatcher's static budget.
    """

    def __init__(
        self,
        model: MoETransformer,
        *,
        parallel: Parallel,
        reduction: Reduction,
        global_batch_size: int,
        micro_batch_size: int,
        autocast: bool = False,
        budget: BudgetKeeper | None = None,
    ) -> None:
        self.budget = budget
        self.model, self.parallel, self.reduction = model, parallel, reduction
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.autocast = autocast
        self.params = [p for p in model.parameters() if p.requires_grad]
        device = self.params[0].device
        self._nll = torch.zeros((), dtype=torch.float64, device=device)
        self._aux = torch.zeros((), dtype=torch.float64, device=device)
        self._z = torch.zeros((), dtype=torch.float64, device=device)
        self._targets = torch.zeros((), dtype=torch.float64, device=device)
        self._norm = torch.zeros((), device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=device)
        self._bytes_before = self._metadata_before = 0
        self._control = Channel(parallel.control if parallel.world_size > 1 else None)

    def precision(self) -> AbstractContextManager[object]:
        """The context of a forward pass. Never around backward: it would cast the router's gradients."""
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self._nll.device.type, dtype=torch.bfloat16)

    def count_tokens(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Targets and valid tokens of the global batch, at least 1, and valid tokens of the ranks before this one.

        Scalars fp64 on the device. A collective only for data with padding.
        """
        rank, ranks = dist.get_rank(), self.parallel.world_size
        if batch.segments is None:
            total = torch.full_like(self._targets, self.global_batch_size * batch.seq_length)
            return total, total, total * rank / ranks
        counted = torch.zeros((2, ranks), dtype=torch.float64, device=self._targets.device)
        counted[:, rank] = torch.stack([batch.num_targets(), (batch.segments >= 0).sum()])
        if ranks > 1:
            dist.all_reduce(counted, group=self.parallel.control)
        targets, tokens = counted.sum(dim=1).clamp(min=1)
        return targets, tokens, counted[1, :rank].sum()

    def attempt(self, batch: Batch) -> None:
        """Forward, backward and reduction of this rank's share of the global batch."""
        self.prepare(batch)
        self.run(batch)

    def prepare(self, batch: Batch) -> None:
        """Before `run`. A collective only for data with padding."""
        if self.budget is not None:
            self.budget.begin()
        self.reduction.reattach()
        self._bytes_before = self.model.parts.dispatcher.bytes_sent()
        self._metadata_before = self.model.parts.dispatcher.metadata_bytes_sent()
        targets, tokens, first = self.count_tokens(batch)
        self._targets.copy_(targets)
        self._tokens.copy_(tokens)
        self._first.copy_(first)

    def run(self, batch: Batch) -> None:
        """What is attempted, on memory that lasts: parameters, gradients, sums, counters."""
        self.reduction.zero()
        self.model.ledger.begin_attempt(first=self._first)
        self._nll.zero_()
        self._aux.zero_()
        self._z.zero_()
        balance = self.model.parts.balance
        global_counts: Tensor | None = None
        micro_batches = batch.split(self.micro_batch_size)
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with self.precision():
                sums = self.model.loss_sums(micro_batch)
            if index == 0 and sums.probs is not None:
                global_counts = self._global_counts(micro_batches[1:])
            aux = sums.aux if sums.probs is None else self._global_aux(sums.probs, global_counts)
            # Divided once, by the global counts; every reduction afterwards is a plain sum.
            loss = sums.nll / self._targets.float() + aux * (balance.coefficient / self.global_batch_size)
            self._nll += sums.nll.detach()
            self._aux += aux.detach()
            if sums.z is not None:
                loss = loss + sums.z * (balance.z_loss_coefficient / self._tokens.float())
                self._z += sums.z.detach()
            with self.reduction.last_micro_batch() if is_last else nullcontext():
                loss.backward()

    def _global_counts(self, rest: list[Batch]) -> Tensor:
        """Routes per expert over the whole step, `[MoE layers, E]`, known before its first backward. Collective.

        For a loss over the global batch, whose gradient at every token depends on all counts. What the first
        micro-batch chose is known by now. The others run forward once more, without a graph and from the same random
        numbers: accumulation over A micro-batches costs A - 1 more forward passes, and no accumulation costs none.
        """
        ledger, device = self.model.ledger, self._nll.device
        devices = [device] if device.type == "cuda" else []
        if not rest:
            counts = ledger.counts.clone()
        else:
            with ledger.rehearsal(), self.uncounted(), torch.random.fork_rng(devices):
                with torch.no_grad(), self.precision():
                    for micro_batch in rest:
                        self.model.loss_sums(micro_batch)
                counts = ledger.counts.clone()
        if self.parallel.world_size > 1:
            sum_over(counts, self._control, "balance.counts")
        return counts

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the dispatcher moves or drops inside comes again in the attempt, and counts there."""
        dispatcher = self.model.parts.dispatcher
        sent, metadata = dispatcher.bytes_sent(), dispatcher.metadata_bytes_sent()
        with nullcontext() if self.budget is None else self.budget.rehearsal():
            yield
        self._bytes_before += dispatcher.bytes_sent() - sent
        self._metadata_before += dispatcher.metadata_bytes_sent() - metadata

    def _global_aux(self, probs: Tensor, counts: Tensor | None) -> Tensor:
        """The micro-batch's share, in the unit of `LossSums.aux`."""
        assert counts is not None
        parts = self.model.parts
        loss = parts.balance.global_loss(probs, counts, num_tokens=self._tokens, top_k=parts.router.top_k)
        return loss * self.global_batch_size

    def check(self, *, stop_requested: bool = False, own: Mapping[str, float] | None = None) -> StepReport:
        """Reduce what the ranks report and read it: the only host read of a step outside the dispatchers.

        Args:
            stop_requested: This rank wants to stop after this step.
            own: Numbers of this rank that are not to be added up, under names that are equal on all ranks. They
                come back as `per_rank`, so that a maximum or a spread needs no reduction of its own.

        Raises:
            FloatingPointError: On every rank, if a loss or the gradient norm of any rank is not finite. Nothing has
                been committed then.
        """
        own = own or {}
        found_norm = global_norm(
            self.params,
            expert_group=self.reduction.shard_group(self.parallel, expert=True),
            dense_group=self.reduction.shard_group(self.parallel, expert=False),
        )
        self._norm.copy_(found_norm)  # into memory that a recorded commit reads
        sums = self._sum_over_ranks(self._parts(stop_requested=stop_requested, own=own))
        (targets,), (nll,), norms = sums["targets"], sums["nll"], sums["norms"]
        found = {"training loss": nll / targets, "auxiliary loss": sums["aux"][0], "z-loss": sums["z"][0]}
        overflowed, lost = (int(number) for number in sums.get("overflow", (0, 0)))
        stands = not overflowed or (self.budget is not None and self.budget.mode == "drop")
        if stands:
            for what, value in found.items():
                if not math.isfinite(value):
                    raise FloatingPointError(f"the {what} is {value}; {_CALM_DOWN}")
            self._check_norms(norms)
        ledger, parts = self.model.ledger, self.model.parts
        can_drop = getattr(parts.router, "expert_capacity_factor", None) is not None
        return StepReport(
            loss=nll / targets,
            grad_norm=norms[0],
            aux=sums["aux"][0] / self.global_batch_size,
            counts=torch.tensor(sums["counts"], dtype=torch.int64).view(ledger.counts.shape),
            z=sums["z"][0] / sums["tokens"][0] if parts.balance.z_loss_coefficient else None,
            dropped=int(sum(sums["dropped"])) if can_drop else None,
            overflowed=overflowed,
            lost=lost,
            observed=torch.tensor(sums["observed"], dtype=torch.float64).view(ledger.observed.shape),
            stop=sums["stop"][0] > 0,
            bytes_on_wire=int(sums["bytes"][0]),
            metadata_bytes=int(sums["bytes"][1]),
            # Every rank wrote its own slots only, so the sum is a gather.
            per_rank={name: sums["own"][i :: len(own)] for i, name in enumerate(own)},
        )

    def _check_norms(self, norms: list[float]) -> None:
        """Each rank has a norm of its own: that of its replicas' gradients. Collective if one is not finite.

        Raises:
            FloatingPointError: The same on every rank.
        """
        wrong = next((rank for rank, norm in enumerate(norms) if not math.isfinite(norm)), None)
        if wrong is None:
            return
        mine = _not_finite(self.model)
        every: list[list[str]] = [mine]
        if self.parallel.world_size > 1:
            every = [[] for _ in norms]
            dist.all_gather_object(every, mine, group=self.parallel.control)
        # The norm of a rank is that of all the experts' owners, so another one may have the gradient.
        rank = next((rank for rank, names in enumerate(every) if names), wrong)
        more = f" and {len(every[rank]) - 1} more" if len(every[rank]) > 1 else ""
        where = f", from the gradient of {every[rank][0]}{more}" if every[rank] else ""
        raise FloatingPointError(f"the gradient norm is {norms[wrong]} on rank {rank}{where}; {_CALM_DOWN}")

    def _parts(self, *, stop_requested: bool, own: Mapping[str, float]) -> dict[str, Tensor | list[float]]:
        """What the ranks add up: name -> tensor on the device, or numbers on the host. All sizes agree over ranks.

        To report something more: an entry here and its reader in `check`. It costs no reduction and no read.
        """
        dispatcher, rank = self.model.parts.dispatcher, dist.get_rank()
        norms = torch.zeros(self.parallel.world_size, dtype=torch.float64, device=self._norm.device)
        norms[rank] = self._norm
        budget = self.budget
        overflow = {"overflow": budget.flags()} if budget is not None and budget.active else {}
        before, after = [0.0] * len(own) * rank, [0.0] * len(own) * (self.parallel.world_size - rank - 1)
        return {
            "nll": self._nll,
            "aux": self._aux,
            "z": self._z,
            "norms": norms,
            **self.model.ledger.totals(),
            **overflow,
            "stop": [float(stop_requested)],
            "bytes": [
                float(dispatcher.bytes_sent() - self._bytes_before),
                float(dispatcher.metadata_bytes_sent() - self._metadata_before),
            ],
            "own": [*before, *own.values(), *after],
        }

    def _sum_over_ranks(self, parts: dict[str, Tensor | list[float]]) -> dict[str, list[float]]:
        """Add up over all ranks in one reduction, read in one `tolist`: name -> flat numbers. fp64 throughout.

        The result also has "targets" and "tokens", which are equal on all ranks already.
        """
        device = self._nll.device
        on_device = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        on_host = {name: part for name, part in parts.items() if not isinstance(part, Tensor)}
        # All host numbers cross to the device together.
        numbers = torch.tensor(
            [n for part in on_host.values() for n in part], dtype=torch.float64, device=device
        )
        packed = torch.cat([*(part.double().reshape(-1) for part in on_device.values()), numbers])
        if self.parallel.world_size > 1:
            phase.beat("the check of the step")
            dist.all_reduce(packed, group=self.parallel.control)
        known = torch.stack([self._targets, self._tokens])
        flat = iter(torch.cat([known, packed]).tolist())
        sizes = {"targets": 1, "tokens": 1, **{name: part.numel() for name, part in on_device.items()}}
        sizes |= {name: len(part) for name, part in on_host.items()}
        return {name: list(itertools.islice(flat, size)) for name, size in sizes.items()}

    def commit(
        self, report: StepReport, *, optimizer_step: Callable[[], object], max_norm: float | None = None
    ) -> Tensor:
        """Step the optimizer, update the balancing bias; return the norm before clipping, fp32, on device.

        Args:
            report: What `check` returned.
            optimizer_step: May clip by itself, see `clip`.
            max_norm: Clip before; None: no.
        """
        if max_norm is not None:
            self.clip(max_norm)
        optimizer_step()
        norm = self._norm
        with torch.no_grad():
            counts, observed = report.counts.to(norm.device), report.observed.to(norm.device)
            for layer, moe in enumerate(self.model.moe_layers()):
                seen = observed[layer] if len(observed) else None
                self.model.parts.balance.commit(moe.selection_bias, counts[layer], seen)
        return norm

    def clip(self, max_norm: float) -> None:
        """Scale gradients down to this norm, from the norm that `check` found."""
        clip_by_norm(self.params, self._norm, max_norm)

    @contextmanager
    def rehearsal(self, batch: Batch) -> Iterator[None]:
        """A `run` inside leaves no trace but in what every attempt begins by clearing."""
        devices = [self._nll.device] if self._nll.device.type == "cuda" else []
        counted = byte_counters()
        with torch.random.fork_rng(devices):
            yield
        now = byte_counters()
        add_bytes(
            {
                id: (counted[id][0] - sent, counted[id][1] - more)
                for id, (sent, more) in now.items()
                if id in counted
            }
        )
        self.prepare(batch)

    def close(self) -> None:
        """Give up what the step owns."""
        self.reduction.close()
        if not self._control.pending:
            self._control.close()
