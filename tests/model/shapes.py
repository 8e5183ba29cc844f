"""Variants of the micro model, one per feature and two with everything on."""

from dataclasses import replace

from sidestream.model.config import MLAShape
from tests.core.build_tiny import SHAPE

MLA = MLAShape(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10)
LATENT = {"mla": MLA, "num_kv_heads": 4}
GATED = {"shared_expert_gate": True, "shared_expert_hidden_size": 48}
WINDOW = {"sliding_window": 5, "full_attention_layers": 2}  # blocks 0 and 2 of 3

FEATURES = {
    "plain": {},
    "head_norm": {"qk_norm": "head"},
    "full_norm": {"qk_norm": "full"},
    "head_dim": {"head_dim": 24},
    "window": WINDOW,
    "window_everywhere": {"sliding_window": 1},
    "window_list": {"sliding_window": 3, "full_attention_layers": (0, 2)},
    "window_longer_than_the_sequence": {"sliding_window": 100},
    "tied": {"tie_embeddings": True},
    "shared_gate": {"shared_expert_gate": True},
    "shared_width": {"shared_expert_hidden_size": 48},
    "no_shared": {"num_shared_experts": 0},
    "first_dense": {"moe_layers": 1, "first_dense_layers": 2},
    "latent": LATENT,
    "latent_without_q_lora": {**LATENT, "mla": replace(MLA, q_lora_rank=None)},
    "everything": {"qk_norm": "full", "head_dim": 24, **WINDOW, **GATED, "tie_embeddings": True},
    "everything_latent": {**LATENT, **WINDOW, **GATED, "tie_embeddings": True},
}
SHAPES = {name: replace(SHAPE, **changes) for name, changes in FEATURES.items()}
