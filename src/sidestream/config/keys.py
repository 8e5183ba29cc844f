"""Checks of single keys: unknown, renamed, missing or out of range. Cross checks are in compatibility.py."""

import difflib
from dataclasses import Field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from sidestream.config.errors import ConfigError
from sidestream.config.schema import SCHEMAS, Root, known_keys, options_with

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
    "top_k": "router.top_k",
}
WHY_RENAMED = {
    "trainer.accumulate_grad_batches": "accumulation follows from the global and the micro-batch size",
    "trainer.max_epochs": "training is counted in optimizer steps",
}


def unknown_key(key: str, value: object) -> ConfigError:
    """Explains a key that no schema has: by its new name, or by the names that look like it."""
    if key in RENAMED:
        new = RENAMED[key]
        why = WHY_RENAMED.get(key, "this key has another name here")
        shown = "<value>" if key in WHY_RENAMED or isinstance(value, dict | list | None) else f"{value}"
        return ConfigError(key, value, why, expected=new, fix=f"{new}={shown}")
    if options := options_with(key):
        group = key.partition(".")[0]
        why, expected = (
            f"only another option of {group} has this key",
            f"it beside {group}={' or '.join(options)}",
        )
        return ConfigError(key, value, why, expected=expected, fix=f"{group}={options[0]}")
    near = nearest(key)
    if not near:
        listing = "one of the keys of `python train.py --cfg job`"
        return ConfigError(key, value, "no such key", expected=listing, fix=f"remove {key}")
    return ConfigError(
        key, value, "no such key", expected=f"one of {', '.join(near)}", fix=f"{near[0]}=<value>"
    )


def nearest(key: str) -> list[str]:
    """Returns up to three known keys that look like `key`, the most similar first."""
    keys = known_keys()
    same_name = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    group = key.partition(".")[0] + "."
    in_group = difflib.get_close_matches(key, [known for known in keys if known.startswith(group)], n=3)
    anywhere = difflib.get_close_matches(key, keys, n=3)
    return list(dict.fromkeys([*same_name, *in_group, *anywhere]))[:3]


def takes_a_list(key: str) -> bool:
    """Whether a key has a list as its value in some shipped option."""
    group, _, name = key.rpartition(".")
    schemas: list[Any] = [*SCHEMAS.get(group, {}).values()] if group else [Root]
    kinds = [
        schema.__dataclass_fields__[name].type for schema in schemas if name in schema.__dataclass_fields__
    ]
    return any("list" in str(kind) for kind in kinds)


def check_keys(cfg: DictConfig) -> None:
    """Refuses unknown and missing keys and values out of range, wherever a schema says what is right.

    Hydra itself refuses `model.bogus=1` but takes `+model.bogus=1`, also under a schema.

    Raises:
        ConfigError: for the first such key.
    """
    _walk(cfg, "")


def _walk(node: DictConfig, prefix: str) -> None:
    schema = OmegaConf.get_type(node)
    fields: dict[str, Field] = getattr(schema, "__dataclass_fields__", {})
    for name in map(str, node):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(node, name):
            raise ConfigError(key, "???", "has no value", expected="a value", fix=f"{key}=<value>")
        value = node[name]
        # Old spellings are also refused in a user's own option, where any key is allowed.
        # A part with a schema of its own is from the file of the script that was started.
        typed = isinstance(value, DictConfig) and hasattr(OmegaConf.get_type(value), "__dataclass_fields__")
        if (fields and name not in fields and not typed) or key in RENAMED:
            raise unknown_key(key, OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)
        if isinstance(value, DictConfig) and not (name in fields and fields[name].metadata.get("auto")):
            _walk(value, f"{key}.")
        elif name in fields:
            _check_value(key, value, fields[name].metadata)


def _check_value(key: str, value: Any, limits: Any) -> None:
    choices = limits.get("choices")
    if choices and not any(value == choice and type(value) is type(choice) for choice in choices):
        shown = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
        raise ConfigError(
            key, value, "not a choice", expected=f"one of {', '.join(shown)}", fix=f"{key}={shown[0]}"
        )
    if isinstance(value, ListConfig) and any(isinstance(item, ListConfig | DictConfig) for item in value):
        raise ConfigError(key, value, "not a flat list", expected="plain values", fix=f"{key}=[<value>,...]")
    if limits.get("auto"):
        if value is None or value == "auto":  # null where it is not allowed is refused by OmegaConf
            return
        kinds, kind = (int | float, "a number") if limits.get("real") else (int, "an integer")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(key, value, f"not {kind}", expected=f"auto or {kind}", fix=f"{key}=auto")
    if isinstance(value, int | float):
        _check_range(key, value, limits)


def _check_range(key: str, value: float, limits: Any) -> None:
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    too_high = high is not None and value > high
    if value == value and not too_low and not too_high:
        return
    bounds = [f">= {low}"] if low is not None else []
    bounds += [f"> {above}"] if above is not None else []
    bounds += [f"<= {high}"] if high is not None else []
    example = "auto" if limits.get("auto") else low if low is not None else high if high is not None else 1
    raise ConfigError(
        key, value, "out of range", expected=f"a value {' and '.join(bounds)}", fix=f"{key}={example}"
    )
