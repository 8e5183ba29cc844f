"""Closed-form counts against models that are built, and against what publishers state. Nothing here holds memory."""

from dataclasses import replace

import pytest
import torch
from hydra import compose, initialize_config_dir

from sidestream import build
from sidestream.config.compatibility import check
from sidestream.dispatch.local import LocalDispatcher
from sidestream.fusion.loop import LoopExperts
from sidestream.launch import entry
from sidestream.model.account import account
from sidestream.model.config import ModelShape
from sidestream.model.moe import MoEParts
from sidestream.model.transformer import MoETransformer
from sidestream.overlap.none import NoOverlap
from sidestream.routing.balance import NoBalance
from sidestream.routing.router import SoftmaxRouter
from tests.model.shapes import SHAPES
from tests.train.fit import CONF

# Billions: (all, active, is the embedding counted as active). Sources:
# OLMoE: table 1 of arXiv 2409.02060 (1.3 and 6.9 in its title); Mixtral: section 3 of arXiv 2401.04088 (47 and 13)
# and mistral.ai/news/mixtral-of-experts; Qwen3: the model cards on Hugging Face and table 2 of arXiv 2505.09388;
# DeepSeek-V3: README_WEIGHTS.md of its repository. It says 36.7 with 0.9 of embedding and 0.9 of head, but the sum
# of its weights is 36.63 with only one of the two and 37.55 with both; section 4.2 of arXiv 2412.19437 rounds to 37.
PUBLISHED = {
    "olmoe_1b_7b": (6.92, 1.28, True),
    "mixtral_8x7b": (46.7, 12.9, True),
    "qwen3_30b_a3b": (30.5, 3.3, True),
    "qwen3_235b_a22b": (235.1, 22.2, True),
    "deepseek_v3": (671.0, 36.7, False),
}
TOP_K = dict.fromkeys(PUBLISHED, 8) | {"mixtral_8x7b": 2}


def shape_of(model: str) -> ModelShape:
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", [f"model={model}"])
    check(cfg, device_count=0)
    return build.model_shape(cfg, vocab_size=256)


def on_meta(shape: ModelShape, top_k: int) -> MoETransformer:
    parts = MoEParts(
        router=SoftmaxRouter(top_k=top_k),
        balance=NoBalance(),
        dispatcher=LocalDispatcher(),
        fusion=LoopExperts(alignment=1),
        expert_range=(0, shape.num_experts),
    )
    with torch.device("meta"):
        return MoETransformer(shape, parts, NoOverlap())


def assert_counts(shape: ModelShape, top_k: int) -> None:
    counts = account(shape, top_k=top_k, seq_length=4096)
    parameters = dict(on_meta(shape, top_k).named_parameters())
    assert all(p.is_meta for p in parameters.values())
    experts = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
    total = sum(p.numel() for p in parameters.values())
    assert counts.params_total == total
    assert counts.params_active == total - experts + experts // shape.num_experts * top_k
    assert counts.params_embedding == parameters["embedding.weight"].numel()


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(model: str):
    shape, (total, active, with_embedding) = shape_of(model), PUBLISHED[model]
    assert_counts(shape, TOP_K[model])
    counts = account(shape, top_k=TOP_K[model], seq_length=4096)
    ours = counts.params_active - (0 if with_embedding else counts.params_embedding)
    assert counts.params_total / 1e9 == pytest.approx(total, rel=0.01)
    if model == "qwen3_30b_a3b":  # its weights are public and sum to 3.353: the figure was cut, not rounded
        assert active <= ours / 1e9 < active + 0.1
    else:
        assert ours / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("model", ["tiny", "small", "tiny_dense"])
def test_counts_of_a_small_model_equal_the_built_one(model: str):
    assert_counts(shape_of(model), top_k=2)


@pytest.mark.parametrize("feature", SHAPES)
def test_counts_of_a_feature_equal_the_built_one(feature: str):
    assert_counts(SHAPES[feature], top_k=2)


GPT_OSS_120B = ModelShape(
    vocab_size=201088,
    num_layers=36,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=2880,
    moe_layers=1,
    num_experts=128,
    expert_hidden_size=2880,
    num_shared_experts=0,
    sliding_window=128,
    full_attention_layers=2,
    dropout=0.0,
    activation_checkpointing=False,
    rope_theta=150000.0,
    norm_eps=1e-5,
    init_std=0.02,
)


# Gigaflops per token at 4096 tokens: TFLOPS per GPU over tokens per second per GPU in the performance summaries of
# NVIDIA-NeMo/Megatron-Bridge, release 26.08 (DeepSeek-V3 without multi-token prediction). Largest difference: 0.06 %.
@pytest.mark.parametrize(
    ("shape", "top_k", "published"),
    [
        ("deepseek_v3", 8, 249.74),
        ("qwen3_30b_a3b", 8, 23.02),
        ("qwen3_235b_a22b", 8, 147.94),
        (GPT_OSS_120B, 4, 32.61),
    ],
    ids=["deepseek_v3", "qwen3_30b_a3b", "qwen3_235b_a22b", "gpt_oss_120b"],
)
def test_flops_per_token_are_the_published_ones(shape: str | ModelShape, top_k: int, published: float):
    shape = shape_of(shape) if isinstance(shape, str) else shape
    flops = account(shape, top_k=top_k, seq_length=4096).flops_per_token
    assert flops / 1e9 == pytest.approx(published, rel=0.004)


def test_flops_of_attention_count_the_tokens_that_are_seen():
    def of(**changes: object) -> int:
        shape = replace(SHAPES["plain"], **changes)
        return account(shape, top_k=2, seq_length=64).flops_per_token

    def seen(window: int) -> float:
        return sum(min(t + 1, window) for t in range(64)) / 64

    per_token = 3 * 2 * 2 * 64 * 3  # training, multiply-add, scores and values, width of all heads, layers
    for window in (2, 8, 32, 64):
        counted = (of(sliding_window=window) - of(sliding_window=1)) / per_token
        # The closed form has S / 2 where the sum over tokens has (S + 1) / 2.
        assert counted == pytest.approx(seen(window) - seen(1), abs=0.5)
    assert of(sliding_window=64) == of(sliding_window=1000) == of()
    assert of(sliding_window=8) < of(sliding_window=8, full_attention_layers=(1,)) < of()
