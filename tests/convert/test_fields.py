"""The tables of config.json's fields: against transformers' classes, against logits, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sidestream.config.errors import ConfigError
from sidestream.convert.families import FAMILIES, model_options
from sidestream.convert.fields import ABSENT, ALIASES, COMMON, FIELDS, Only, Read, known
from tests.convert.tiny import CLASSES, MODELS, ROOT, change_config, difference, write_random

transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")


def defaults(cls: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", FIELDS)
def test_tables_are_those_of_transformers_classes(model_type: str) -> None:
    cls = getattr(transformers, f"{CLASSES[model_type]}Config")
    ours = {name: field.default for name, field in known(model_type).items() if field.default is not ABSENT}
    assert ours == defaults(cls)
    assert defaults(transformers.PreTrainedConfig).keys() <= COMMON.keys() | {"architectures"}
    assert FAMILIES[model_type].rope_theta == cls.default_theta
    # Both ways: it is the other name, whichever of them is the field.
    theirs = {frozenset(pair) for pair in cls.attribute_map.items()}
    assert {frozenset(pair) for pair in ALIASES[model_type].items()} == theirs


def test_fields_of_generation_are_known() -> None:
    parameters = transformers.GenerationConfig._get_default_generation_params()
    assert parameters.keys() <= COMMON.keys() | {"use_cache"}


@pytest.mark.parametrize("model_type", FIELDS)
def test_whole_configs_are_understood(model_type: str) -> None:
    cls = getattr(transformers, f"{CLASSES[model_type]}Config")
    everything = json.loads(cls(**MODELS[model_type]).to_json_string(use_diff=False))
    assert defaults(cls).keys() <= {ALIASES[model_type].get(name, name) for name in everything}
    assert model_options(everything)["router"] == {"top_k": 3, "normalize": True}
    # A file that says nothing means what an object without arguments means.
    assert model_options({"model_type": model_type}) == model_options(
        json.loads(cls().to_json_string(use_diff=False))
    )


@pytest.mark.parametrize("model_type", FIELDS)
def test_logits_with_another_value_of_every_field_that_is_read(model_type: str, tmp_path: Path) -> None:
    config = write_random(model_type, tmp_path)
    written = {ALIASES[model_type].get(name, name): value for name, value in config.items()}
    for name, field in FIELDS[model_type].items():
        if isinstance(field.use, Read) and field.default is not ABSENT:
            assert written[name] != field.default, name
    assert difference(tmp_path) < 1e-4


@pytest.mark.parametrize("model_type", FIELDS)
@pytest.mark.parametrize(
    "places",
    [
        {"rope_theta": 77.0},
        {"rope_theta": 77.0, "rope_scaling": None, "rope_parameters": None},
        {"rope_scaling": {"type": "default", "rope_theta": 77.0}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 77},
        {"rope_parameters": {"rope_theta": 77.0}},
        {},
    ],
)
def test_the_base_of_rotary_positions_stands_in_three_places(
    model_type: str, places: dict[str, Any], tmp_path: Path
) -> None:
    cls = getattr(transformers, f"{CLASSES[model_type]}Config")
    config = {"model_type": model_type, **places}
    expected = cls.from_dict(json.loads(json.dumps(config))).rope_parameters["rope_theta"]
    assert model_options(config)["model"]["rope_theta"] == expected


@pytest.mark.parametrize("model_type", FIELDS)
def test_absent_fields_are_transformers_defaults(model_type: str, tmp_path: Path) -> None:
    kept = {"rope_parameters": None, "rms_norm_eps": FIELDS[model_type]["rms_norm_eps"].default}
    write_random(model_type, tmp_path, **kept, tie_word_embeddings=False, norm_topk_prob=False)
    change_config(
        tmp_path,
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
        "norm_topk_prob",
        "hidden_act",
        "dtype",
    )
    assert difference(tmp_path) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}),
        ("mixtral", {"num_hidden_layers": 1, "num_experts_per_tok": 5, "num_key_value_heads": 6}),
        ("olmoe", {"num_key_value_heads": None, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    ],
)
def test_logits_at_the_edges(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    write_random(model_type, tmp_path, **fields)
    assert difference(tmp_path) < 1e-4


# Of the cards of the models: fields as they were published.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "OLMoE-1B-7B-0924": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 50304,
    },
    "Qwen3-Coder-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144,
        "max_window_layers": 28, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": True, "qkv_bias": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True, "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str) -> None:
    model_options(PUBLISHED[name])


def cases() -> list[tuple[str, dict[str, Any], str]]:
    """Model type, fields, and what the refusal names."""
    found = []
    for model_type in FIELDS:
        for name, field in known(model_type).items():
            if isinstance(field.use, Only):
                found += [
                    (model_type, {name: value}, name)
                    for value in ("surprise", True, 3, {"a": 1})
                    if not field.use.allows(value)
                ]
            elif isinstance(field.use, Read):
                found += [(model_type, {name: value}, name) for value in ("3", -1, [None], float("nan"))]
    return found


@pytest.mark.parametrize(("model_type", "fields", "named"), cases())
def test_values_that_a_field_cannot_have_are_refused(
    model_type: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json:{named}=") as refused:
        model_options({"model_type": model_type, **fields})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, r"rope_scaling\.type=linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_scaling\.rope_type=yarn"),
        ({"rope_scaling": {"factor": 4.0}}, r"rope_scaling\.factor=4\.0"),
        ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, r"rope_parameters\.type=linear"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"rope_parameters\.full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor=0\.5"),
        ({"rope_parameters": {"rope_theta": None}}, r"rope_parameters\.rope_theta=null"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e5}, r"rope_theta=100000\.0: rope_parameters"),
        ({"rope_scaling": {"rope_theta": 5.0}, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta=5"),
        ({"rope_theta": None}, "rope_theta=null"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace=1: Sidestream does not know"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_local_experts=8: num_experts says 4"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok=200: more than num_experts=128"),
        ({"num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok=1"),
        ({"num_attention_heads": 24}, "num_attention_heads=24: does not divide"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: does not divide"),
        ({"head_dim": 63}, "head_dim=63"),
        ({"mlp_only_layers": [24]}, r"mlp_only_layers=\[24\]"),
        ({"use_sliding_window": True, "max_window_layers": 3}, "max_window_layers=3"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 24}, "layer_types"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"model_type": "llama"}, "model_type=llama: .*mixtral, olmoe, qwen3_moe"),
        ({"model_type": ["qwen3_moe"]}, "model_type"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json:.*{named}"):
        model_options({"model_type": "qwen3_moe", **fields})


def test_fields_of_another_family_are_not_taken(tmp_path: Path) -> None:
    for field in ({"norm_topk_prob": False}, {"mlp_only_layers": [0]}, {"use_sliding_window": False}):
        with pytest.raises(ConfigError, match="does not know what this field means"):
            model_options({"model_type": "mixtral", **field})
    with pytest.raises(ConfigError, match="head_dim"):
        model_options({"model_type": "olmoe", "head_dim": 64})


def test_text_of_the_file_is_shown_and_not_obeyed() -> None:
    with pytest.raises(ConfigError) as refused:
        model_options({"model_type": "olmoe", "a\x1b[2J\nerror: all well": "\x1b]0;x\x07"})
    assert "\x1b" not in str(refused.value) and "\n" not in str(refused.value)


def test_the_page_has_the_tables(capsys: pytest.CaptureFixture) -> None:
    from sidestream.commands.convert_hf import fields

    fields()
    page = (ROOT / "docs" / "huggingface_fields.md").read_text()
    assert page.endswith(capsys.readouterr().out), (
        "python scripts/convert_hf.py fields prints the last part of it"
    )
