"""What a resumed run may change: for every key, whether it is free, changes what follows, or is refused.

The one place that decides; `launch/resume.py` asks it, docs/resume.md is written from it, and
`tests/train/test_resume_contract.py` changes every key and holds a run to it. No torch here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["free", "changes", "refused"]
Flat: TypeAlias = Mapping[str, Any]  # dotted key -> value of a resolved config

KINDS: dict[Kind, str] = {
    "free": "the run goes on bit for bit as without the change",
    "changes": "what follows is computed with the new value, from the next step on",
    "refused": "one line, exit code 2, before any rank starts",
}


@dataclass(frozen=True)
class Rule:
    """What becomes of a changed key.

    Attributes:
        why: One clause, for the table and for the refusal.
        said: Stands behind the line that reports the change, where the new value does less than one may think.
    """

    kind: Kind
    why: str
    said: str = ""


@dataclass(frozen=True)
class SpecialCase:
    """Another rule under a condition on the values before and after.

    Attributes:
        when: For the table: "with dispatcher.on_overflow=drop".
        holds: Of the flat configs before and after, for the key it belongs to.
    """

    when: str
    holds: Callable[[Flat, Flat], bool]
    rule: Rule


_SHAPE = "the weights in the checkpoint have these sizes"
_FUNCTION = "the weights were trained as part of this function"
_ROUTING = "the experts were trained on this choice of tokens"
_BALANCE = "a bias and the load of the experts follow from it since the first step"
_TEXT = "the run goes through this text, cut this way"
_ROUNDING = "the same numbers but for the rounding of sums"
_SCHEDULE = "the rate of the steps to come follows it, as if it had held from the first step"
_SHOWN = "what is recorded or shown"
_TIME = "time and memory only"
_ADDRESSES = "where files lie"
_LAYOUT = _ROUNDING + "; with other ranks dropout and jitter draw other random numbers"
_PREDICTED = "of predict.py"

_FREE_STANDING: tuple[tuple[Kind, str, str], ...] = (
    ("refused", _SHAPE, "model.vocab_size model.num_layers model.hidden_size model.num_heads model.num_kv_heads"),
    ("refused", _SHAPE, "model.head_dim model.qk_norm model.mla model.ffn_hidden_size model.moe_layers"),
    ("refused", _SHAPE, "model.mla.q_lora_rank model.mla.kv_lora_rank model.mla.qk_nope_head_dim"),
    ("refused", _SHAPE, "model.mla.qk_rope_head_dim model.mla.v_head_dim model.first_dense_layers"),
    ("refused", _SHAPE, "model.num_experts model.expert_hidden_size model.num_shared_experts"),
    ("refused", _SHAPE, "model.shared_expert_hidden_size model.shared_expert_gate model.tie_embeddings"),
    ("refused", _SHAPE, "model.num_mtp_layers model.trainable trainable"),
    ("refused", _FUNCTION, "model.sliding_window model.full_attention_layers model.dropout model.rope_theta"),
    ("refused", _FUNCTION, "model.norm_eps"),
    ("refused", "it is of the first weights, which are long gone", "model.init_std"),
    ("free", "activations are computed again instead of kept: " + _TIME, "model.activation_checkpointing"),
    ("refused", _ROUTING, "router._target_ router.top_k router.normalize router.score_order router.jitter"),
    ("refused", _ROUTING, "router.scaling_factor router.num_groups router.top_groups router.force_balance"),
    ("refused", _ROUTING, "router.expert_capacity_factor router.drop_policy router.pad_to_capacity"),
    ("refused", _BALANCE, "balance._target_ balance.coefficient balance.scope balance.update_rate"),
    ("refused", _BALANCE, "balance.ema balance.z_loss_coefficient"),
    ("changes", "rows travel another way: " + _ROUNDING, "dispatcher._target_ dispatcher.transport"),
    ("changes", "rows travel in this format", "dispatcher.wire_dtype"),
    ("changes", "room for rows decides kernels: " + _ROUNDING, "dispatcher.alignment fusion.alignment"),
    ("free", "room for rows; what does not fit is computed again", "dispatcher.capacity_factor"),
    ("free", "room for rows; what does not fit is computed again", "fusion.capacity_factor"),
    ("changes", "what becomes of rows that do not fit", "dispatcher.on_overflow fusion.on_overflow"),
    ("changes", "experts by other kernels: " + _ROUNDING, "fusion._target_ fusion.library"),
    ("changes", "the order of work: " + _ROUNDING, "overlap._target_ overlap.num_chunks"),
    ("free", _TIME, "overlap.enabled overlap.delay_wgrad overlap.slot"),
    ("refused", _FUNCTION, "overlap.tap overlap.mix overlap.tap_norm overlap.post_norm overlap.double_gating"),
    ("free", _TIME, "graph._target_ graph.backend graph.warmup_steps graph.include_optimizer graph.lint"),
    ("free", _TIME, "link._target_ link.gbps link.latency_us"),
    ("changes", _ROUNDING, "strategy._target_ strategy.bucket_mb"),
    ("changes", _LAYOUT, "strategy.expert_parallel_size trainer.devices trainer.num_nodes"),
    ("changes", "the device: " + _ROUNDING, "trainer.accelerator"),
    ("free", _TIME, "strategy.timeout_seconds strategy.reshard_after_forward trainer.pin_cpu"),
    ("refused", "the checkpoint has the state of this optimizer", "optimizer._target_"),
    ("changes", "the update of the steps to come", "optimizer.lr optimizer.betas optimizer.eps"),
    ("changes", "the update of the steps to come", "optimizer.weight_decay optimizer.momentum"),
    ("changes", "another kernel: " + _ROUNDING, "optimizer.fused"),
    ("changes", _SCHEDULE, "scheduler._target_ scheduler.warmup_steps scheduler.min_ratio"),
    ("changes", _SCHEDULE, "scheduler.decay_fraction"),
    ("refused", _TEXT, "data._target_ data.val_fraction data.packing data.seq_length data.global_batch_size"),
    ("refused", _TEXT, "data.shuffle data.tokenizer data.vocab_size data.files data.val_files"),
    ("refused", _TEXT, "data.separator data.encoding data.config_name data.revision data.data_files data.split"),
    ("refused", _TEXT, "data.dataset data.val_split data.text_column data.streaming data.max_documents"),
    ("refused", _TEXT, "data.train_file data.val_file data.dtype data.eos_token"),
    ("changes", "how many sequences at once: " + _ROUNDING, "data.micro_batch_size"),
    ("free", _ADDRESSES, "data.cache_dir paths.cache_dir"),
    ("refused", "it draws the order of the data, and all that is random", "seed"),
    ("changes", "the end; and the rate of the steps to come, where the schedule has one", "trainer.max_steps"),
    ("changes", "the arithmetic of the steps to come", "trainer.precision"),
    ("changes", "the update of the steps to come", "trainer.gradient_clip_val"),
    ("changes", "which batches a validation loss is of", "trainer.limit_val_batches"),
    ("changes", "threads share sums: " + _ROUNDING, "trainer.threads_per_rank"),
    ("free", "when a validation happens", "trainer.val_check_interval"),
    ("free", _SHOWN, "trainer.log_every_n_steps trainer.peak_tflops callbacks.progress.enabled name debug"),
    ("free", "when checkpoints are written, and which are kept", "callbacks.checkpoint.every_n_steps"),
    ("free", "when checkpoints are written, and which are kept", "callbacks.checkpoint.keep_last"),
    ("free", "when the overlap is measured", "callbacks.overlap_report.every_n_steps"),
    ("free", "where metrics are mirrored", "logger._target_ logger.project logger.group logger.tags"),
    ("free", "where metrics are mirrored", "logger.offline"),
    ("free", "it names the run that goes on", "resume"),
    ("free", "which classes the command line trusts", "trusted_targets"),
    ("free", _PREDICTED, "predict.math predict.dispatch_wire predict.skew predict.pipeline_stages predict.plot"),
    ("free", _PREDICTED, "predict.virtual_stages predict.shard_optimizer predict.interleave predict.published"),
    ("free", _PREDICTED, "predict.published.tokens_per_second_per_gpu predict.published.tflops_per_gpu"),
    ("free", _PREDICTED, "predict.published.source predict.published.why"),
)  # fmt: skip

RULES: dict[str, Rule] = {
    **{key: Rule(kind, why) for kind, why, keys in _FREE_STANDING for key in keys.split()},
    "paths.log_dir": Rule("free", "where new runs are put", said="this run stays in its folder"),
    "initial_weights": Rule("free", "the checkpoint takes their place", said="not read: the checkpoint is"),
}

# Keys of an option of the user's own, in the groups that take one. Group -> rule.
OWN_KEYS: dict[str, Rule] = {
    "router": Rule("refused", _ROUTING),
    "balance": Rule("refused", _BALANCE),
    "data": Rule("refused", _TEXT),
    **{
        group: Rule("changes", "the class is built with the new value")
        for group in ("dispatcher", "fusion", "overlap", "graph", "link", "strategy")
    },
    "optimizer": Rule("changes", "the update of the steps to come"),
    "scheduler": Rule("changes", _SCHEDULE),
}
_GONE = Rule("changes", "an earlier version had this key")
_UNKNOWN = Rule("refused", "nobody knows what it does")

_SAME_BITS = ("overlap.none.NoOverlap", "overlap.shared_expert.SharedExpertOverlap")


def _either(key: str, *values: Any) -> Callable[[Flat, Flat], bool]:
    return lambda old, new: old.get(key) in values or new.get(key) in values


def _drops(group: str) -> SpecialCase:
    rule = Rule("changes", "which rows are dropped")
    when = f"with `{group}.on_overflow=drop`"
    return SpecialCase(when, _either(f"{group}.on_overflow", "drop"), rule)


def _of_a_shortcut(old: Flat, new: Flat) -> bool:
    return any(str(flat.get("overlap._target_")).endswith(".ShortcutOverlap") for flat in (old, new))


def _of_plain_order(old: Flat, new: Flat) -> bool:
    return all(str(flat.get("overlap._target_")).endswith(_SAME_BITS) for flat in (old, new))


CASES: dict[str, tuple[SpecialCase, ...]] = {
    "dispatcher.capacity_factor": (_drops("dispatcher"),),
    "fusion.capacity_factor": (_drops("fusion"),),
    "graph.lint": (
        SpecialCase(
            "to true",
            lambda old, new: bool(new.get("graph.lint")),
            Rule("refused", "it ends a run after a few steps, which are no training"),
        ),
    ),
    "initial_weights": (
        SpecialCase(
            "from null",
            lambda old, new: old.get("initial_weights") is None,
            Rule("refused", "the checkpoint has the weights that the run goes on with"),
        ),
    ),
    "optimizer.momentum": (
        SpecialCase(
            "from 0",
            lambda old, new: not old.get("optimizer.momentum"),
            Rule("refused", "the checkpoint has no momentum to go on with"),
        ),
    ),
    "overlap._target_": (
        SpecialCase("to or from `shortcut`", _of_a_shortcut, Rule("refused", _FUNCTION)),
        SpecialCase("between `none` and `shared_expert`", _of_plain_order, Rule("free", _TIME)),
    ),
    "trainer.precision": (
        SpecialCase(
            "to or from bf16-true",
            _either("trainer.precision", "bf16-true"),
            Rule("refused", "the weights are kept in another precision"),
        ),
    ),
}


def rule_of(key: str, old: Flat, new: Flat) -> Rule:
    """Returns what becomes of a changed key.

    Args:
        key: Dotted.
        old, new: The flat configs before and after.
    """
    for case in CASES.get(key, ()):
        if case.holds(old, new):
            return case.rule
    known = RULES.get(key) or OWN_KEYS.get(key.partition(".")[0])
    return known or (_UNKNOWN if key in new else _GONE)


__all__ = ["CASES", "KINDS", "OWN_KEYS", "RULES", "Flat", "Kind", "Rule", "SpecialCase", "rule_of"]
