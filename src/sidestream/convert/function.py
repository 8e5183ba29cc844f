"""What of a config decides which function the weights compute: each key once, in one form. No torch.

Two configs whose functions are equal give the same logits for the same weights. Weights to start from are held against
the model that was built (`start.py`), and a run against what a Hugging Face family can say (`target.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidestream.config.model_check import moe_blocks
from sidestream.tracking.untrusted import Unreadable, printable, read_json, read_yaml

ROUTER = "sidestream.routing.router.SoftmaxRouter"
BIASED = ("sidestream.routing.balance.ExpertBias", "sidestream.routing.quantile.QuantileBalance")
SHORTCUT = "sidestream.overlap.shortcut.ShortcutOverlap"
_MOST_LAYERS = 100_000  # a folder from anybody may say anything
_FUNCTION = ""  # in KEYS: part of the function

# Every key of these groups, and why it is no part of the function. A test holds it against config/schema.py.
KEYS: dict[str, dict[str, str]] = {
    "model": {
        **dict.fromkeys(("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads"), _FUNCTION),
        **dict.fromkeys(("head_dim", "qk_norm", "mla", "sliding_window", "full_attention_layers"), _FUNCTION),
        **dict.fromkeys(("ffn_hidden_size", "moe_layers", "first_dense_layers", "num_experts"), _FUNCTION),
        **dict.fromkeys(("expert_hidden_size", "num_shared_experts", "shared_expert_hidden_size"), _FUNCTION),
        **dict.fromkeys(("shared_expert_gate", "tie_embeddings", "rope_theta", "norm_eps"), _FUNCTION),
        "dropout": "in training only",
        "activation_checkpointing": "memory only",
        "init_std": "weights that are drawn",
        "num_mtp_layers": "counted, never built",
        "trainable": "of presets",
    },
    "router": {
        **dict.fromkeys(("_target_", "top_k", "normalize", "score_order", "scaling_factor"), _FUNCTION),
        **dict.fromkeys(("num_groups", "top_groups", "expert_capacity_factor", "drop_policy"), _FUNCTION),
        "force_balance": _FUNCTION,
        "jitter": "in training only",
        "pad_to_capacity": "rows that nobody reads",
    },
    "balance": {
        "_target_": _FUNCTION,  # where it adds a bias to the choice
        "coefficient": "a loss",
        "scope": "a loss",
        "z_loss_coefficient": "a loss",
        "update_rate": "how the bias changes in training",
        "ema": "how the bias changes in training",
    },
    "overlap": {
        **dict.fromkeys(("_target_", "tap", "mix", "tap_norm", "post_norm", "double_gating"), _FUNCTION),
        "enabled": "when transfers are waited for",
        "delay_wgrad": "when gradients are computed",
        "num_chunks": "the order of work",
        "slot": "the order of work",
    },
}


def function_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a config, by key.

    Args:
        cfg: Plain `model` and `router` sections, and `balance` and `overlap` where it has them. Keys may be missing;
            then they have the value that says nothing.

    Returns:
        Derived values are filled in (`model.head_dim`), lists of blocks are written out, and what nothing depends on
        is None: the width of dense blocks where there are none, the router of a dense model.

    Raises:
        ValueError: No model has so many layers.
    """
    if not 1 <= cfg["model"]["num_layers"] <= _MOST_LAYERS:
        raise ValueError(f"model.num_layers={cfg['model']['num_layers']}")
    function = _of_model(cfg["model"])
    if function["model.moe_layers"]:
        function |= _of_router(cfg["router"], cfg.get("balance") or {}, cfg.get("overlap") or {})
    return function


def read_sections(path: Path, *, inside: Path) -> dict[str, Any]:
    """The resolved config of a run, or the part of it that an import or a checkpoint has.

    Raises:
        Unreadable: It is missing, or no such config.
    """
    sections = (read_json if path.suffix == ".json" else read_yaml)(path, inside=inside)
    try:
        function_of(sections)
        if not all(isinstance(sections.get(group) or {}, Mapping) for group in KEYS):
            raise TypeError(f"one of {', '.join(KEYS)} has no keys")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Unreadable(f"{printable(path)}: no config of a model ({printable(error, limit=80)})") from None
    return sections


def is_own(target: object) -> bool:
    """Whether a class is a user's own: we do not know what it computes."""
    return not str(target).startswith("sidestream.")


def _of_model(model: Mapping[str, Any]) -> dict[str, Any]:
    layers, heads, mla = model["num_layers"], model["num_heads"], model.get("mla")
    moe = moe_blocks(layers, model.get("moe_layers", 1), model.get("first_dense_layers") or 0)
    window = model.get("sliding_window")
    shared = model.get("num_shared_experts") or 0 if moe else 0
    width = model.get("shared_expert_hidden_size") or shared * model["expert_hidden_size"]
    return {
        "model.vocab_size": model.get("vocab_size"),
        "model.num_layers": layers,
        "model.hidden_size": model["hidden_size"],
        "model.num_heads": heads,
        "model.num_kv_heads": model["num_kv_heads"],
        "model.head_dim": None if mla else model.get("head_dim") or model["hidden_size"] // heads,
        "model.qk_norm": model["qk_norm"],
        "model.mla": dict(mla) if mla else None,
        "model.sliding_window": window,
        "model.full_attention_layers": moe_blocks(layers, model.get("full_attention_layers") or [])
        if window is not None
        else [],
        "model.ffn_hidden_size": model["ffn_hidden_size"] if len(moe) < layers else None,
        "model.moe_layers": moe,
        "model.num_experts": model["num_experts"] if moe else None,
        "model.expert_hidden_size": model["expert_hidden_size"] if moe else None,
        "model.num_shared_experts": shared,
        "model.shared_expert_hidden_size": width if shared else None,
        "model.shared_expert_gate": bool(shared and model.get("shared_expert_gate")),
        "model.tie_embeddings": bool(model.get("tie_embeddings")),
        "model.rope_theta": float(model["rope_theta"]),
        "model.norm_eps": float(model["norm_eps"]),
    }


def _of_router(
    router: Mapping[str, Any], balance: Mapping[str, Any], overlap: Mapping[str, Any]
) -> dict[str, Any]:
    target, bias = router.get("_target_", ROUTER), balance.get("_target_")
    biased = bias if bias in BIASED else None
    schedule = overlap if overlap.get("_target_") == SHORTCUT else {}
    function = {
        "balance._target_": biased,
        "overlap._target_": schedule.get("_target_"),
        **{
            f"overlap.{key}": schedule.get(key)
            for key in ("tap", "mix", "tap_norm", "post_norm", "double_gating")
        },
    }
    if is_own(target):
        return function | {f"router.{key}": value for key, value in router.items()}
    top_k, normalize = router["top_k"], router.get("normalize", "auto")
    groups = router.get("num_groups") if router.get("num_groups") != 1 else None
    capacity = router.get("expert_capacity_factor")
    # A softmax over the chosen experts is the softmax over all of them, divided by the sum of the chosen.
    order = router.get("score_order", "before_top_k")
    shares = target == ROUTER and order == "after_top_k"
    same_choice = groups is None and biased is None
    return function | {
        "router._target_": target,
        "router.top_k": top_k,
        "router.normalize": shares or (top_k > 1 if normalize == "auto" else bool(normalize)),
        "router.score_order": "before_top_k" if same_choice else order,
        "router.scaling_factor": float(router.get("scaling_factor") or 1.0),
        "router.num_groups": groups,
        "router.top_groups": router.get("top_groups") if groups is not None else None,
        "router.expert_capacity_factor": capacity,
        "router.drop_policy": router.get("drop_policy") if capacity is not None else None,
        "router.force_balance": bool(router.get("force_balance")),
    }
