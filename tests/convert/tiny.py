"""Small random models of transformers, in folders; runs with random weights, without training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from sidestream import build
from sidestream.convert import verify
from tests.fake_checkpoint import seal
from tests.train.fit import compose_run

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]

CLASSES = {"mixtral": "Mixtral", "olmoe": "Olmoe", "qwen3_moe": "Qwen3Moe"}
_SIZES = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-3,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 3,
    "eos_token_id": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
# Every field that we read has another value than its class's default.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "num_local_experts": 5, "head_dim": 10, "sliding_window": 5},
    "olmoe": {**_SIZES, "num_experts": 5, "norm_topk_prob": True},
    "qwen3_moe": {
        **_SIZES,
        "num_experts": 5,
        "norm_topk_prob": True,
        "head_dim": 10,
        "use_sliding_window": True,
        "sliding_window": 5,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
}


def write_random(model_type: str, folder: Path, **fields: Any) -> dict[str, Any]:
    """Writes a model with these fields beside those of `MODELS`; returns its config.json."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{CLASSES[model_type]}Config")(**{**MODELS[model_type], **fields})
    model = getattr(transformers, f"{CLASSES[model_type]}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)  # ones would hide a norm in the wrong place
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, *without: str, **fields: Any) -> None:
    """Rewrites config.json."""
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in without}
    path.write_text(json.dumps({**config, **fields}))


def difference(folder: Path) -> float:
    """Largest difference of our logits of a folder from those of transformers."""
    from sidestream.commands.convert_hf import compose_model, read_options
    from sidestream.convert.huggingface_folder import load_huggingface

    cfg = compose_model(read_options(folder))
    tokens = verify.example_tokens(cfg.model.vocab_size, cfg.model.sliding_window)
    with verify.alone() as parallel:
        ours = verify.our_logits(cfg, parallel, tokens, lambda model: load_huggingface(model, folder))
    theirs = verify.their_logits(folder, tokens)
    assert theirs is not None
    return float((ours - theirs).abs().max())


def write_run(folder: Path, *overrides: str, bias: float = 0.0) -> Any:
    """A run folder with a checkpoint of random weights, and this in every selection bias; returns its config."""
    import torch.distributed.checkpoint as dcp

    cfg, _ = compose_run([*overrides, "model.vocab_size=256"], world=1)
    resolved: Any = OmegaConf.create(cfg)
    (folder / ".hydra").mkdir(parents=True)
    OmegaConf.save(resolved, folder / ".hydra" / "resolved.yaml")
    with verify.alone() as parallel:
        builder = build.model_builder(resolved, vocab_size=256, device=torch.device("cpu"))
        model = builder(parallel)
        for name, buffer in model.named_buffers():
            if name.endswith("selection_bias"):
                buffer[0] = bias
        checkpoint = folder / "checkpoints" / "step-00000001"
        state = {f"model.{name}": value for name, value in model.state_dict().items()}
        dcp.save({"state_dict": state}, checkpoint_id=checkpoint)
        (checkpoint / "meta.pt").write_bytes(b"nobody reads it here")
        seal(checkpoint)
        model.parts.dispatcher.close()
    return cfg
