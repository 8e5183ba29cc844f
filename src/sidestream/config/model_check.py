"""What fits what within the model. Pure."""

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sidestream.config.errors import ConfigError


def moe_blocks(num_layers: int, moe_layers: Any, first_dense_layers: int = 0) -> list[int]:
    """Returns the indices of the MoE blocks from 0. `moe_layers` is n (every n-th block) or a list of indices."""
    if isinstance(moe_layers, int):
        blocks = [block for block in range(num_layers) if (block + 1) % moe_layers == 0]
    else:
        blocks = sorted(moe_layers)
    return [block for block in blocks if block >= first_dense_layers]


def check_model(model: DictConfig) -> None:
    """Checks the model's sizes against each other.

    Raises:
        ConfigError: naming the key to change.
    """
    _check_blocks(model, "moe_layers", instead="a MoE block", none="a dense model", fix="2")
    _check_blocks(model, "full_attention_layers", instead="without the window", none="none", fix="[]")
    layers, first = model.num_layers, model.first_dense_layers
    if first and not moe_blocks(layers, model.moe_layers, first):
        raise ConfigError(
            "model.first_dense_layers",
            first,
            f"leaves no MoE block of model.num_layers={layers} and model.moe_layers={model.moe_layers}",
            expected="fewer blocks",
            fix="model.first_dense_layers=0",
        )
    windowed = layers - len(moe_blocks(layers, model.full_attention_layers))
    if model.sliding_window is None and windowed < layers:
        raise ConfigError(
            "model.full_attention_layers",
            model.full_attention_layers,
            "without model.sliding_window every block attends to everything",
            expected="[]",
            fix="model.full_attention_layers=[]",
        )
    if model.sliding_window is not None and not windowed:
        raise ConfigError(
            "model.sliding_window",
            model.sliding_window,
            f"model.full_attention_layers={model.full_attention_layers} leaves no block for it",
            expected="null",
            fix="model.sliding_window=null",
        )
    _check_heads(model)
    if model.mla is not None:
        _check_latent_attention(model)
    for key in ("shared_expert_hidden_size", "shared_expert_gate"):
        if model[key] and not model.num_shared_experts:
            raise ConfigError(
                f"model.{key}",
                model[key],
                "model.num_shared_experts=0: there is no shared expert",
                expected="null" if key.endswith("size") else "false",
                fix="model.num_shared_experts=1",
            )


def _check_blocks(model: DictConfig, name: str, *, instead: str, none: str, fix: str) -> None:
    layers, value, key = model.num_layers, model[name], f"model.{name}"
    expected = f"n from 1 to {layers} (every n-th block) or a list of block indices"
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= layers:
            why = f"with model.num_layers={layers} no block would be {instead}"
            raise ConfigError(key, value, why, expected=f"{expected}, [] for {none}", fix=f"{key}=[]")
    elif OmegaConf.is_list(value):
        blocks = list(value)
        if len(set(blocks)) < len(blocks) or any(b not in range(layers) for b in blocks):
            why = f"not distinct blocks of model.num_layers={layers}"
            raise ConfigError(
                key, blocks, why, expected=f"indices from 0 to {layers - 1}", fix=f"{key}={fix}"
            )
    else:
        raise ConfigError(key, value, "neither an integer nor a list", expected=expected, fix=f"{key}={fix}")


def _check_heads(model: DictConfig) -> None:
    hidden, heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    if model.head_dim is not None and model.head_dim % 2:
        raise ConfigError(
            "model.head_dim",
            model.head_dim,
            "rotary positions turn pairs of features",
            expected="an even number",
            fix=f"model.head_dim={model.head_dim + 1}",
        )
    derived = model.head_dim is None and model.mla is None
    if derived and (hidden % heads or (hidden // heads) % 2):
        best = max((h for h in range(1, heads + 1) if hidden % h == 0 and hidden // h % 2 == 0), default=None)
        raise ConfigError(
            "model.num_heads",
            heads,
            f"does not cut model.hidden_size={hidden} into heads of an even width",
            expected=f"a divisor of {hidden} with an even quotient, or model.head_dim",
            fix=f"model.num_heads={best}" if best else f"model.hidden_size={2 * heads}",
        )
    if heads % kv_heads:
        raise ConfigError(
            "model.num_kv_heads",
            kv_heads,
            f"does not divide model.num_heads={heads}",
            expected=f"a divisor of {heads}",
            fix=f"model.num_kv_heads={math.gcd(heads, kv_heads)}",
        )


def _check_latent_attention(model: DictConfig) -> None:
    """Latent attention has its own widths and norms; keys of grouped-query attention would do nothing beside it."""
    for key, wanted, why in (
        ("num_kv_heads", model.num_heads, "with model.mla every head has its own keys and values"),
        ("head_dim", None, "model.mla states the widths of its heads"),
        ("qk_norm", "none", "model.mla norms the latents of queries and keys"),
    ):
        if model[key] != wanted:
            text = "null" if wanted is None else str(wanted)
            raise ConfigError(f"model.{key}", model[key], why, expected=text, fix=f"model.{key}={text}")
    width = model.mla.qk_rope_head_dim
    if width % 2:
        raise ConfigError(
            "model.mla.qk_rope_head_dim",
            width,
            "rotary positions turn pairs of features",
            expected="an even number",
            fix=f"model.mla.qk_rope_head_dim={width + 1}",
        )
