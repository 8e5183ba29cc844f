"""Which Hugging Face models are ours under other names: config.json <-> our config keys. No torch.

A family is a model we compute exactly: same attention, same routing, same experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sidestream.config.errors import ConfigError
from sidestream.config.model_check import moe_blocks


@dataclass(frozen=True)
class Family:
    """Names of one model type.

    Attributes:
        model_type: `model_type` in config.json.
        architecture: `architectures[0]`.
        moe: Module of the MoE layer within a decoder layer.
        gate_up_down: Names of an expert's three matrices.
        qk_norm: What our `model.qk_norm` must be.
        num_experts: Key of the expert count; `expert_width` that of the experts' width.
        always_normalized: Routing weights are divided by their sum in any case; else `norm_topk_prob` says so.
        has_head_dim: `head_dim` may differ from hidden / heads.
        has_sliding_window: Attention may see a window only.
        has_dense_blocks: Blocks named in `mlp_only_layers` are dense.
    """

    model_type: str
    architecture: str
    moe: str
    gate_up_down: tuple[str, str, str]
    qk_norm: str
    num_experts: str
    expert_width: str
    always_normalized: bool
    has_head_dim: bool
    has_sliding_window: bool
    has_dense_blocks: bool


_LLAMA = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "mixtral",
            "MixtralForCausalLM",
            "block_sparse_moe",
            ("w1", "w3", "w2"),
            qk_norm="none",
            num_experts="num_local_experts",
            expert_width="intermediate_size",
            always_normalized=True,
            has_head_dim=True,
            has_sliding_window=True,
            has_dense_blocks=False,
        ),
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            "mlp",
            _LLAMA,
            qk_norm="full",
            num_experts="num_experts",
            expert_width="intermediate_size",
            always_normalized=False,
            has_head_dim=False,
            has_sliding_window=False,
            has_dense_blocks=False,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "mlp",
            _LLAMA,
            qk_norm="head",
            num_experts="num_experts",
            expert_width="moe_intermediate_size",
            always_normalized=False,
            has_head_dim=True,
            has_sliding_window=True,
            has_dense_blocks=True,
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        ConfigError: A model type we do not compute, or a feature of it.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            "initial_weights",
            model_type,
            "this model type is not one that Sidestream computes",
            expected=", ".join(FAMILIES),
            fix="initial_weights=<folder of such a model>",
        )
    family = FAMILIES[model_type]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    unsupported = {
        "attention_bias": config.get("attention_bias", False),
        "clip_qkv": config.get("clip_qkv"),
        "rope_type": rope.get("rope_type", "default") != "default",
        "hidden_act": config.get("hidden_act", "silu") != "silu",
    }
    for key, used in unsupported.items():
        if used:
            raise ConfigError(
                f"config.json:{key}",
                config.get(key, rope.get(key)),
                "not computed by Sidestream",
                expected="the published default",
                fix="another checkpoint",
            )
    return family


def model_options(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """config.json -> our `model` and `router` keys (those that differ from model to model)."""
    family = family_of(config)
    layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or [])
    moe = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    uses_window = family.has_sliding_window and config.get("use_sliding_window", True)
    model = {
        "vocab_size": config["vocab_size"],
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": (config.get("head_dim") if family.has_head_dim else None)
        or config["hidden_size"] // heads,
        "qk_norm": family.qk_norm,
        "ffn_hidden_size": config["intermediate_size"],
        "moe_layers": 1 if len(moe) == layers else moe,
        "num_experts": config.get(family.num_experts) or config["num_local_experts"],
        "expert_hidden_size": config[family.expert_width],
        "num_shared_experts": 0,
        "sliding_window": config.get("sliding_window") if uses_window else None,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta", 10000.0)),
        "norm_eps": config["rms_norm_eps"],
    }
    normalize = family.always_normalized or bool(config.get("norm_topk_prob", False))
    return {"model": model, "router": {"top_k": config["num_experts_per_tok"], "normalize": normalize}}


def config_json(model: Mapping[str, Any], router: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Our resolved `model` and `router` sections -> config.json.

    Args:
        model: With `vocab_size` filled in.
        router: `top_k`, `normalize`, `_target_`.
        dtype: Name of the weights' dtype.

    Raises:
        ConfigError: No family computes this model; names the key that stands in the way.
    """
    family = next((f for f in FAMILIES.values() if f.qk_norm == model["qk_norm"]), None)
    top_k, normalize = router["top_k"], router["normalize"]
    normalized = top_k > 1 if normalize == "auto" else bool(normalize)
    moe = model["moe_layers"]
    every = moe == 1 and not model.get("first_dense_layers")
    blockers = {
        "model.qk_norm": (family is None, "none, full or head"),
        "model.mla": (model.get("mla") is not None, "null"),
        "model.num_shared_experts": (model["num_shared_experts"] > 0, "0"),
        "model.shared_expert_hidden_size": (bool(model.get("shared_expert_hidden_size")), "null"),
        "model.moe_layers": (not every and not (family and family.has_dense_blocks), "1"),
        "model.sliding_window": (
            model.get("sliding_window") is not None and not (family and family.has_sliding_window),
            "null",
        ),
        "model.head_dim": (
            model.get("head_dim") not in (None, model["hidden_size"] // model["num_heads"])
            and not (family and family.has_head_dim),
            "null",
        ),
        "model.full_attention_layers": (
            model.get("sliding_window") is not None and bool(model.get("full_attention_layers")),
            "[]",
        ),
        "router._target_": (not str(router["_target_"]).endswith(".SoftmaxRouter"), "router=softmax"),
        "router.score_order": (router.get("score_order", "before_top_k") != "before_top_k", "before_top_k"),
        "router.num_groups": (router.get("num_groups") not in (None, 1), "null"),
        "router.expert_capacity_factor": (router.get("expert_capacity_factor") is not None, "null"),
        "router.scaling_factor": (router.get("scaling_factor") not in (None, 1, 1.0), "1"),
        "router.normalize": (family is not None and family.always_normalized and not normalized, "true"),
    }
    for key, (blocks, expected) in blockers.items():
        if blocks:
            section, name = key.split(".")
            value = (model if section == "model" else router).get(name)
            why = "no Hugging Face model of a supported family computes this"
            raise ConfigError(key, value, why, expected=expected, fix=f"{key}={expected} in the run")
    assert family is not None
    blocks = range(model["num_layers"])
    sparse = set(moe_blocks(model["num_layers"], moe, model.get("first_dense_layers") or 0))
    out = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model["vocab_size"],
        "hidden_size": model["hidden_size"],
        "intermediate_size": model["ffn_hidden_size"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "hidden_act": "silu",
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
        "tie_word_embeddings": bool(model.get("tie_embeddings")),
        "sliding_window": model.get("sliding_window"),
        "num_experts_per_tok": top_k,
        "dtype": dtype,
        family.num_experts: model["num_experts"],
        family.expert_width: model["expert_hidden_size"],
    }
    if family.has_head_dim:
        out["head_dim"] = model.get("head_dim") or model["hidden_size"] // model["num_heads"]
    if not family.always_normalized:
        out["norm_topk_prob"] = normalized
    if family.has_dense_blocks:
        out |= {"mlp_only_layers": [i for i in blocks if i not in sparse], "decoder_sparse_step": 1}
        out["use_sliding_window"] = model.get("sliding_window") is not None
    return out
