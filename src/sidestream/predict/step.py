"""A whole training step: MoE units under their schedule, dense blocks, the head, reduction, optimizer, pipeline.

    step = stages of units and blocks, forward and backward, micro-batch after micro-batch
         + what of the reduction of gradients does not hide behind the last backward
         + one pass over the optimizer's state

Legend: T tokens of a rank in a forward pass, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sidestream.model.account import ForwardFlops, account, forward_flops
from sidestream.predict.cluster import Cluster
from sidestream.predict.job import Job, ranks_of_domain
from sidestream.predict.kernels import VALUE_BYTES, activation_pass, product
from sidestream.predict.layer import Seconds, layer_seconds
from sidestream.predict.schedules import NOTHING, Both, Pass, Unit, passes

LOGIT_PASSES = 6  # reads and writes of fp32 logits in softmax, loss and their gradient
OPTIMIZER_PASSES = 2  # state is read and written
ATTENTION_BACKWARD = 2.5  # of its scores, in those of the forward pass: a fused kernel computes them again


@dataclass(frozen=True)
class Part:
    """A line of the answer.

    Attributes:
        name: Of the part.
        seconds: Of a step, if nothing hid anything.
    """

    name: str
    seconds: float


@dataclass(frozen=True)
class Step:
    """What a step takes, in seconds of the slowest rank.

    Attributes:
        layer: One MoE layer's routed path, forward and backward, one part after another.
        unit: One MoE unit, forward and backward together, under the schedule.
        parts: Of the step, one after another as if serial; `hidden` is not among them.
        hidden: What the schedule hides.
        seconds: Of the step: the parts without what is hidden.
        tokens: Of the step, all ranks.
        gpus: All of them.
        flops_per_token: Model FLOPs, forward and backward.
        exposed: Of dispatch and combine, what no compute hides.
        reduction: Of summing gradients, and of gathering weights that are spread, the same.
    """

    layer: tuple[Seconds, Seconds]
    unit: Pass
    parts: tuple[Part, ...]
    hidden: float
    seconds: float
    tokens: int
    gpus: int
    flops_per_token: int
    exposed: float
    reduction: float

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP per second."""
        return self.tokens_per_second_per_gpu * self.flops_per_token


def attention_seconds(job: Job, cluster: Cluster, flops: ForwardFlops, block: int) -> Both:
    """Seconds of one attention with its norm and its residual."""
    shape, tokens = job.shape, job.tokens
    projections = flops.projections * tokens / cluster.products(job.math)
    scores = flops.scores[block] * tokens / cluster.attention_flops
    heads = shape.num_heads * (shape.mla.qk_head_dim if shape.mla else shape.head_width)
    keys = heads if shape.mla else shape.num_kv_heads * shape.head_width
    # Norm and residual read and write the stream five times, rotation and its copies queries and keys six times.
    values = 5 * shape.hidden_size + 6 * (heads + keys)
    pointwise = tokens * values * VALUE_BYTES[job.math] / cluster.memory
    left = cluster.overhead_in_graph if job.in_graph else 1.0
    overhead = left * cluster.block_overhead
    return Both(
        projections + scores + pointwise + overhead,
        2 * projections + ATTENTION_BACKWARD * scores + 2 * pointwise + cluster.backward_overhead * overhead,
    )


def feed_forward_seconds(job: Job, cluster: Cluster, width: int, *, overhead: bool = True) -> Both:
    """Seconds of a gated feed-forward with its norm and residual; nothing if it has no width."""
    if not width:
        return NOTHING
    tokens, hidden = job.tokens, job.shape.hidden_size
    products = product(cluster, job.math, rows=tokens, k=hidden, n=2 * width) + product(
        cluster, job.math, rows=tokens, k=width, n=hidden
    )
    activation = activation_pass(cluster, job.math, values=tokens * width, gated=True)
    pointwise = 5 * tokens * hidden * VALUE_BYTES[job.math] / cluster.memory
    left = (cluster.overhead_in_graph if job.in_graph else 1.0) * cluster.block_overhead * overhead
    return Both(
        products + activation + pointwise + left,
        2 * products + 3 * activation + 2 * pointwise + cluster.backward_overhead * left,
    )


def head_seconds(job: Job, cluster: Cluster, flops: ForwardFlops) -> Both:
    """Output projection and loss. Products of the head are in 16 bits at least."""
    math = job.math if job.math in ("fp32", "bf16") else "bf16"
    products = flops.head * job.tokens / cluster.products(math)
    loss = LOGIT_PASSES * 4 * job.tokens * job.shape.vocab_size / cluster.memory / 2
    return Both(products + loss, 2 * products + loss)


def routed_seconds(job: Job, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """The routed path of one layer, forward and backward."""
    forward, backward = layer_seconds(job.layer(cluster), cluster)
    if job.fused:
        return fused(forward, cluster), fused(backward, cluster)
    return forward, backward


def unit_of(job: Job, cluster: Cluster, flops: ForwardFlops, block: int) -> Unit:
    """The MoE unit of a block; `block` may be one past the last, for multi-token prediction."""
    shape, moe = job.shape, routed_seconds(job, cluster)
    before = NOTHING, NOTHING
    if runs_block_before(job, block):
        before = (
            attention_seconds(job, cluster, flops, block - 1),
            feed_forward_seconds(job, cluster, shape.ffn_hidden_size),
        )
    attention = attention_seconds(job, cluster, flops, min(block, shape.num_layers - 1))
    shared = feed_forward_seconds(job, cluster, shape.shared_width)
    if shape.activation_checkpointing:
        attention, shared = _repeated(attention), _repeated(shared)
        before = _repeated(before[0]), _repeated(before[1])
        again = layer_seconds(job.layer(cluster), cluster)[
            0
        ].experts  # of a fused path, too: its rows are gathered anyway
        moe = moe[0], replace(moe[1], experts=moe[1].experts + again)
    own = (
        None if cluster.own_bandwidth is None else layer_seconds(job.layer(cluster), cluster.with_own_links())
    )
    return Unit(
        own_wire=own,
        attention=attention,
        shared=shared,
        moe=moe,
        before=before,
    )


def _repeated(part: Both) -> Both:
    """Forward once more in backward."""
    return Both(part.forward, part.backward + part.forward)


def fused(seconds: Seconds, cluster: Cluster) -> Seconds:
    """One operation: at best its transfers and its products hide one another. Rows are gathered by whoever needs them.

    On a CPU nothing travels: ranks read each other's memory, which is among the passes over rows.
    """
    wires = 0.0 if cluster.kind == "cpu" else seconds.dispatch + seconds.combine
    inside = max(seconds.experts, wires) + seconds.unpack + seconds.gather
    gone: dict[str, Any] = dict.fromkeys(
        ("counts", "pack", "dispatch", "unpack", "gather", "combine", "add"), 0.0
    )
    return replace(seconds, experts=inside, **gone)


def runs_block_before(job: Job, block: int) -> bool:
    """The unit of an MoE block runs the dense block in front of it as well."""
    return job.work is not None and job.work.reads_before(block)


def unit_passes(job: Job, cluster: Cluster, block: int) -> tuple[Pass, Pass]:
    """Forward and backward of the MoE unit of a block."""
    assert job.work is not None
    flops = forward_flops(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    unit = unit_of(job, cluster, flops, block)
    before = runs_block_before(job, block)
    return passes(unit, job.work, before=before, wire_on_compute=cluster.wire_on_compute)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch through all blocks, forward and backward, in seconds of all stages together.

    Attributes:
        units: Of all MoE blocks, those of multi-token prediction last.
        typical: That of the last MoE block; the first ones often have a dense block in front.
        dense: Of the dense blocks that no unit runs.
        head: With the projections of multi-token prediction.
    """

    units: tuple[tuple[Pass, Pass], ...]
    typical: tuple[Pass, Pass]
    dense: float
    head: float

    def sum(self, name: str) -> float:
        """A field or property, summed over all passes of units."""
        return sum(getattr(one, name) for both in self.units for one in both)

    @property
    def seconds(self) -> float:
        """Seconds of the micro-batch in the order of work that the schedule chooses."""
        return self.sum("seconds") + self.dense + self.head

    @property
    def backward(self) -> float:
        """Seconds of the units' backward passes."""
        return sum(backward.seconds for _, backward in self.units)


def micro_batch(job: Job, cluster: Cluster) -> MicroBatch:
    """What one micro-batch takes; see `step`."""
    shape = job.shape
    flops = forward_flops(shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    units = [unit_passes(job, cluster, block) for block in shape.moe_blocks]
    typical = units[-1]
    # A multi-token prediction layer is one more MoE block, behind the last one and without a dense block in front.
    units += [unit_passes(job, cluster, shape.num_layers) for _ in range(shape.num_mtp_layers)]
    taken = {*shape.moe_blocks, *(block - 1 for block in shape.moe_blocks if runs_block_before(job, block))}
    dense = [
        attention_seconds(job, cluster, flops, block)
        + feed_forward_seconds(job, cluster, shape.ffn_hidden_size)
        for block in range(shape.num_layers)
        if block not in taken
    ]
    if shape.activation_checkpointing:
        dense = [_repeated(part) for part in dense]
    head = head_seconds(job, cluster, flops) * (1 + shape.num_mtp_layers)
    mtp = shape.num_mtp_layers * 3 * flops.mtp_projection * job.tokens / cluster.products(job.math)
    return MicroBatch(tuple(units), typical, sum(part.total for part in dense), head.total + mtp)


def step(job: Job, cluster: Cluster) -> Step:
    """Predict a training step.

    Raises:
        ValueError: Something about the machine that it takes is not known.
    """
    one = micro_batch(job, cluster)
    # Stages share the work evenly; a stage waits while the pipeline fills and drains.
    stages = job.pipeline_stages
    often = job.micro_batches / stages
    backward = one.backward / stages
    reduction = exposed_reduction(job, cluster, forward=one.seconds / stages - backward, backward=backward)
    parts = (
        Part("MoE units, compute", often * one.sum("compute")),
        Part("MoE units, dispatch and combine", often * one.sum("communication")),
        Part("dense blocks", often * one.dense),
        Part("head and loss", often * one.head),
        Part("pipeline bubble", (stages - 1) / job.virtual_stages * one.seconds / stages),
        Part("gradients and spread weights, exposed", reduction),
        Part("optimizer", _optimizer(job, cluster)),
    )
    hidden = often * (one.sum("serial") - one.sum("seconds"))
    forward_pass, backward_pass = one.typical
    top_k = job.gates * job.routes.top_k
    return Step(
        layer=routed_seconds(job, cluster),
        unit=forward_pass + backward_pass,
        parts=parts,
        hidden=hidden,
        seconds=sum(part.seconds for part in parts) - hidden,
        tokens=job.tokens * job.micro_batches * job.data_parallel_size,
        gpus=job.data_parallel_size * stages,
        flops_per_token=account(job.shape, top_k=top_k, seq_length=job.seq_length).flops_per_token,
        exposed=often * (one.sum("exposed") + _exposed_inside(job, cluster, len(one.units))),
        reduction=reduction,
    )


def parameters(job: Job) -> tuple[float, float]:
    """Parameters of one rank: (dense, experts), the stages having equal shares."""
    counted = account(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    expert = 3 * job.shape.hidden_size * job.shape.expert_hidden_size
    layers = len(job.shape.moe_blocks) + job.shape.num_mtp_layers
    experts = layers * job.shape.num_experts * expert
    stages = job.pipeline_stages
    return (counted.params_total - experts) / stages, experts / job.expert_parallel_size / stages


def _exposed_inside(job: Job, cluster: Cluster, layers: int) -> float:
    """Seconds of a fused path: what its transfers take longer than its products, forward and backward of all layers."""
    if not job.fused or cluster.kind == "cpu":
        return 0.0
    both = layer_seconds(job.layer(cluster), cluster)
    return layers * sum(max(0.0, one.dispatch + one.combine - one.experts) for one in both)


def exposed_reduction(job: Job, cluster: Cluster, *, forward: float, backward: float) -> float:
    """Seconds of a step in which gradients are summed, or spread weights gathered, and nothing else is done.

    Args:
        forward, backward: Compute of one micro-batch, behind which it may hide.
    """
    # An emulated link slows exchanges only.
    own = cluster if cluster.own_bandwidth is None else cluster.with_own_links()
    weight, gradient, _ = job.state_bytes
    if job.sharding != "all":
        return max(0.0, _reduction(job, own, gradient) - backward)
    # Gathering is half of an all-reduce, and so is scattering; both happen in every micro-batch.
    gather, scatter = _reduction(job, own, weight) / 2, _reduction(job, own, gradient) / 2
    late = max(0.0, gather - forward) + max(0.0, (job.gathers - 1) * gather + scatter - backward)
    return job.micro_batches * late


def _reduction(job: Job, cluster: Cluster, size: int) -> float:
    """Sum of values of `size` bytes over the ranks that hold the same weights."""
    dense, experts = parameters(job)
    per_domain = ranks_of_domain(job.data_parallel_size, cluster.gpus_per_domain)
    copies_near = max(1, per_domain // job.expert_parallel_size)
    return _all_reduce(size * dense, job.data_parallel_size, per_domain, cluster) + _all_reduce(
        size * experts, job.expert_data_parallel_size, copies_near, cluster
    )


def _all_reduce(size: float, ranks: int, per_domain: int, cluster: Cluster) -> float:
    """Inside the domains first, then between them with a share each."""
    if ranks == 1:
        return 0.0
    per_domain = min(per_domain, ranks)
    domains = ranks // per_domain
    near = 2 * size * (per_domain - 1) / per_domain / cluster.fast
    far = 2 * size / per_domain * (domains - 1) / domains / cluster.slow if domains > 1 else 0.0
    return near + far


def _optimizer(job: Job, cluster: Cluster) -> float:
    dense, experts = parameters(job)
    if job.sharding != "none":
        dense, experts = dense / job.data_parallel_size, experts / job.expert_data_parallel_size
    return OPTIMIZER_PASSES * sum(job.state_bytes) * (dense + experts) / cluster.memory
