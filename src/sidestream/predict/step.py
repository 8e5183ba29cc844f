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
from sidestream.predict.schedules import NOTHING, Both, Pass, Schedule, Unit, passes

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
        unit_forward, unit_backward: Its passes.
        parts: Of the step, one after another as if serial; `hidden` is not among them.
        hidden: What the schedule hides.
        seconds: Of the step: the parts without what is hidden.
        tokens: Of the step, all ranks.
        gpus: All of them.
        flops_per_token: Model FLOPs, forward and backward.
    """

    layer: tuple[Seconds, Seconds]
    unit: Pass
    unit_forward: Pass
    unit_backward: Pass
    parts: tuple[Part, ...]
    hidden: float
    seconds: float
    tokens: int
    gpus: int
    flops_per_token: int
    exposed: float

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens / self.seconds / self.gpus

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP per second."""
        return self.tokens_per_second_per_gpu * self.flops_per_token


def attention_seconds(job: Job, cluster: Cluster, flops: ForwardFlops, block: int) -> Both:
    """Of one attention with its norm and its residual."""
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
    """Of a gated feed-forward with its norm and residual; nothing if it has no width."""
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
    if job.schedule.fused:
        return fused(forward, cluster), fused(backward, cluster)
    return forward, backward


def unit_of(job: Job, cluster: Cluster, flops: ForwardFlops, block: int) -> Unit:
    """The MoE unit of a block."""
    shape, moe = job.shape, routed_seconds(job, cluster)
    before = NOTHING, NOTHING
    if job.schedule.name == "shortcut" and job.schedule.tap != "pos1":
        before = (
            attention_seconds(job, cluster, flops, block - 1),
            feed_forward_seconds(job, cluster, shape.ffn_hidden_size),
        )
    attention = attention_seconds(job, cluster, flops, block)
    shared = feed_forward_seconds(job, cluster, shape.shared_width)
    if shape.activation_checkpointing:
        attention, shared = _repeated(attention), _repeated(shared)
        before = _repeated(before[0]), _repeated(before[1])
        moe = moe[0], replace(moe[1], experts=moe[1].experts + moe[0].experts)
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


def schedule_of(job: Job, block: int) -> Schedule:
    """`tap=auto`: pos2 behind a dense block, else pos1."""
    if job.schedule.tap != "auto":
        return job.schedule
    dense_before = block > 0 and block - 1 not in job.shape.moe_blocks
    return replace(job.schedule, tap="pos2" if dense_before else "pos1")


def unit_passes(job: Job, cluster: Cluster, block: int) -> tuple[Pass, Pass]:
    """Forward and backward of the MoE unit of a block."""
    chosen = job.with_schedule(schedule_of(job, block))
    flops = forward_flops(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    unit = unit_of(chosen, cluster, flops, block)
    return passes(unit, chosen.schedule, wire_on_compute=cluster.wire_on_compute)


def step(job: Job, cluster: Cluster) -> Step:
    """Predict a training step.

    Raises:
        ValueError: Something about the machine that it takes is not known.
    """
    shape = job.shape
    flops = forward_flops(shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    blocks = [*shape.moe_blocks, *(shape.num_layers - 1 for _ in range(shape.num_mtp_layers))]
    timed = {block: unit_passes(job, cluster, block) for block in blocks}
    inside = {block - 1 for block in shape.moe_blocks if _takes_block_before(job, block)}
    dense = [b for b in range(shape.num_layers) if b not in shape.moe_blocks and b not in inside]

    units = [one for block in blocks for one in timed[block]]
    dense_parts = [
        attention_seconds(job, cluster, flops, block)
        + feed_forward_seconds(job, cluster, shape.ffn_hidden_size)
        for block in dense
    ]
    if shape.activation_checkpointing:
        dense_parts = [_repeated(part) for part in dense_parts]
    head = head_seconds(job, cluster, flops) * (1 + shape.num_mtp_layers)
    mtp = shape.num_mtp_layers * 3 * flops.mtp_projection * job.tokens / cluster.products(job.math)

    # Stages share the work evenly; a stage waits while the pipeline fills and drains.
    stages, micro = job.pipeline_stages, job.micro_batches
    per_micro = sum(part.total for part in dense_parts) + head.total + mtp
    scheduled = sum(one.seconds for one in units) + per_micro
    bubble = (stages - 1) / job.virtual_stages * scheduled / stages
    communication = micro / stages * sum(one.communication for one in units)
    compute = micro / stages * sum(one.compute for one in units)
    hidden = micro / stages * sum(one.serial - one.seconds for one in units)
    backward = sum(one.seconds for block in blocks for one in timed[block][1:]) / stages
    reduction = max(0.0, _reduction(job, cluster) - backward)
    optimizer = _optimizer(job, cluster)
    parts = (
        Part("MoE units, compute", compute),
        Part("MoE units, dispatch and combine", communication),
        Part("dense blocks", micro / stages * sum(part.total for part in dense_parts)),
        Part("head and loss", micro / stages * (head.total + mtp)),
        Part("pipeline bubble", bubble),
        Part("gradient reduction, exposed", reduction),
        Part("optimizer", optimizer),
    )
    # The last block stands for the others: what lies in front of the first ones is often dense.
    forward_pass, backward_pass = timed[shape.moe_blocks[-1]]
    counted = account(shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    return Step(
        layer=routed_seconds(job, cluster),
        unit=forward_pass + backward_pass,
        unit_forward=forward_pass,
        unit_backward=backward_pass,
        parts=parts,
        hidden=hidden,
        seconds=sum(part.seconds for part in parts) - hidden,
        tokens=job.tokens * micro * job.data_parallel_size,
        gpus=job.data_parallel_size * stages,
        flops_per_token=counted.flops_per_token,
        exposed=micro / stages * sum(one.exposed for one in units),
    )


def _takes_block_before(job: Job, block: int) -> bool:
    return schedule_of(job, block).name == "shortcut" and schedule_of(job, block).tap != "pos1"


def parameters(job: Job) -> tuple[float, float]:
    """Of one rank: (dense, experts), the stages having equal shares."""
    counted = account(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    expert = 3 * job.shape.hidden_size * job.shape.expert_hidden_size
    layers = len(job.shape.moe_blocks) + job.shape.num_mtp_layers
    experts = layers * job.shape.num_experts * expert
    stages = job.pipeline_stages
    return (counted.params_total - experts) / stages, experts / job.expert_parallel_size / stages


def _reduction(job: Job, cluster: Cluster) -> float:
    """Sum of gradients over the ranks that hold the same weights."""
    dense, experts = parameters(job)
    per_domain = ranks_of_domain(job.data_parallel_size, cluster.gpus_per_domain)
    copies_near = max(1, per_domain // job.expert_parallel_size)
    size = job.state_bytes[1]
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
