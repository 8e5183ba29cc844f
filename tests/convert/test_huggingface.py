"""Mixtral, OLMoE and Qwen3-MoE in and out: logits of small random `transformers` models equal ours, both ways."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from sidestream import build
from sidestream.config.errors import ConfigError
from sidestream.convert.families import model_options
from sidestream.convert.target import config_json
from sidestream.lightning.checkpoint import checkpoints
from sidestream.parallel.reduction import local
from tests.core.build_tiny import parallel_for
from tests.rank_pool import ranks
from tests.train.fit import compose_run, fit

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
ROOT = Path(__file__).parents[2]

COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 5}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "olmoe-normalized": ("Olmoe", {"num_experts": 4, "norm_topk_prob": True}),
    "qwen3": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
    ),
    "qwen3-dense-block-tied": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
}


def write_random(name: str, folder: Path) -> None:
    prefix, extra = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{prefix}Config")(**COMMON, **extra)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)  # ones would hide a norm in the wrong place
    model.save_pretrained(folder)


def their_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(3))


def our_logits(rank: int, world: int, cfg: Any, ep: int) -> torch.Tensor:
    """Built like in training: read before sharding, experts in pieces."""
    model = build.model_builder(cfg, vocab_size=256, device=torch.device("cpu"))(parallel_for(ep))
    experts = model.moe_layers()[0].experts.w_down
    assert local(experts).shape[0] == 4 // ep
    build.reduction(cfg).shard(model, parallel_for(ep))
    model.eval()
    with torch.no_grad():
        logits = model(tokens())
    model.parts.dispatcher.close()
    return logits


def config_for(folder: Path, *extra: str) -> Any:
    from sidestream.commands.convert_hf import compose_model, read_options

    cfg = compose_model(read_options(folder))
    cfg.initial_weights = str(folder)
    for part in extra:
        key, value = part.split("=")
        OmegaConf.update(cfg, key, value)
    return cfg


@pytest.mark.parametrize("name", list(MODELS))
def test_logits_of_their_checkpoint_equal_ours(name: str, tmp_path: Path) -> None:
    write_random(name, tmp_path / "hf")
    expected = their_logits(tmp_path / "hf", tokens())
    cfg = config_for(tmp_path / "hf", "dispatcher._target_=sidestream.dispatch.alltoall.AllToAllDispatcher")
    for world, ep in [(1, 1), (2, 1), (2, 2)]:
        for logits in ranks(world).run(our_logits, cfg=cfg, ep=ep):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3"])
@pytest.mark.full
def test_trained_run_exports_to_equal_logits(name: str, tmp_path: Path) -> None:
    """Their weights -> one training step on 2 ranks -> export -> their logits equal ours; and back in again."""
    from sidestream.commands.convert_hf import export, overrides, read_options

    write_random(name, tmp_path / "hf")
    run = tmp_path / "run"
    words = [w for w in overrides(read_options(tmp_path / "hf")) if not w.startswith("model.vocab_size")]
    fit(run, *words, "trainer.max_steps=1", f"initial_weights={tmp_path / 'hf'}")
    cfg, _ = compose_run([*words, "trainer.max_steps=1"], world=2)
    OmegaConf.save(OmegaConf.create(cfg), run / ".hydra" / "resolved.yaml")

    export(run, tmp_path / "out", dtype=None)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0  # of bytes
    theirs = their_logits(tmp_path / "out", tokens())
    loaded = OmegaConf.create({**cfg, "initial_weights": None})
    (ours,) = ranks(1).run(logits_of_checkpoint, cfg=loaded, checkpoint=str(checkpoints(run)[-1]))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    # The step changed the weights, so this was not the way in again.
    assert (theirs - their_logits(tmp_path / "hf", tokens())).abs().max() > 1e-3

    ranks(1).run(import_in_pool, source=str(tmp_path / "out"), out=str(tmp_path / "imported"))
    (again,) = ranks(1).run(
        logits_of_checkpoint, cfg=loaded, checkpoint=str(tmp_path / "imported" / "checkpoint")
    )
    assert torch.equal(again, ours)


def import_in_pool(rank: int, world: int, source: str, out: str) -> None:
    from sidestream.commands.convert_hf import import_

    import_(Path(source), Path(out))


def logits_of_checkpoint(rank: int, world: int, cfg: Any, checkpoint: str) -> torch.Tensor:
    from sidestream.parallel.weights import load_weights

    model = build.model_builder(cfg, vocab_size=256, device=torch.device("cpu"))(parallel_for(1))
    load_weights(model, Path(checkpoint))
    model.eval()
    with torch.no_grad():
        logits = model(tokens())
    model.parts.dispatcher.close()
    return logits


def test_several_shards_are_read_and_written(tmp_path: Path) -> None:
    from sidestream.convert.huggingface_folder import Reader, read_config, write_huggingface

    write_random("qwen3", tmp_path / "hf")
    options = model_options(read_config(tmp_path / "hf"))
    shape = build.model_shape(config_for(tmp_path / "hf"), vocab_size=256)
    config = config_json(
        {**options["model"]},
        {**options["router"], "_target_": "sidestream.routing.router.SoftmaxRouter"},
        dtype="float32",
    )
    with Reader(tmp_path / "hf") as reader:
        names = ["embedding.weight", "final_norm.weight", "head.weight"]
        theirs = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
        write_huggingface(
            tmp_path / "out",
            names=names,
            tensor=lambda name: reader.get(f"{theirs[name.split('.')[0]]}.weight"),
            shape=shape,
            config=config,
            dtype=torch.float32,
            shard_bytes=70_000,
        )
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    with Reader(tmp_path / "out") as written, Reader(tmp_path / "hf") as original:
        assert written.names == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        assert all(torch.equal(written.get(n), original.get(n)) for n in written.names)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "mixtral, olmoe, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
    ],
)
def test_models_we_do_not_compute_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_random("qwen3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        model_options({**config, **change})


def test_another_shape_is_refused_before_the_model_is_built(tmp_path: Path) -> None:
    write_random("qwen3", tmp_path)
    cfg = config_for(tmp_path, "model.expert_hidden_size=64")
    with pytest.raises(ConfigError, match=r"model\.expert_hidden_size=64: .* are of a model with 32"):
        build.model_builder(cfg, vocab_size=256, device=torch.device("cpu"))


def test_a_model_no_family_computes_is_refused_at_export() -> None:
    cfg, _ = compose_run(["model.moe_layers=1"], world=1)
    with pytest.raises(ConfigError, match=r"model\.num_shared_experts=1"):
        config_json(cfg["model"], cfg["router"], dtype="float32")
