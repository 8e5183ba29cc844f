"""Which Hugging Face models are ours under other names: config.json -> our config keys. No torch.

A family is a model we compute exactly: same attention, same routing, same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sidestream.config.errors import ConfigError
from sidestream.config.model_check import moe_blocks
from sidestream.convert.fields import read_fields, refused
from sidestream.tracking.untrusted import printable

_LLAMA = ("gate_proj", "up_proj", "down_proj")


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
        rope_theta: What an absent `rope_theta` is.
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
    rope_theta: float

    def tensors(self, model: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors of a checkpoint, given the `model` keys of `model_options`."""
        hidden, vocab, width = model["hidden_size"], model["vocab_size"], model["head_dim"]
        q, kv, layers = model["num_heads"] * width, model["num_kv_heads"] * width, model["num_layers"]
        sparse = moe_blocks(layers, model["moe_layers"])
        yield "model.embed_tokens.weight", (vocab, hidden)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (vocab, hidden)
        for i in range(layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (hidden,)
            yield f"{layer}.post_attention_layernorm.weight", (hidden,)
            for name, shape in (
                ("q", (q, hidden)),
                ("k", (kv, hidden)),
                ("v", (kv, hidden)),
                ("o", (hidden, q)),
            ):
                yield f"{layer}.self_attn.{name}_proj.weight", shape
            if self.qk_norm != "none":
                yield f"{layer}.self_attn.q_norm.weight", (width if self.qk_norm == "head" else q,)
                yield f"{layer}.self_attn.k_norm.weight", (width if self.qk_norm == "head" else kv,)
            if i not in sparse:
                yield from self._swiglu(f"{layer}.mlp", _LLAMA, hidden, model["ffn_hidden_size"])
                continue
            yield f"{layer}.{self.moe}.gate.weight", (model["num_experts"], hidden)
            for expert in range(model["num_experts"]):
                prefix = f"{layer}.{self.moe}.experts.{expert}"
                yield from self._swiglu(prefix, self.gate_up_down, hidden, model["expert_hidden_size"])

    @staticmethod
    def _swiglu(
        prefix: str, names: tuple[str, str, str], hidden: int, width: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        gate, up, down = names
        yield f"{prefix}.{gate}.weight", (width, hidden)
        yield f"{prefix}.{up}.weight", (width, hidden)
        yield f"{prefix}.{down}.weight", (hidden, width)


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
            rope_theta=1e6,
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
            rope_theta=1e4,
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
            rope_theta=1e4,
        ),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        ConfigError: A model type we do not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            "config.json:model_type",
            printable(model_type),
            "this model type is not one that Sidestream computes",
            expected=", ".join(FAMILIES),
            fix="initial_weights=<folder of such a model>",
        )
    return FAMILIES[model_type]


def model_options(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """config.json -> our `model` and `router` keys (those that differ from model to model).

    Raises:
        ConfigError: A model type, a field or a value that Sidestream does not compute; names it.
    """
    family = family_of(config)
    values = read_fields(config)
    layers, heads, experts = (
        values[n] for n in ("num_hidden_layers", "num_attention_heads", family.num_experts)
    )
    kv_heads, top_k = values["num_key_value_heads"] or heads, values["num_experts_per_tok"]
    normalize = values.get("norm_topk_prob", family.always_normalized)
    _check_heads(values, heads=heads, kv_heads=kv_heads)
    if top_k > experts:
        raise refused(
            "num_experts_per_tok", top_k, f"more than {family.num_experts}={experts}", f"1 to {experts}"
        )
    if top_k == 1 and normalize:
        why = "divided by their sum the weights of one expert are 1: its router cannot be trained"
        raise refused("num_experts_per_tok", top_k, why, "2 or more, or weights that are not normalised")
    moe = _moe_blocks(values, layers)
    model = {
        "vocab_size": values["vocab_size"],
        "num_layers": layers,
        "hidden_size": values["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
        "qk_norm": family.qk_norm,
        "ffn_hidden_size": values["intermediate_size"],
        "moe_layers": 1 if len(moe) == layers else moe,
        "num_experts": experts,
        "expert_hidden_size": values[family.expert_width],
        "num_shared_experts": 0,
        "sliding_window": _window(values, layers),
        "tie_embeddings": values["tie_word_embeddings"],
        "rope_theta": _rope_theta(values, family),
        "norm_eps": float(values["rms_norm_eps"]),
    }
    return {"model": model, "router": {"top_k": top_k, "normalize": normalize}}


def _check_heads(values: Mapping[str, Any], *, heads: int, kv_heads: int) -> None:
    hidden, width = values["hidden_size"], values.get("head_dim")
    if width is None and hidden % heads:
        raise refused(
            "num_attention_heads", heads, f"does not divide hidden_size={hidden}", f"a divisor of {hidden}"
        )
    if (width or hidden // heads) % 2:
        name, value = ("num_attention_heads", heads) if width is None else ("head_dim", width)
        raise refused(name, value, "heads of an odd width cannot be rotated", "heads of an even width")
    if heads % kv_heads:
        why = f"does not divide num_attention_heads={heads}"
        raise refused("num_key_value_heads", kv_heads, why, f"a divisor of {heads}")


def _moe_blocks(values: Mapping[str, Any], layers: int) -> list[int]:
    step, dense = values.get("decoder_sparse_step", 1), set(values.get("mlp_only_layers") or [])
    if any(layer >= layers for layer in dense):
        why = f"names a layer that is not there: num_hidden_layers={layers}"
        raise refused("mlp_only_layers", sorted(dense), why, f"layers from 0 to {layers - 1}")
    return [i for i in range(layers) if i not in dense and (i + 1) % step == 0]


def _window(values: Mapping[str, Any], layers: int) -> int | None:
    """The window of all layers. Which of them have one depends on the release, where a file says more than that."""
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    if window is not None and values.get("max_window_layers"):
        why = "releases of transformers differ in which layers see a window then"
        raise refused("max_window_layers", values["max_window_layers"], why, "0, or use_sliding_window=false")
    kinds = values.get("layer_types")
    kind = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and kinds != [kind] * layers:
        raise refused("layer_types", kinds, "layers that differ from each other", f"{layers} times {kind}")
    return window


def _rope_theta(values: Mapping[str, Any], family: Family) -> float:
    """The base of the rotary positions, which may stand in three places."""
    rope, older = values["rope_parameters"] or {}, values.get("rope_scaling") or {}
    places = {"rope_parameters.rope_theta": rope, "rope_scaling.rope_theta": older, "rope_theta": values}
    said = {name: place["rope_theta"] for name, place in places.items() if "rope_theta" in place}
    for name, theta in said.items():
        if theta != (first := next(iter(said.values()))):
            raise refused(name, theta, f"{next(iter(said))} says {first}", "one value everywhere")
    return float(next(iter(said.values()), family.rope_theta))
