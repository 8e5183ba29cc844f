"""What is predicted: one training step of a model in a layout. Sizes only; `read.py` fills it from a config."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sidestream.model.config import ModelShape
from sidestream.predict.cluster import Cluster, Math
from sidestream.predict.layer import Layer, Mover
from sidestream.predict.schedules import Work
from sidestream.predict.traffic import Routes, Wire


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training step.

    Attributes:
        shape: The model.
        routes: How tokens choose.
        mover: How the dispatcher moves rows.
        work: In an MoE unit, under its schedule; None: as without overlap, where only memory is asked for.
        seq_length: Tokens of a sequence.
        micro_batch_size: Sequences of a rank in one forward pass.
        micro_batches: Forward passes of a step.
        expert_parallel_size: Ranks that share the experts.
        data_parallel_size: Ranks with the same dense weights; with `pipeline_stages` those of one stage.
        pipeline_stages, virtual_stages: Of the pipeline, and of each of its ranks; 1 and 1: none.
        math: Of matrix products.
        dispatch_wire, combine_wire: What travels there.
        skew: Rows of the busiest rank over the mean.
        in_graph: The step is replayed from a graph.
        gathers: With `sharding=all`: how often weights are made whole in a pass of one micro-batch.
        sharding: `none`: every rank of `data_parallel_size` holds everything. `optimizer`: the optimizer's state and
            its fp32 weights are spread over them. `all`: weights and gradients too.
        state_bytes: Of a parameter, where nothing is spread: (weights, gradients, optimizer).
        alignment: Rows of each expert are padded to a multiple.
    """

    shape: ModelShape
    routes: Routes
    mover: Mover
    seq_length: int
    micro_batch_size: int
    micro_batches: int
    expert_parallel_size: int
    data_parallel_size: int
    pipeline_stages: int = 1
    virtual_stages: int = 1
    math: Math = "bf16"
    dispatch_wire: Wire = "bf16"
    combine_wire: Wire = "bf16"
    skew: float = 1.0
    in_graph: bool = False
    sharding: str = "none"
    gathers: int = 0
    state_bytes: tuple[int, int, int] = (4, 4, 8)
    alignment: int = 1
    work: Work | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a rank in one forward pass."""
        return self.micro_batch_size * self.seq_length

    @property
    def gates(self) -> int:
        """Times that a layer's experts are used for a token: twice under DGMoE."""
        return 1 if self.work is None else self.work.gates

    @property
    def fused(self) -> bool:
        """Dispatch, experts and combine are one operation."""
        return self.work is not None and self.work.fused

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert."""
        return self.data_parallel_size // self.expert_parallel_size

    def layer(self, cluster: Cluster) -> Layer:
        """One MoE layer of one rank."""
        return Layer(
            tokens=self.tokens,
            hidden=self.shape.hidden_size,
            width=self.shape.expert_hidden_size,
            routes=self.routes,
            ranks=self.expert_parallel_size,
            per_domain=ranks_of_domain(self.expert_parallel_size, cluster.gpus_per_domain),
            mover=self.mover,
            math=self.math,
            dispatch_wire=self.dispatch_wire,
            combine_wire=self.combine_wire,
            alignment=self.alignment,
            skew=self.skew,
            in_graph=self.in_graph,
        )

    @property
    def interleaved(self) -> float:
        """See `Work`."""
        return 0.0 if self.work is None else self.work.interleaved

    @property
    def schedule_name(self) -> str:
        return "none" if self.work is None else self.work.schedule.name

    def with_work(self, work: Work) -> Job:
        return replace(self, work=work)


def ranks_of_domain(ranks: int, gpus_per_domain: int) -> int:
    """Neighbouring ranks that share a domain, so that domains hold equally many: 36 of 72 GPUs for 36 ranks."""
    if ranks <= gpus_per_domain:
        return ranks
    return max(n for n in range(1, gpus_per_domain + 1) if ranks % n == 0)
