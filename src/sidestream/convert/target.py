"""Our config keys -> config.json, for what a Hugging Face family can say. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidestream.config.errors import ConfigError
from sidestream.convert.families import FAMILIES, Family
from sidestream.convert.fields import ABSENT, FIELDS
from sidestream.convert.function import ROUTER, function_of

# The values that every family has and none has a field for; `overlap` and `balance` beside a plain model say nothing.
_ALWAYS: dict[str, tuple[Any, str]] = {
    "model.mla": (None, "null"),
    "model.num_shared_experts": (0, "0"),
    "model.full_attention_layers": ([], "[]"),
    "router._target_": (ROUTER, "router=softmax"),
    "router.scaling_factor": (1.0, "1"),
    "router.num_groups": (None, "null"),
    "router.expert_capacity_factor": (None, "null"),
    "router.force_balance": (False, "false"),
    "balance._target_": (None, "balance=aux_loss"),
    "overlap._target_": (None, "overlap=none"),
}


def config_json(
    model: Mapping[str, Any],
    router: Mapping[str, Any],
    *,
    dtype: str,
    balance: Mapping[str, Any] | None = None,
    overlap: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Our resolved sections -> config.json, with every field of the family's class.

    Args:
        model: With `vocab_size` filled in.
        router: Its section of the config.
        dtype: Name of the weights' dtype.
        balance: Its section; None: nothing that the model computes with.
        overlap: Its section; None: the plain model.
        trained: Fields of config.json that say how the model was trained: token ids, the longest sequence.

    Raises:
        ConfigError: No family computes this model; names the key that stands in the way.
    """
    sections = {"model": model, "router": router, "balance": balance or {}, "overlap": overlap or {}}
    function = function_of(sections)
    family = _family(function, sections)
    layers, moe = function["model.num_layers"], function["model.moe_layers"]
    out = {
        **{
            name: field.default
            for name, field in FIELDS[family.model_type].items()
            if field.default is not ABSENT
        },
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": function["model.vocab_size"],
        "hidden_size": function["model.hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": function["model.num_heads"],
        "num_key_value_heads": function["model.num_kv_heads"],
        "rms_norm_eps": function["model.norm_eps"],
        "rope_theta": function["model.rope_theta"],  # where releases before 5 look for it
        "rope_parameters": {"rope_type": "default", "rope_theta": function["model.rope_theta"]},
        "tie_word_embeddings": function["model.tie_embeddings"],
        "num_experts_per_tok": router["top_k"],
        "dtype": dtype,
        family.num_experts: model["num_experts"],
        family.expert_width: model["expert_hidden_size"],
        "initializer_range": model.get("init_std", 0.02),
        "router_aux_loss_coef": _pooled_loss(function, balance or {}),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family.has_head_dim:
        out["head_dim"] = function["model.head_dim"]
    if family.has_sliding_window:
        out["sliding_window"] = function["model.sliding_window"]
    if not family.always_normalized:
        out["norm_topk_prob"] = function.get("router.normalize", False)
    if family.has_dense_blocks:
        out |= {"mlp_only_layers": [i for i in range(layers) if i not in moe], "decoder_sparse_step": 1}
        out["use_sliding_window"] = function["model.sliding_window"] is not None
    return out | dict(trained or {})


def _family(function: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> Family:
    family = next((f for f in FAMILIES.values() if f.qk_norm == function["model.qk_norm"]), None)
    required = dict(_ALWAYS)
    if family is None:
        required["model.qk_norm"] = ("none", "none, full or head")
    else:
        hidden, heads = function["model.hidden_size"], function["model.num_heads"]
        if not family.has_dense_blocks:
            required["model.moe_layers"] = (list(range(function["model.num_layers"])), "1")
        if not family.has_sliding_window:
            required["model.sliding_window"] = (None, "null")
        if not family.has_head_dim:
            required["model.head_dim"] = (hidden // heads, "null")
        if family.always_normalized:
            required["router.normalize"] = (True, "true")
    for key, (value, typed) in required.items():
        if key in function and function[key] != value:
            section, name = key.split(".")
            why = "no Hugging Face model of a supported family computes this"
            if family is not None and key not in _ALWAYS:
                why = f"{family.model_type}, the family of model.qk_norm={family.qk_norm}, does not compute this"
            fix = typed if "=" in typed else f"{key}={typed}"
            raise ConfigError(key, sections[section].get(name), why, expected=typed, fix=f"{fix} in the run")
    assert family is not None
    return family


def _pooled_loss(function: Mapping[str, Any], balance: Mapping[str, Any]) -> float:
    """`router_aux_loss_coef`: one loss over all layers, top_k when even; ours is 1 per layer when even."""
    if not str(balance.get("_target_", "")).endswith(".AuxLoss") or not function["model.moe_layers"]:
        return 0.0
    return balance["coefficient"] * len(function["model.moe_layers"]) / function["router.top_k"]
