"""Bytes of memory of one rank. State is counted by parameter, stages having equal shares; activations are those that a
backward pass needs.

Legend: T tokens of a rank in a forward pass, K routes per token, D hidden, F expert width, b bytes of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.model.account import account
from sidestream.predict.cluster import Cluster
from sidestream.predict.job import Job
from sidestream.predict.kernels import VALUE_BYTES
from sidestream.predict.step import parameters

RESERVED = 0.05  # of the memory, for the framework, fragments and workspaces


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most.

    Attributes:
        weights, gradients, optimizer: State.
        gathered: With everything spread: the largest block's weights, whole, and their gradients.
        activations: Kept for backward, of all micro-batches in flight, receive buffers of static dispatchers included.
        exchange: Send and receive buffers of one layer.
        logits: Of one micro-batch, with their gradient.
        available: What a GPU has, without what is reserved.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    exchange: float
    logits: float
    available: float

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer + self.gathered
        return state + self.activations + self.exchange + self.logits

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def memory(job: Job, cluster: Cluster) -> Memory:
    """What a rank needs, and what there is."""
    dense, experts = parameters(job)
    weight, gradient, optimizer = job.state_bytes
    copies, expert_copies = job.data_parallel_size, job.expert_data_parallel_size
    state = dense + experts
    spread = dense / copies + experts / expert_copies
    held = spread if job.sharding == "all" else state
    value = VALUE_BYTES[job.math]
    layer = job.layer(cluster)
    shape = job.shape
    return Memory(
        weights=weight * held,
        gradients=gradient * held,
        optimizer=optimizer * (state if job.sharding == "none" else spread),
        gathered=(weight + gradient) * largest_block(job) if job.sharding == "all" else 0.0,
        activations=_in_flight(job) * activations(job, cluster),
        exchange=0.0
        if layer.ranks == 1
        else 2
        * max(layer.rows, layer.mover.slots * layer.tokens * layer.routes.top_k)
        * shape.hidden_size
        * value,
        # fp32, the first and last stage hold them.
        logits=2 * 4 * job.tokens * shape.vocab_size,
        available=(1 - RESERVED) * cluster.memory_bytes,
    )


def largest_block(job: Job) -> float:
    """Parameters of one rank's part of a MoE block; in a dense model, of any."""
    counted = account(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    _, experts = parameters(job)
    layers = len(job.shape.moe_blocks) + job.shape.num_mtp_layers
    outside = counted.params_total - counted.params_embedding * (1 if job.shape.tie_embeddings else 2)
    whole = layers * job.shape.num_experts * 3 * job.shape.hidden_size * job.shape.expert_hidden_size
    return job.pipeline_stages * experts / max(1, layers) + (outside - whole) / job.shape.num_layers


def _in_flight(job: Job) -> float:
    """Micro-batches of which the first stage keeps activations, in those of all its blocks (1F1B, interleaved)."""
    if job.pipeline_stages == 1:
        return 1.0  # interleaved, too: the next forward pass takes room as a backward pass frees it
    stages, virtual = job.pipeline_stages, job.virtual_stages
    most = stages if virtual == 1 else stages * (1 + (stages - 1) / (stages * virtual))
    return min(most, job.micro_batches) / stages


def activations(job: Job, cluster: Cluster) -> float:
    """Bytes that all blocks keep of one micro-batch."""
    shape = job.shape
    moe = len(shape.moe_blocks) + shape.num_mtp_layers
    dense = shape.num_layers - len(shape.moe_blocks)
    per_token = (moe + dense) * _attention(job) + dense * _feed_forward(job, shape.ffn_hidden_size)
    per_token += moe * (_feed_forward(job, shape.shared_width) + job.gates * _routed(job))
    return per_token * job.tokens


def _attention(job: Job) -> float:
    """Per token: input, norm, projections, output; with recomputation the input only."""
    shape, value = job.shape, VALUE_BYTES[job.math]
    if shape.activation_checkpointing:
        return value * shape.hidden_size
    if shape.mla is not None:
        mla = shape.mla
        latents = (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim
        heads = shape.num_heads * (2 * mla.qk_head_dim + 2 * mla.v_head_dim)
        return value * (2 * shape.hidden_size + 2 * latents + heads)
    width = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_width
    return value * (2 * shape.hidden_size + width)


def _feed_forward(job: Job, width: int) -> float:
    """Per token: input, norm, both halves and their product."""
    if not width:
        return 0.0
    value = VALUE_BYTES[job.math]
    if job.shape.activation_checkpointing:
        return value * job.shape.hidden_size
    return value * (2 * job.shape.hidden_size + 3 * width)


def _routed(job: Job) -> float:
    """Per token: scores, and of each slot of the busiest rank its row, both halves and their product."""
    shape, value = job.shape, VALUE_BYTES[job.math]
    slots = job.routes.top_k * max(job.skew, job.mover.slots)
    # 8-bit products keep their operands as they took them; both halves wait for the activation's backward in 16 bits.
    operand = 1 if job.math in ("fp8", "mxfp8") else value
    kept = operand * shape.hidden_size
    if not shape.activation_checkpointing:
        kept += (operand + 2 * value) * shape.expert_hidden_size
    return 2 * value * shape.hidden_size + slots * kept + 8 * shape.num_experts
