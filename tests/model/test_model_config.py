"""What the model's keys refuse, and what a preset's experiment runs."""

import pytest
from hydra import compose, initialize_config_dir

from sidestream import build
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.config.model_check import moe_blocks
from sidestream.launch import entry
from sidestream.model.config import MLAShape
from tests.model.test_account import PUBLISHED, TOP_K
from tests.train.fit import CONF

LATENT = "model=deepseek_v3"


def composed(*overrides: str):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


@pytest.mark.parametrize(
    ("overrides", "start", "end"),
    [
        (["model.head_dim=7"], "model.head_dim=7: rotary", "model.head_dim=8"),
        (["model.full_attention_layers=2"], "model.full_attention_layers=2: without", "layers=[]"),
        (
            ["model.sliding_window=8", "model.full_attention_layers=1"],
            "model.sliding_window=8: model.full_attention_layers=1 leaves no block",
            "model.sliding_window=null",
        ),
        (
            ["model.sliding_window=8", "model.full_attention_layers=[4]"],
            "model.full_attention_layers=[4]: not distinct blocks",
            "layers=[]",
        ),
        (["model.first_dense_layers=4"], "model.first_dense_layers=4: leaves no MoE block", "=0"),
        (
            ["model.num_shared_experts=0", "model.shared_expert_gate=true"],
            "model.shared_expert_gate=true: model.num_shared_experts=0",
            "num_shared_experts=1",
        ),
        (
            ["model.num_shared_experts=0", "model.shared_expert_hidden_size=64"],
            "model.shared_expert_hidden_size=64:",
            "num_shared_experts=1",
        ),
        ([LATENT, "model.num_kv_heads=64"], "model.num_kv_heads=64: with model.mla every", "=128"),
        ([LATENT, "model.head_dim=128"], "model.head_dim=128: model.mla states", "head_dim=null"),
        ([LATENT, "model.qk_norm=head"], "model.qk_norm=head: model.mla norms", "qk_norm=none"),
        ([LATENT, "model.mla.qk_rope_head_dim=7"], "model.mla.qk_rope_head_dim=7: rotary", "=8"),
        ([LATENT, "model.mla.kv_lora_rank=0"], "model.mla.kv_lora_rank=0: out of range", "rank=1"),
        (["model.qk_norm=yes"], "model.qk_norm=yes: not a choice; expected one of none, head, full", ""),
        (["+model.first_k_dense_replace=1"], "model.first_k_dense_replace=1:", "first_dense_layers=1"),
    ],
)
def test_a_mistake_in_the_model_is_refused(overrides: list[str], start: str, end: str):
    with pytest.raises(ConfigError) as refused:
        check(composed(*overrides), device_count=0)
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(start), line
    assert line.endswith(end), line


def test_a_vocabulary_smaller_than_the_datas_is_refused():
    cfg = composed("model.vocab_size=200")
    assert build.model_shape(cfg, vocab_size=100).vocab_size == 200
    with pytest.raises(ConfigError, match=r"model.vocab_size=200: the data has 256 different tokens"):
        build.model_shape(cfg, vocab_size=256)
    assert build.model_shape(composed(), vocab_size=256).vocab_size == 256


def test_blocks_of_the_config_check_are_those_of_the_model():
    for overrides in (
        ["model.moe_layers=1", "model.first_dense_layers=2"],
        ["model.moe_layers=[0,3]", "model.first_dense_layers=1"],
        ["model.moe_layers=2"],
    ):
        cfg = composed(*overrides)
        check(cfg, device_count=0)
        expected = moe_blocks(4, cfg.model.moe_layers, cfg.model.first_dense_layers)
        assert list(build.model_shape(cfg, vocab_size=2).moe_blocks) == expected


def test_a_latent_preset_becomes_a_latent_shape():
    shape = build.model_shape(composed(LATENT, "model.mla.q_lora_rank=null"), vocab_size=2)
    assert shape.mla == MLAShape(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    assert shape.moe_blocks == tuple(range(3, 61))


@pytest.mark.parametrize("model", PUBLISHED)
def test_an_experiment_adds_the_routing_of_its_preset(model: str):
    cfg = composed(f"experiment={model}")
    check(cfg, device_count=0)
    assert cfg.model == composed(f"model={model}").model
    assert cfg.router.top_k == TOP_K[model]
