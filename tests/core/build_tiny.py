"""A micro model and one training step for tests, on however many ranks there are.

`Setup` is what a test varies. `run_steps` is the whole path: assemble, attempt, check, commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sidestream.data.batch import IGNORE, Batch
from sidestream.dispatch.allgather import AllGatherDispatcher
from sidestream.dispatch.alltoall import AllToAllDispatcher
from sidestream.dispatch.dedup import DedupDispatcher
from sidestream.dispatch.local import LocalDispatcher
from sidestream.exchange.link import NativeLink, ThrottledLink
from sidestream.fusion.grouped import GroupedExperts
from sidestream.fusion.loop import LoopExperts
from sidestream.model.config import ModelShape
from sidestream.model.transformer import MoETransformer
from sidestream.overlap.none import NoOverlap
from sidestream.parallel.assemble import assemble
from sidestream.parallel.fully_shard import FullyShard
from sidestream.parallel.mesh import Parallel, build_parallel
from sidestream.parallel.reduction import Reduction, is_expert
from sidestream.parallel.replicate import Replicate
from sidestream.parallel.step import TrainingStep
from sidestream.routing.balance import AuxLoss, Balance, ExpertBias, NoBalance
from sidestream.routing.quantile import QuantileBalance
from sidestream.routing.router import SigmoidRouter, SoftmaxRouter, SqrtSoftplusRouter

# One list; a new dispatcher is tested by being added to it. The libraries' adapters have tests of their own.
DISPATCHERS: dict[str, Any] = {
    "local": LocalDispatcher,
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
    "nccl_ep": partial(DedupDispatcher, name="nccl_ep"),
    "deep_ep": partial(DedupDispatcher, name="deep_ep", capped=True),
    "hybrid_ep": partial(DedupDispatcher, name="hybrid_ep"),
}
FUSIONS = {"loop": LoopExperts, "grouped": GroupedExperts}
BALANCES: dict[str, Any] = {
    "none": lambda: NoBalance(),
    "bias": lambda: ExpertBias(update_rate=0.01),
    "aux": lambda: AuxLoss(coefficient=0.02, scope="sequence"),
    "aux_micro_batch": lambda: AuxLoss(coefficient=0.02, scope="micro_batch"),
    "aux_global": lambda: AuxLoss(coefficient=0.02, scope="global"),
    "aux_global_z": lambda: AuxLoss(coefficient=0.02, scope="global", z_loss_coefficient=0.01),
    # Loud enough to be seen beside the language-model loss.
    "aux_strong": lambda: AuxLoss(coefficient=5.0, scope="sequence"),
    "aux_micro_batch_strong": lambda: AuxLoss(coefficient=5.0, scope="micro_batch"),
    "aux_global_strong": lambda: AuxLoss(coefficient=5.0, scope="global"),
    "none_z": lambda: NoBalance(z_loss_coefficient=0.1),
    "quantile": lambda: QuantileBalance(ema=0.5),
}
ROUTERS: dict[str, Any] = {
    "softmax": SoftmaxRouter,
    "softmax_after": partial(SoftmaxRouter, score_order="after_top_k"),
    "sigmoid_groups": partial(SigmoidRouter, num_groups=4, top_groups=2, scaling_factor=2.5),
    "sqrtsoftplus": SqrtSoftplusRouter,
    "capacity": partial(SoftmaxRouter, expert_capacity_factor=1.0),
    "capacity_padded": partial(SoftmaxRouter, expert_capacity_factor=1.0, pad_to_capacity=True),
    "position": partial(SoftmaxRouter, expert_capacity_factor=1.0, drop_policy="position"),
    "forced": partial(SoftmaxRouter, force_balance=True),
    "jitter": partial(SoftmaxRouter, jitter=0.1),
}

SHAPE = ModelShape(
    vocab_size=64,
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=64,
    moe_layers=(1, 2),
    num_experts=8,
    expert_hidden_size=64,
    num_shared_experts=1,
    dropout=0.0,
    activation_checkpointing=False,
    rope_theta=10000.0,
    norm_eps=1e-5,
    # Larger than in training: gradients well above rounding.
    init_std=0.2,
)


@dataclass(frozen=True)
class Setup:
    """What a test varies."""

    dispatcher: str = "alltoall"
    fusion: str = "grouped"
    reduction: str = "replicate"
    balance: str = "aux"
    router: str = "softmax"
    ep: int = 1
    accumulation: int = 1
    global_batch: int = 8
    seq_length: int = 16
    steps: int = 1
    max_norm: float | None = 0.5
    optimizer: str = "adamw"
    alignment: int = 1
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    shape: ModelShape = SHAPE
    top_k: int = 2
    seed: int = 7
    gbps: float | None = None  # a throttled link of this rate
    capacity_factor: float | None = None  # of a static dispatcher
    schedule: Any = None  # makes the schedule; None: no overlap
    padded: bool = False  # documents and padding, see `add_padding`

    def with_(self, **changes: Any) -> Setup:
        return replace(self, **changes)


@cache
def parallel_for(ep: int) -> Parallel:
    """Groups are made once per process and expert-parallel size."""
    return build_parallel(expert_parallel_size=ep, device_type="cpu", timeout=timedelta(seconds=60))


def make_balance(name: str) -> Balance:
    return BALANCES[name]()


def make_reduction(setup: Setup) -> Reduction:
    # Small buckets, so that several are in flight.
    return FullyShard() if setup.reduction == "fully_shard" else Replicate(bucket_mb=0.05)


def make_dispatcher(setup: Setup) -> Any:
    if setup.capacity_factor is None:
        return DISPATCHERS[setup.dispatcher]()
    return DISPATCHERS[setup.dispatcher](capacity_factor=setup.capacity_factor)


def make_model(setup: Setup) -> MoETransformer:
    model = assemble(
        setup.shape,
        router=ROUTERS[setup.router](top_k=setup.top_k),
        balance=make_balance(setup.balance),
        dispatcher=make_dispatcher(setup),
        fusion=FUSIONS[setup.fusion](alignment=setup.alignment),
        schedule=setup.schedule() if setup.schedule is not None else NoOverlap(),
        link=NativeLink() if setup.gbps is None else ThrottledLink(gbps=setup.gbps),
        parallel=parallel_for(setup.ep),
        seed=setup.seed,
        device=torch.device("cpu"),
        dtype=setup.dtype,
        compute_dtype=torch.bfloat16 if setup.autocast else None,
        max_tokens=setup.global_batch * setup.seq_length,
    )
    make_reduction(setup).shard(model, parallel_for(setup.ep))
    return model


def global_batch(setup: Setup, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    size = (setup.global_batch, setup.seq_length + 1)
    return torch.randint(0, setup.shape.vocab_size, size, generator=generator)


def add_padding(batch: Batch) -> Batch:
    """Two documents and a different amount of padding per row; the second half of the rows is padding alone."""
    rows, length = batch.inputs.shape
    column, row = torch.arange(length), torch.arange(rows).unsqueeze(1)
    segments = (column >= length // 3).int().repeat(rows, 1)
    padding = (column >= length - 1 - row) | (row >= rows // 2)
    segments[padding] = -1
    targets = batch.targets.masked_fill(padding, IGNORE)
    targets[:, :-1][segments[:, :-1] != segments[:, 1:]] = IGNORE  # the next token is another document's
    return Batch(batch.inputs, targets, segments)


def local_batch(setup: Setup, step: int, rank: int, world: int) -> Batch:
    batch = Batch.of(global_batch(setup, step))
    return (add_padding(batch) if setup.padded else batch).split(setup.global_batch // world)[rank]


def make_step(setup: Setup, model: MoETransformer, world: int) -> TrainingStep:
    parallel, reduction = parallel_for(setup.ep), make_reduction(setup)
    reduction.attach(model, parallel)
    return TrainingStep(
        model,
        parallel=parallel,
        reduction=reduction,
        global_batch_size=setup.global_batch,
        micro_batch_size=setup.global_batch // world // setup.accumulation,
        autocast=setup.autocast,
    )


def make_optimizer(setup: Setup, params: list[Tensor]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if is_expert(p) == flag]} for flag in (False, True)
    ]
    groups = [g for g in groups if g["params"]]
    if setup.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.1)
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank (experts of all ranks)."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def run_steps(rank: int, world: int, setup: Setup) -> dict[str, Any]:
    """Train `setup.steps` steps; return losses, norms, the first step's gradients and the final parameters.

    "transfers" are the tags of all exchanges in order; they must be the same on every rank.
    """
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    out: dict[str, Any] = {"loss": [], "aux": [], "norm": [], "counts": [], "transfers": []}
    if setup.dispatcher != "local":
        model.parts.dispatcher.channel.on_start = out["transfers"].append
    for index in range(setup.steps):
        step.attempt(local_batch(setup, index, rank, world))
        if index == 0:
            out["grads"] = {name: full(p.grad) for name, p in model.named_parameters()}
        report = step.check()
        norm = step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm)
        out["loss"].append(report.loss)
        out["aux"].append(report.aux)
        out["norm"].append(float(norm))
        out["counts"].append(report.counts)
    out["params"] = {name: full(p) for name, p in model.named_parameters()}
    out["bias"] = [moe.selection_bias.clone() for moe in model.moe_layers()]
    step.reduction.close()
    model.parts.dispatcher.close()
    return out
