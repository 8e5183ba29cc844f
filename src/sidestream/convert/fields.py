"""What every field of a Hugging Face config.json means to us, as data. No torch, no transformers.

A field is *read* (it becomes one of our keys), *harmless* (whatever it says, the model computes the same), or allowed
*only* at values that say nothing new. A field that has no row here is refused: it may be what makes the model another.
The rows of a model type are the fields of its class in transformers with that class's defaults, which an absent field
has; `tests/convert/test_fields.py` holds them against the installed transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sidestream.config.errors import ConfigError, as_typed
from sidestream.tracking.untrusted import printable

ABSENT: Any = object()  # the default of a spelling that the class does not have
_MOST = 10**9


@dataclass(frozen=True)
class FieldCheck:
    """What values a field may have, in words and as a function of the value."""

    expected: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value) and value > 0


def _or_null(check: FieldCheck) -> FieldCheck:
    return FieldCheck(f"{check.expected}, or null", lambda value: value is None or check.holds(value))


def _count(most: int) -> FieldCheck:
    return FieldCheck(f"an integer from 1 to {most:,}", lambda value: _is_int(value) and 1 <= value <= most)


COUNT, FEW = _count(_MOST), _count(100_000)  # FEW: of what has a line of its own somewhere
POSITIVE = FieldCheck("a positive number", _is_positive)
FLAG = FieldCheck("true or false", lambda value: isinstance(value, bool))
LAYERS = FieldCheck(
    "a list of layers from 0",
    lambda value: isinstance(value, list) and all(_is_int(i) and 0 <= i < _MOST for i in value),
)
ROPE = FieldCheck("an object", lambda value: isinstance(value, dict))


@dataclass(frozen=True)
class Read:
    """Becomes one of our keys, named in `ours`."""

    ours: str
    check: FieldCheck


@dataclass(frozen=True)
class Harmless:
    """Changes nothing that we compute, because of `why`."""

    why: str


@dataclass(frozen=True)
class Only:
    """Allowed at `values`; any other would be `why`, which we do not compute."""

    values: tuple[Any, ...]
    why: str

    def allows(self, value: Any) -> bool:
        return any(type(value) is type(v) and value == v for v in self.values)


@dataclass(frozen=True)
class Field:
    """One row: what transformers assumes where the field is absent, and what we make of it."""

    default: Any
    use: Read | Harmless | Only


_GENERATION = Harmless("of generating text")
_HEADS = Harmless("of heads that classify; ours is a language model")
_OUTPUTS = Harmless("what a call returns, not what it computes")
_STORED = Harmless("weights are read as they are stored and computed as trainer.precision says")
_TRAINING = Harmless("of training: balance= decides here")
_TOKEN = Harmless("the data decides which tokens there are; logits do not depend on it")
_WRITER = Harmless("says who wrote the file")

# Of every class in transformers, then spellings of older releases and of other tools.
COMMON: dict[str, Field] = {
    "transformers_version": Field(None, _WRITER),
    "output_hidden_states": Field(False, _OUTPUTS),
    "return_dict": Field(True, _OUTPUTS),
    "dtype": Field(None, _STORED),
    "chunk_size_feed_forward": Field(0, Harmless("cuts the computation, not the result")),
    "is_encoder_decoder": Field(False, Only((False,), "an encoder and a decoder")),
    "id2label": Field(None, _HEADS),
    "label2id": Field(None, _HEADS),
    "problem_type": Field(None, _HEADS),
    "_name_or_path": Field(ABSENT, _WRITER),
    "name_or_path": Field(ABSENT, _WRITER),
    "_commit_hash": Field(ABSENT, _WRITER),
    "torch_dtype": Field(ABSENT, _STORED),
    "torchscript": Field(ABSENT, _OUTPUTS),
    "use_bfloat16": Field(ABSENT, _STORED),
    "tf_legacy_loss": Field(ABSENT, Harmless("of TensorFlow")),
    "num_labels": Field(ABSENT, _HEADS),
    "finetuning_task": Field(ABSENT, _HEADS),
    "task_specific_params": Field(ABSENT, _GENERATION),
    "output_attentions": Field(ABSENT, _OUTPUTS),
    "tie_last_hidden_states": Field(ABSENT, _OUTPUTS),
    "attn_implementation": Field(ABSENT, Harmless("which kernel computes attention")),
    "_attn_implementation_autoset": Field(ABSENT, Harmless("which kernel computes attention")),
    "experts_implementation": Field(ABSENT, Harmless("which kernel computes the experts")),
    "tokenizer_class": Field(ABSENT, Harmless("of the tokenizer")),
    "prefix": Field(ABSENT, _GENERATION),
    "sep_token_id": Field(ABSENT, _TOKEN),
    "decoder_start_token_id": Field(ABSENT, _TOKEN),
    "is_decoder": Field(ABSENT, Harmless("these models are decoders in any case")),
    "add_cross_attention": Field(ABSENT, Only((False,), "attention to an encoder")),
    "cross_attention_hidden_size": Field(ABSENT, Only((None,), "attention to an encoder")),
    "tie_encoder_decoder": Field(ABSENT, Only((False,), "an encoder and a decoder")),
    "pruned_heads": Field(ABSENT, Only(({}, None), "attention without some of its heads")),
    "quantization_config": Field(ABSENT, Only((None,), "quantised weights")),
    "compression_config": Field(ABSENT, Only((None,), "quantised weights")),
    "auto_map": Field(ABSENT, Only((None, {}), "a model with code of its own")),
    "transformers_weights": Field(ABSENT, Only((None,), "weights in a file of another name")),
    "per_layer_config": Field(ABSENT, Only((None, {}), "layers that differ from each other")),
    "rope_theta": Field(ABSENT, Read("model.rope_theta", POSITIVE)),
    "rope_scaling": Field(ABSENT, Read("model.rope_theta", _or_null(ROPE))),
    "partial_rotary_factor": Field(ABSENT, Only((None, 1.0, 1), "heads that are rotated in part")),
    "qkv_bias": Field(ABSENT, Only((False,), "attention with biases")),
    "mlp_bias": Field(ABSENT, Only((False,), "experts with biases")),
}
COMMON |= {
    name: Field(ABSENT, _GENERATION)
    for name in (
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    )
}

# The keys of rope_parameters, and of rope_scaling, its older name.
ROPE_FIELDS: dict[str, Field] = {
    "rope_type": Field("default", Only(("default",), "scaled rotary positions")),
    "type": Field(ABSENT, Only(("default",), "scaled rotary positions")),
    "rope_theta": Field(ABSENT, Read("model.rope_theta", POSITIVE)),
    "partial_rotary_factor": Field(ABSENT, Only((None, 1.0, 1), "heads that are rotated in part")),
}


def _decoder(
    architecture: str,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int | None,
    max_position_embeddings: int,
    rms_norm_eps: float,
    num_experts_per_tok: int,
    router_aux_loss_coef: float,
    tokens: tuple[int | None, int | None, int | None],
    kv_heads_may_be_null: bool = True,
) -> dict[str, Field]:
    """The fields that all of our families have, with one family's defaults; `tokens` are pad, bos and eos."""
    pad, bos, eos = tokens
    kv_heads = _or_null(FEW) if kv_heads_may_be_null else FEW
    return {
        "architectures": Field(None, Only((None, [], [architecture]), "a head that is no language model's")),
        "vocab_size": Field(vocab_size, Read("model.vocab_size", COUNT)),
        "hidden_size": Field(hidden_size, Read("model.hidden_size", COUNT)),
        "intermediate_size": Field(intermediate_size, Read("model.ffn_hidden_size", COUNT)),
        "num_hidden_layers": Field(num_hidden_layers, Read("model.num_layers", FEW)),
        "num_attention_heads": Field(num_attention_heads, Read("model.num_heads", FEW)),
        "num_key_value_heads": Field(num_key_value_heads, Read("model.num_kv_heads", kv_heads)),
        "hidden_act": Field("silu", Only(("silu", "swish"), "another activation")),
        "max_position_embeddings": Field(
            max_position_embeddings, Harmless("rotary positions without scaling have no end")
        ),
        "initializer_range": Field(0.02, Harmless("weights are read, not drawn")),
        "rms_norm_eps": Field(rms_norm_eps, Read("model.norm_eps", POSITIVE)),
        "use_cache": Field(True, _GENERATION),
        "pad_token_id": Field(pad, _TOKEN),
        "bos_token_id": Field(bos, _TOKEN),
        "eos_token_id": Field(eos, _TOKEN),
        "tie_word_embeddings": Field(False, Read("model.tie_embeddings", FLAG)),
        "attention_dropout": Field(0.0, Only((0.0, 0), "dropout of attention weights")),
        "num_experts_per_tok": Field(num_experts_per_tok, Read("router.top_k", FEW)),
        "output_router_logits": Field(False, _TRAINING),
        "router_aux_loss_coef": Field(router_aux_loss_coef, _TRAINING),
        "rope_parameters": Field(None, Read("model.rope_theta", _or_null(ROPE))),
    }


_BIAS = Field(False, Only((False,), "attention with biases"))
_NORMALIZE = Field(False, Read("router.normalize", FLAG))
_WINDOW = Read("model.sliding_window", _or_null(COUNT))
FIELDS: dict[str, dict[str, Field]] = {
    "mixtral": _decoder(
        "MixtralForCausalLM",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.001,
        tokens=(None, 1, 2),
    )
    | {
        "head_dim": Field(None, Read("model.head_dim", _or_null(COUNT))),
        "sliding_window": Field(None, _WINDOW),
        "num_local_experts": Field(8, Read("model.num_experts", FEW)),
        "router_jitter_noise": Field(0.0, Only((0.0, 0), "noise on what router and experts read")),
    },
    "olmoe": _decoder(
        "OlmoeForCausalLM",
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=None,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
        tokens=(1, None, 50279),
    )
    | {
        "attention_bias": _BIAS,
        "clip_qkv": Field(None, Only((None,), "clipped queries, keys and values")),
        "num_experts": Field(64, Read("model.num_experts", FEW)),
        "norm_topk_prob": _NORMALIZE,
    },
    "qwen3_moe": _decoder(
        "Qwen3MoeForCausalLM",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.001,
        tokens=(None, None, None),
        kv_heads_may_be_null=False,
    )
    | {
        "attention_bias": _BIAS,
        "use_sliding_window": Field(False, Read("model.sliding_window", FLAG)),
        "sliding_window": Field(4096, _WINDOW),
        "decoder_sparse_step": Field(1, Read("model.moe_layers", COUNT)),
        "moe_intermediate_size": Field(768, Read("model.expert_hidden_size", COUNT)),
        "num_experts": Field(128, Read("model.num_experts", FEW)),
        "norm_topk_prob": _NORMALIZE,
        "mlp_only_layers": Field(None, Read("model.moe_layers", _or_null(LAYERS))),
        "head_dim": Field(ABSENT, Read("model.head_dim", _or_null(COUNT))),
        "max_window_layers": Field(
            ABSENT,
            Read(
                "model.sliding_window",
                _or_null(FieldCheck("a count", lambda value: _is_int(value) and value >= 0)),
            ),
        ),
        "layer_types": Field(
            ABSENT,
            Read("model.sliding_window", _or_null(FieldCheck("a list", lambda v: isinstance(v, list)))),
        ),
        "use_qk_norm": Field(ABSENT, Only((True,), "queries and keys without norms")),
        "shared_expert_intermediate_size": Field(ABSENT, Only((0, None), "a shared expert")),
    },
}
# Two names of one field, by the class's `attribute_map`.
ALIASES = {
    "mixtral": {"num_experts": "num_local_experts"},
    "olmoe": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}


def known(model_type: str) -> dict[str, Field]:
    """Every field that a config.json of this model type may have, the family's own first."""
    fields = FIELDS[model_type]
    return fields | {name: field for name, field in COMMON.items() if name not in fields}


def read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json, each checked, with the class's defaults for those that are absent.

    Args:
        config: A config.json whose model type is in `FIELDS`.

    Returns:
        The fields that we read. Spellings that the class does not have are in it only where the file has them.

    Raises:
        ConfigError: Names a field that is not known, or whose value is not one that we compute.
    """
    model_type = config["model_type"]
    fields, aliases = known(model_type), ALIASES[model_type]
    values = {name: value for name, value in config.items() if name not in aliases and name != "model_type"}
    for other, name in aliases.items():
        if other in config:
            if name in config and config[name] != config[other]:
                raise refused(
                    other, config[other], f"{name} says {_shown(config[name])}", "one value for both"
                )
            values[name] = config[other]
    _check_fields(values, fields, "")
    for name in ("rope_parameters", "rope_scaling"):
        if values.get(name):
            _check_fields(values[name], ROPE_FIELDS, f"{name}.")
    defaults = {name: field.default for name, field in fields.items() if field.default is not ABSENT}
    return {name: value for name, value in (defaults | values).items() if isinstance(fields[name].use, Read)}


def _check_fields(values: Mapping[str, Any], fields: Mapping[str, Field], prefix: str) -> None:
    for name, value in values.items():
        field = f"{prefix}{name}"
        if name not in fields:
            why, expected = (
                "Sidestream does not know what this field means",
                "fields of its class in transformers",
            )
            fix = f"a copy of the folder without {printable(field)}, if you know that it changes nothing"
            raise refused(field, value, why, expected, fix)
        use = fields[name].use
        if isinstance(use, Only) and not use.allows(value):
            raise refused(field, value, f"{use.why}: not computed by Sidestream", _choices(use.values))
        if isinstance(use, Read) and not use.check.holds(value):
            raise refused(field, value, "not a value that this field can have", use.check.expected)


def refused(field: str, value: Any, why: str, expected: str, fix: str = "another checkpoint") -> ConfigError:
    """The refusal of a field; all text of the file is shown as `printable` leaves it."""
    return ConfigError(f"config.json:{printable(field)}", _shown(value), why, expected=expected, fix=fix)


def _shown(value: Any) -> str:
    return printable(as_typed(value), limit=80)


def _choices(values: tuple[Any, ...]) -> str:
    return " or ".join(
        dict.fromkeys("absent" if v in (None, {}, []) and v is not False else as_typed(v) for v in values)
    )


def markdown(model_type: str) -> Iterator[str]:
    """The lines of the table of one model type for the docs."""
    yield "| field of config.json | if absent | what we do |"
    yield "|---|---|---|"
    for name, field in FIELDS[model_type].items():
        yield _row(name, field)


def markdown_common() -> Iterator[str]:
    """The lines of the table of fields that any model type may have."""
    yield "| field of config.json | if absent | what we do |"
    yield "|---|---|---|"
    for name, field in COMMON.items():
        if field.use is not _GENERATION:
            yield _row(name, field)
    for name, field in ROPE_FIELDS.items():
        yield _row(f"rope_parameters.{name}", field)


def _row(name: str, field: Field) -> str:
    default = "" if field.default is ABSENT else f"`{as_typed(field.default)}`"
    return f"| `{name}` | {default} | {_told(field.use)} |"


def _told(use: Read | Harmless | Only) -> str:
    if isinstance(use, Read):
        return f"`{use.ours}`"
    if isinstance(use, Harmless):
        return f"not read: {use.why}"
    return f"refused unless {_choices(use.values)}: {use.why}"
