"""What a person meant: the key or value behind a typo, an older habit or another framework's name."""

import difflib
from collections.abc import Iterable, Mapping, Sequence

from sidestream import cli
from sidestream.config.errors import ConfigError, as_typed
from sidestream.config.meant import OPEN, default_option, meant, options_of
from sidestream.config.schema import SCHEMAS, known_keys, options_with

# What people type, from other frameworks or older habits -> the key here.
RENAMED = {
    "model.top_k": "router.top_k",
    "model.router_topk": "router.top_k",
    "model.num_experts_per_tok": "router.top_k",
    "model.seq_length": "data.seq_length",
    "model.moe_every": "model.moe_layers",
    "model.moe_layer_freq": "model.moe_layers",
    "model.n_experts": "model.num_experts",
    "model.num_moe_experts": "model.num_experts",
    "model.num_local_experts": "model.num_experts",
    "model.n_shared_experts": "model.num_shared_experts",
    "model.num_shared": "model.num_shared_experts",
    "model.recompute": "model.activation_checkpointing",
    "model.checkpointing": "model.activation_checkpointing",
    "model.first_k_dense_replace": "model.first_dense_layers",
    "model.window_size": "model.sliding_window",
    "model.qk_layernorm": "model.qk_norm",
    "model.tie_word_embeddings": "model.tie_embeddings",
    "model.shared_expert_intermediate_size": "model.shared_expert_hidden_size",
    "trainer.expert_parallel_size": "strategy.expert_parallel_size",
    "model.expert_parallel_size": "strategy.expert_parallel_size",
    "expert_parallel_size": "strategy.expert_parallel_size",
    "strategy.ep": "strategy.expert_parallel_size",
    "ep": "strategy.expert_parallel_size",
    "data.batch_size": "data.global_batch_size",
    "trainer.batch_size": "data.global_batch_size",
    "trainer.max_epochs": "trainer.max_steps",
    "trainer.accumulate_grad_batches": "data.micro_batch_size",
    "router.capacity_factor": "router.expert_capacity_factor",
    "router.moe_expert_capacity_factor": "router.expert_capacity_factor",
    "router.n_group": "router.num_groups",
    "router.topk_group": "router.top_groups",
    "router.group_topk": "router.top_groups",
    "router.routed_scaling_factor": "router.scaling_factor",
    "router.norm_topk_prob": "router.normalize",
    "router.jitter_noise": "router.jitter",
    "router.input_jitter_eps": "router.jitter",
    "router.z_loss_coefficient": "balance.z_loss_coefficient",
    "router.aux_loss_coefficient": "balance.coefficient",
    "balance.z_loss": "balance.z_loss_coefficient",
    "lr": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "top_k": "router.top_k",
    "topk": "router.top_k",
    "model.topk": "router.top_k",
    "warmup_steps": "scheduler.warmup_steps",
    "optimizer.wd": "optimizer.weight_decay",
    "optimizer.warmup_steps": "scheduler.warmup_steps",
    "trainer.warmup_steps": "scheduler.warmup_steps",
    "model.ffn": "model.ffn_hidden_size",
    "model.dim": "model.hidden_size",
    "model.width": "model.hidden_size",
    "model.depth": "model.num_layers",
    "model.layers": "model.num_layers",
    "model.heads": "model.num_heads",
    "model.experts": "model.num_experts",
    "model.context": "data.seq_length",
    "data.path": "data.files",
    "data.file": "data.files",
    "data.bs": "data.global_batch_size",
    "data.context": "data.seq_length",
    "strategy.size": "strategy.expert_parallel_size",
    "project": "logger.project",
    "log_dir": "paths.log_dir",
    "logger.run_name": "name",
    "run_name": "name",
    "run": "resume",
}
# Key and value together say what is meant.
_MIXED = {"true": "trainer.precision=bf16-mixed", "false": "trainer.precision=32-true"}
FIXES = {
    "logger.mode": {"offline": "logger.offline=true", "online": "logger.offline=false"},
    **dict.fromkeys(("trainer.bf16", "trainer.fp16", "trainer.amp", "bf16", "fp16", "amp"), _MIXED),
}
_NOT_OF_TRAIN = ("measure", "cluster", "predict")  # groups
WHY_RENAMED = {
    "trainer.accumulate_grad_batches": "accumulation follows from the global and the micro-batch size",
    "trainer.max_epochs": "training is counted in optimizer steps",
}
# The same by the last part of a key, in whatever group it was looked for.
SYNONYMS = {
    "num_hidden_layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "n_layers": "model.num_layers",
    "d_model": "model.hidden_size",
    "n_embd": "model.hidden_size",
    "hidden_dim": "model.hidden_size",
    "num_attention_heads": "model.num_heads",
    "n_head": "model.num_heads",
    "n_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "num_query_groups": "model.num_kv_heads",
    "intermediate_size": "model.ffn_hidden_size",
    "moe_intermediate_size": "model.expert_hidden_size",
    "moe_ffn_hidden_size": "model.expert_hidden_size",
    "num_experts_per_tok": "router.top_k",
    "topk_experts": "router.top_k",
    "moe_router_topk": "router.top_k",
    "context_length": "data.seq_length",
    "max_position_embeddings": "data.seq_length",
    "block_size": "data.seq_length",
    "seq_len": "data.seq_length",
    "sequence_length": "data.seq_length",
    "batch_size": "data.global_batch_size",
    "gradient_accumulation_steps": "data.micro_batch_size",
    "learning_rate": "optimizer.lr",
    "num_warmup_steps": "scheduler.warmup_steps",
    "warmup": "scheduler.warmup_steps",
    "max_iters": "trainer.max_steps",
    "train_iters": "trainer.max_steps",
    "num_steps": "trainer.max_steps",
    "steps": "trainer.max_steps",
    "epochs": "trainer.max_steps",
    "max_epochs": "trainer.max_steps",
    "num_gpus": "trainer.devices",
    "gpus": "trainer.devices",
    "ranks": "trainer.devices",
    "world_size": "trainer.devices",
    "max_grad_norm": "trainer.gradient_clip_val",
    "clip_grad": "trainer.gradient_clip_val",
    "grad_clip": "trainer.gradient_clip_val",
    "eval_interval": "trainer.val_check_interval",
    "eval_every": "trainer.val_check_interval",
    "val_every": "trainer.val_check_interval",
    "log_interval": "trainer.log_every_n_steps",
    "save_interval": "callbacks.checkpoint.every_n_steps",
    "save_top_k": "callbacks.checkpoint.keep_last",
    "every_n_train_steps": "callbacks.checkpoint.every_n_steps",
    "save_every": "callbacks.checkpoint.every_n_steps",
    "ep_size": "strategy.expert_parallel_size",
    "expert_model_parallel_size": "strategy.expert_parallel_size",
    "router_aux_loss_coef": "balance.coefficient",
    "aux_loss_coef": "balance.coefficient",
    "moe_aux_loss_coeff": "balance.coefficient",
    "moe_z_loss_coeff": "balance.z_loss_coefficient",
    "bias_update_speed": "balance.update_rate",
    "output_dir": "paths.log_dir",
    "out_dir": "paths.log_dir",
    "wandb_project": "logger.project",
}
# What another program reads and Sidestream does not.
ELSEWHERE = {
    "logger.entity": "run with the variable WANDB_ENTITY=<entity>",
    "logger.name": "run with name=<name>, which names the folder and the run",
    "logger.id": "remove logger.id: a resumed run keeps its own",
    "logger.log_model": "remove logger.log_model: checkpoints stay in the run's folder",
}
# Options of groups by names that people bring along.
OPTIONS = {
    "optimizer": {"adam": "adamw", "momentum": "sgd"},
    "scheduler": {"linear": "wsd", "none": "constant", "false": "constant", "warmup": "wsd"},
    "dispatcher": {
        **dict.fromkeys(("a2a", "all2all", "all_to_all", "all-to-all", "nccl"), "alltoall"),
        **dict.fromkeys(("deepep", "deep-ep"), "deep_ep"),
        **dict.fromkeys(("ncclep", "nccl-ep"), "nccl_ep"),
        **dict.fromkeys(("hybridep", "hybrid-ep"), "hybrid_ep"),
    },
    "overlap": {
        "true": "chunked",
        "false": "none",
        "scmoe": "shortcut",
        "dualpipe": "two_batch",
        "tbo": "two_batch",
        "batch": "two_batch",
    },
    "fusion": {"megamoe": "mega", "grouped_gemm": "grouped", "grouped_mm": "grouped", "sequential": "loop"},
    "graph": {"cuda": "step", "cuda_graph": "step", "cudagraph": "step", "true": "step", "false": "none"},
    "strategy": {"fsdp": "fully_shard", "fsdp2": "fully_shard", "ddp": "replicate"},
    "logger": {
        "wandb_offline": "wandb",
        "tb": "tensorboard",
        "true": "csv",
        "false": "none",
        "jsonl": "none",
    },
    "router": {"topk": "softmax", "top_k": "softmax", "sqrt_softplus": "sqrtsoftplus"},
    "balance": {"aux": "aux_loss", "auxloss": "aux_loss", "loss_free": "bias", "aux_free": "bias"},
    "data": {"hf": "huggingface", "txt": "text", "bin": "tokens", "python": "python_source"},
    "model": {"mixtral": "mixtral_8x7b", "olmoe": "olmoe_1b_7b", "qwen3": "qwen3_30b_a3b"},
}


def unknown_key(
    key: str, value: object, siblings: Iterable[str] = (), chosen: Mapping[str, str] | None = None
) -> ConfigError:
    """Explains a key that no schema has: by its new name, or by the names that look like it.

    Args:
        key: Dotted.
        value: What it was set to.
        siblings: Keys that are there beside it, a user's own included.
        chosen: Group -> option on the command line. None: not known, so no option is advised beside a key.
    """
    siblings = list(siblings)
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    if fix := ELSEWHERE.get(key) or FIXES.get(key, {}).get(str(as_typed(value)).lower()):
        beside = ", ".join(sorted(name for name in siblings if name[0] != "_")) or "one that the group has"
        return ConfigError(key, value, "no such key", expected=beside, fix=fix)
    new = RENAMED.get(key) or SYNONYMS.get(last)
    if new is not None and last not in siblings:
        why = WHY_RENAMED.get(key, "this key has another name here")
        shown = OPEN if key in WHY_RENAMED else None
        return ConfigError(key, value, why, expected=new, fix=_set(new, value, chosen, shown=shown))
    if options := [name for name in options_with(key) if name in options_of(group)]:
        why = f"only another option of {group} has this key"
        expected = f"it beside {group}={' or '.join(options)}"
        return ConfigError(key, value, why, expected=expected, fix=f"{group}={options[0]}")
    near = nearest(key, siblings)
    if not near:
        listing = cli.spelled("one of the keys of `python train.py --cfg job`")
        return ConfigError(key, value, "no such key", expected=listing, fix=f"remove {key}")
    expected = f"one of {', '.join(near)}"
    return ConfigError(key, value, "no such key", expected=expected, fix=_set(near[0], value, chosen))


def _set(key: str, value: object, chosen: Mapping[str, str] | None, *, shown: str | None = None) -> str:
    """The override that was meant, with the option that has this key where another one is chosen."""
    group, inner, _ = key.partition(".")
    if key in SCHEMAS:
        return f"{key}={OPEN if isinstance(value, dict) or value == '...' else as_typed(value)}"
    if shown is None and not isinstance(value, dict | None) and value != "...":
        shown = meant(key, value)
    beside = ""
    if chosen is not None and inner:
        option, having = chosen.get(group) or str(default_option(group)), options_with(key)
        if option in SCHEMAS.get(group, {}) and having and option not in having:
            beside = f"{group}={next((name for name in having if name in options_of(group)), '<option>')} "
    return f"{beside}{key}={shown or OPEN}"


def nearest(key: str, siblings: Iterable[str] = ()) -> list[str]:
    """Returns up to three keys that `key` may stand for, the likeliest first; none rather than a far one.

    First those beside it whose last part looks alike, then the same last part elsewhere, then a group that is
    spelled almost so, then a last part elsewhere that looks alike.
    """
    above, _, last = key.rpartition(".")
    prefix, group = f"{above}." if above else "", above.partition(".")[0]
    # train.py has not all groups: what a key of no group may be, is in one that it has.
    known = [
        k
        for k in [*known_keys(), *SCHEMAS]
        if k.partition(".")[0] not in _NOT_OF_TRAIN or k.startswith(prefix or "-")
    ]
    known = list(dict.fromkeys(known))
    beside = dict.fromkeys(s for s in siblings if s != last and not s.startswith("_"))
    beside |= dict.fromkeys(
        k.removeprefix(prefix) for k in known if k.startswith(prefix) and "." not in k.removeprefix(prefix)
    )
    found = [f"{prefix}{name}" for name in _alike(last, list(beside))]
    elsewhere = [k for k in known if k.rpartition(".")[2] == last and k != key]
    if above and group not in SCHEMAS:  # the group itself is misspelled
        for meant_group in _alike(group, list(SCHEMAS)):
            moved = f"{meant_group}.{key.partition('.')[2]}"
            elsewhere = [k for k in [moved] if k in known] + nearest(moved)[:1] + elsewhere
    parts = {k.rpartition(".")[2]: k for k in reversed(known)}
    loosely = [parts[name] for name in _alike(last, list(parts))]
    ordered = [*found, *elsewhere, *loosely] if above else [*elsewhere, *found, *loosely]
    return list(dict.fromkeys(ordered))[:3]


def _alike(name: str, names: Sequence[str]) -> list[str]:
    """Names that look like one, the most similar first: but for a slip, as a whole, or with words left out."""
    plain = {candidate.replace("_", "").lower(): candidate for candidate in names}
    typed = name.replace("_", "").lower()
    close = difflib.get_close_matches(typed, plain, n=3, cutoff=0.8)
    slips = [candidate for candidate in plain if _is_slip(typed, candidate)]
    words = [c for c in names if len(name) > 3 and (c.startswith(name) or _has_words(name, c))]
    return list(dict.fromkeys([*(plain[c] for c in [*close, *slips]), *words]))


def _has_words(name: str, candidate: str) -> bool:
    """Whether a name has only words of a longer one: `expert_parallel` of `expert_parallel_size`."""
    return set(name.lower().split("_")) <= set(candidate.split("_"))


def _is_slip(typed: str, name: str) -> bool:
    """Whether a letter was left out, doubled, exchanged with its neighbour or, in a longer word, with another."""
    start = next((n for n, (a, b) in enumerate(zip(typed, name)) if a != b), min(len(typed), len(name)))
    a, b = typed[start:], name[start:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    if len(a) == len(b) == 1:
        return len(name) > 3
    return len(a) + len(b) == 1 or (len(a) == 2 and a == b[::-1])


def nearest_option(group: str, option: str, options: Sequence[str]) -> str:
    """Returns the option of a group that a wrong one stands for, or the first of them."""
    meant_option = OPTIONS.get(group.rpartition("/")[2], {}).get(option.lower())
    if meant_option in options:
        return str(meant_option)
    plain = {name.replace("_", "").lower(): name for name in options}
    typed = option.replace("_", "").replace("-", "").lower()
    close = difflib.get_close_matches(typed, plain, n=1, cutoff=0.5)
    begins = [name for stripped, name in plain.items() if typed and stripped.startswith(typed)]
    found = [*begins[:1], *(plain[c] for c in close), *options, "<option>"]
    return found[0]
