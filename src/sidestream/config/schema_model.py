"""Keys of the model and of what happens inside an MoE layer: router, balance, dispatcher, experts, overlap."""

from dataclasses import dataclass
from typing import Any

from sidestream.config.schema_key import Component, key, one_of

# ruff: noqa: RUF009 - `key()` and `one_of()` are dataclasses.field() with our limits in it


@dataclass
class LatentAttention:
    """Widths of multi-head latent attention."""

    q_lora_rank: int | None = key(
        "width of the compressed queries; null: queries straight from the input", low=1
    )
    kv_lora_rank: int = key("width of the compressed keys and values", low=1)
    qk_nope_head_dim: int = key("width of a head's queries and keys without positions", low=1)
    qk_rope_head_dim: int = key("width of a head's queries and keys with rotary positions, even", low=2)
    v_head_dim: int = key("width of a head's values", low=1)


@dataclass
class Model:
    """A transformer with MoE layers."""

    vocab_size: int | None = key(
        "rows of the embedding; null: as many tokens as the data has", low=1, high=2**24
    )
    # Beyond 10,000, even counting the blocks takes minutes.
    num_layers: int = key("transformer blocks", low=1, high=10_000)
    hidden_size: int = key("width of the residual stream", low=1)
    num_heads: int = key("attention heads", low=1, high=2**16)
    num_kv_heads: int = key("key-value heads; divides `num_heads`", low=1)
    head_dim: int | None = key("width of a head, even; null: `hidden_size / num_heads`", low=2)
    qk_norm: str = one_of(
        ("none", "head", "full"), "RMS norm of queries and keys: of each head, or of all heads together"
    )
    mla: LatentAttention | None = key(
        "multi-head latent attention as in `deepseek_v3`: a map of the five widths below; null: grouped-query attention"
    )
    sliding_window: int | None = key("tokens a token may look back, itself included; null: all", low=1)
    full_attention_layers: Any = key(
        "blocks without the window: n is every n-th, or a list of indices from 0"
    )
    ffn_hidden_size: int = key("width of the feed-forward in dense blocks", low=1)
    moe_layers: Any = key(
        "n: every n-th block is MoE; or a list of block indices from 0; `[]` is a dense model"
    )
    first_dense_layers: int = key("blocks at the start that are dense whatever `moe_layers` says", low=0)
    num_experts: int = key("routed experts of each MoE block, over all ranks", low=1)
    expert_hidden_size: int = key("width inside an expert", low=1)
    num_shared_experts: int = key("experts every token passes, computed where the token is", low=0)
    shared_expert_hidden_size: int | None = key(
        "width of all shared experts together; null: `num_shared_experts * expert_hidden_size`", low=1
    )
    shared_expert_gate: bool = key("scale the shared experts' output by a learned sigmoid per token")
    tie_embeddings: bool = key("the head uses the embedding's weights")
    dropout: float = key(
        "probability, on the embedding and on what attention and feed-forward add", low=0.0, high=1.0
    )
    activation_checkpointing: bool = key(
        "compute attention, feed-forward and experts again in backward instead of keeping what they need; "
        "never an exchange or the router"
    )
    rope_theta: float = key("base of the rotary positions", above=0.0)
    norm_eps: float = key("added to the mean square in every RMS norm", above=0.0)
    init_std: float = key("standard deviation of the initial weights", low=0.0)
    num_mtp_layers: int = key("layers of multi-token prediction: counted by `predict.py`, not trained", low=0)
    trainable: bool = key("false: a preset that `predict.py` knows and `train.py` refuses")


@dataclass
class TopKRouter(Component):
    """A score for every expert; a token goes to the top k."""

    top_k: int = key("experts per token, at most `model.num_experts`")  # so its limit is in routing_check.py
    normalize: bool | str = one_of(
        ("auto", True, False),
        "divide the chosen weights by their sum; `auto`: when `top_k` > 1 (with 1 the router would not be trained) "
        "and the weights do not add up to 1 anyway",
    )
    score_order: str = one_of(
        ("before_top_k", "after_top_k"),
        "score all experts and choose, or choose by logits and score the chosen (Mixtral); without bias and groups "
        "this matters for `softmax` only",
    )
    scaling_factor: float = key("multiplies the weights, after normalisation", above=0.0)
    num_groups: int | None = key("groups of neighbouring experts; null: no limit", low=1)
    top_groups: int | None = key(
        "groups a token may use, a divisor of `top_k`; a group counts as the sum of its `top_k / top_groups` best "
        "experts",
        low=1,
    )
    jitter: float = key(
        "in training the gate's input is multiplied by a random number from 1 - jitter to 1 + jitter",
        low=0.0,
        high=1.0,
    )
    expert_capacity_factor: float | None = key(
        "an expert takes ceil(factor x its even share of the places of a rank's micro-batch, padding included), also "
        "in validation; the rest is dropped and adds 0; null drops nothing",
        above=0.0,
        high=1000.0,
    )
    drop_policy: str = one_of(
        ("probs", "position"),
        "with a capacity: keep the largest weights, or the first tokens; kept weights are not renormalised",
    )
    pad_to_capacity: bool = key("with a capacity: fill every expert up to it with zero rows")
    force_balance: bool = key(
        "for benchmarks: deal the experts out evenly instead of choosing, weighted by the router's scores, which "
        "still train the gate; changes the model"
    )


@dataclass
class Balance(Component):
    """What every balance has."""

    z_loss_coefficient: float = key("weight of the router z-loss, which keeps logits small", low=0.0)


@dataclass
class AuxLoss(Balance):
    """The Switch auxiliary loss."""

    coefficient: float = key("weight in the total loss", low=0.0)
    scope: str = one_of(
        ("sequence", "micro_batch", "global"),
        "tokens over which load is compared; `sequence` and `global` do not depend on how a batch is cut; `global` "
        "costs a small reduction per step and, with A micro-batches, A - 1 more forward passes",
    )


@dataclass
class ExpertBias(Balance):
    """A bias on the choice that moves by the load."""

    update_rate: float = key(
        "step of the bias, up for experts below the mean load and down for those above", low=0.0
    )


@dataclass
class QuantileBalance(Balance):
    """A bias on the choice that is computed from the scores."""

    ema: float = key(
        "share of the old bias that is kept; the new one is the mean of one estimate per rank and micro-batch",
        low=0.0,
        high=0.999,
    )


@dataclass
class Dispatcher(Component):
    """Token rows to the ranks of their experts and back."""

    capacity_factor: float | None = key(
        "null: exact sizes, one host read per layer and forward pass (eager). A number: a receive buffer of "
        "`ceil(capacity_factor x tokens x router.top_k)` rows per rank for the tokens that travel together, a "
        "micro-batch or the part of it that a schedule sends at once; fixed shapes, no host read (static); 1.0 is the "
        "even share, below it overflows often; not together with `router.pad_to_capacity`",
        above=0.0,
        high=1000.0,
    )
    alignment: int = key(
        "rows of each expert are padded to a multiple of this, a power of two; combined with `fusion.alignment`",
        low=1,
        high=2**16,
    )
    on_overflow: str = one_of(
        ("replay", "drop", "error"),
        "when a static buffer is too small for a step: attempt the step again with a larger one, lose the routes that "
        "do not fit, or end the run; means nothing without a `capacity_factor`",
    )


@dataclass
class LibraryDispatcher(Dispatcher):
    """A library's dispatcher, or its contract on torch.distributed."""

    transport: str = one_of(
        ("auto", "library", "torch"),
        "what moves the rows: the library, or the same contract on torch.distributed; `auto` takes the library where "
        "it can be imported, the ranks are on GPUs and share experts",
    )
    wire_dtype: str = one_of(
        ("model", "mxfp8"),
        "rows travel as they are; or 8-bit with one scale per 32 values, in dispatch forward and combine backward; "
        "`mxfp8` needs the torch transport and a hidden size that is a multiple of 32",
    )


@dataclass
class Experts(Component):
    """How the experts of a rank are computed."""

    alignment: int | str = key(
        "rows of each expert are padded to a multiple; `auto` = 16 for bf16 on a CPU, else 1",
        low=1,
        high=2**16,
        auto=True,
    )


@dataclass
class MegaExperts(Experts):
    """Dispatch, experts and combine in one operation."""

    library: str = one_of(
        ("auto", "windows", "triton", "mok"),
        "what does it: ranks of one CPU host over shared memory; Triton kernels over symmetric memory; "
        "Mixture-of-Kittens. `auto` is `windows` on CPUs and `triton` on GPUs",
    )
    capacity_factor: float | None = key(
        "null: room for the worst case, of which only what is used takes memory (`windows`). A number: room for that "
        "many times the mean load, as `dispatcher.capacity_factor`",
        above=0.0,
        high=1000.0,
    )
    on_overflow: str = one_of(("replay", "drop", "error"), "as `dispatcher.on_overflow`")


@dataclass
class NoOverlap(Component):
    """Every transfer is waited for where it starts."""

    enabled: bool = key(
        "false runs a schedule serially, with the same numbers bit for bit; `none` is serial anyway",
        default=True,
    )


@dataclass
class Overlap(NoOverlap):
    """A schedule: what is computed while rows travel."""

    delay_wgrad: bool = key(
        "compute the experts' weight gradients while the reverse dispatch travels; the same numbers bit for bit; "
        "needs `fusion=grouped` and `strategy=replicate`"
    )


@dataclass
class ChunkedOverlap(Overlap):
    """Tokens travel in chunks."""

    num_chunks: int = key(
        "chunks of nearly equal numbers of tokens, at least 2; the first dispatch and the last combine stay exposed",
        low=2,
    )


@dataclass
class ShortcutOverlap(Overlap):
    """Routed experts read an earlier representation (ScMoE)."""

    tap: str = one_of(
        ("auto", "pos1", "pos2", "pos3"),
        "where the routed experts read: what the block in front returned, what its attention returned, what it was "
        "given; `auto` = pos2 behind a dense block, else pos1; pos2 and pos3 need a dense block in front of every MoE "
        "block",
    )
    mix: str = one_of(
        ("add", "cg1", "cg2"),
        "shared and routed experts are added, the shared ones scaled by a sigmoid, or both weighted by a softmax; the "
        "gate reads what the shared expert reads",
    )
    tap_norm: bool = key(
        "a norm of its own in front of the gate and the routed experts; false: they read the residual stream as it is"
    )
    post_norm: bool = key("a norm on the sum of shared and routed experts")
    double_gating: bool = key(
        "DGMoE: two top-1 gates share the experts and never choose the same one; needs `router.top_k=1` and "
        "`model.num_shared_experts=0`"
    )
    slot: int | str = key(
        "experts run after so many of the steps beside them (feed-forward, attention, shared expert at pos2); `auto` "
        "= from times measured in the first 3 steps, which run serially; changes no number",
        low=0,
        auto=True,
    )
