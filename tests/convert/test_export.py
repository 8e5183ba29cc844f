"""An export says what the run computes, or is refused; nothing is left of one that computes something else."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidestream.config.errors import ConfigError
from sidestream.convert import verify
from sidestream.convert.fields import ABSENT, FIELDS
from sidestream.convert.target import config_json
from sidestream.routing.balance import AuxLoss
from tests.convert.tiny import CLASSES, write_random, write_run
from tests.train.fit import compose_run

transformers = pytest.importorskip("transformers", reason="pip install 'transformers>=5'")
PLAIN = ["model.num_layers=2", "model.moe_layers=1", "model.num_shared_experts=0", "router.normalize=true"]
OF = {
    "mixtral": [*PLAIN, "model.sliding_window=5", "model.head_dim=10"],
    "olmoe": [*PLAIN, "model.qk_norm=full", "router.normalize=false", "model.num_kv_heads=2"],
    "qwen3_moe": [*PLAIN, "model.qk_norm=head", "model.moe_layers=[1]", "model.tie_embeddings=true"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    write_run(path, *OF["mixtral"])
    return path


def resolved(run: Path, copied: Path, **sections: dict[str, Any]) -> Path:
    """The run with other values in its resolved config."""
    (copied / ".hydra").mkdir(parents=True)
    (copied / "checkpoints").symlink_to(run / "checkpoints")
    cfg = yaml.safe_load((run / ".hydra" / "resolved.yaml").read_text())
    for name, values in sections.items():
        cfg[name] |= values
    (copied / ".hydra" / "resolved.yaml").write_text(yaml.safe_dump(cfg))
    return copied


@pytest.mark.parametrize("model_type", FIELDS)
def test_config_json_says_all_that_transformers_would_assume(model_type: str) -> None:
    cfg, _ = compose_run([*OF[model_type], "model.vocab_size=256"], world=1)
    trained = {"eos_token_id": 5, "max_position_embeddings": 16}
    sections = {"balance": cfg["balance"], "overlap": cfg["overlap"]}
    written = config_json(cfg["model"], cfg["router"], dtype="float32", trained=trained, **sections)
    fields = {name for name, field in FIELDS[model_type].items() if field.default is not ABSENT}
    assert fields <= written.keys() and written["model_type"] == model_type
    assert [written[f"{name}_token_id"] for name in ("pad", "bos", "eos")] == [None, None, 5]
    read = getattr(transformers, f"{CLASSES[model_type]}Config").from_dict(dict(written))
    assert read.pad_token_id is None and read.bos_token_id is None and read.eos_token_id == 5
    assert read.max_position_embeddings == 16 and read.rope_parameters["rope_theta"] == 10000.0


def test_the_coefficient_of_the_loss_is_counted_as_transformers_counts() -> None:
    """Mixtral 8x7B's 0.02, which experiment=mixtral_8x7b says in our terms."""
    cfg, _ = compose_run(["model.vocab_size=256"], world=1)
    model = {**cfg["model"], "num_layers": 32, "moe_layers": 1, "num_shared_experts": 0}
    balance = {"_target_": f"{AuxLoss.__module__}.AuxLoss", "coefficient": 1.25e-3}
    router = {**cfg["router"], "top_k": 2, "normalize": True}
    written = config_json(model, router, dtype="float32", balance=balance)
    assert written["router_aux_loss_coef"] == pytest.approx(0.02)


ROUTING = "sidestream.routing"
REFUSED: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "shared experts": ({"model": {"num_shared_experts": 1}}, r"model\.num_shared_experts=1"),
    "latent attention": ({"model": {"mla": {"kv_lora_rank": 4}}}, r"model\.mla="),
    "blocks without a window": ({"model": {"full_attention_layers": [0]}}, r"model\.full_attention_layers=\[0\]"),
    "dense blocks": ({"model": {"moe_layers": [1]}}, r"model\.moe_layers=\[1\]: mixtral, .* does not compute this"),
    "dense blocks in front": ({"model": {"first_dense_layers": 1}}, r"model\.moe_layers=1"),
    "a window": ({"model": {"qk_norm": "full", "head_dim": None}}, r"model\.sliding_window=5"),
    "a head of its own width": ({"model": {"qk_norm": "full", "sliding_window": None}}, r"model\.head_dim=10"),
    "weights as they are": ({"router": {"normalize": False}}, r"router\.normalize=false"),
    "sigmoid scores": ({"router": {"_target_": f"{ROUTING}.router.SigmoidRouter"}}, "SigmoidRouter: "),
    "a class of somebody": ({"router": {"_target_": "my_package.SoftmaxRouter"}}, r"my_package\.SoftmaxRouter"),
    "groups": ({"router": {"num_groups": 2, "top_groups": 1}}, r"router\.num_groups=2"),
    "scaled weights": ({"router": {"scaling_factor": 2.5}}, r"router\.scaling_factor=2\.5"),
    "dropped routes": ({"router": {"expert_capacity_factor": 1.0}}, r"router\.expert_capacity_factor=1\.0"),
    "forced balance": ({"router": {"force_balance": True}}, r"router\.force_balance=true"),
    "a bias": ({"balance": {"_target_": f"{ROUTING}.balance.ExpertBias"}}, r"ExpertBias: .*set balance=aux_loss"),
    "a bias by quantiles": ({"balance": {"_target_": f"{ROUTING}.quantile.QuantileBalance"}}, "QuantileBalance: "),
    "a shortcut": ({"overlap": {"_target_": "sidestream.overlap.shortcut.ShortcutOverlap"}}, "ShortcutOverlap: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_family_cannot_say_is_refused(name: str) -> None:
    changes, message = REFUSED[name]
    sections: dict[str, Any] = {
        "model": dict.fromkeys(("mla", "first_dense_layers")),
        "router": {"_target_": f"{ROUTING}.router.SoftmaxRouter", "top_k": 2, "normalize": True},
        "balance": {"_target_": f"{ROUTING}.balance.NoBalance"},
        "overlap": {"_target_": "sidestream.overlap.none.NoOverlap"},
    }
    sections["model"] |= {
        "num_layers": 2,
        "moe_layers": 1,
        "num_experts": 4,
        "num_heads": 4,
        "num_kv_heads": 4,
    }
    sections["model"] |= {"hidden_size": 64, "expert_hidden_size": 64, "ffn_hidden_size": 64, "head_dim": 10}
    sections["model"] |= {"sliding_window": 5, "rope_theta": 1e4, "norm_eps": 1e-5, "qk_norm": "none"}
    sections["model"] |= {"num_shared_experts": 0, "vocab_size": 256}
    arguments = {key: value | changes.get(key, {}) for key, value in sections.items()}
    assert config_json(**sections, dtype="float32")["model_type"] == "mixtral"
    with pytest.raises(ConfigError, match=message) as refused:
        config_json(**arguments, dtype="float32")
    assert "\n" not in str(refused.value)


def test_a_softmax_over_the_chosen_is_mixtrals_own(run: Path) -> None:
    cfg, _ = compose_run(
        [*OF["mixtral"], "model.vocab_size=256", "router.score_order=after_top_k", "router.normalize=auto"],
        world=1,
    )
    assert config_json(cfg["model"], cfg["router"], dtype="float32")["model_type"] == "mixtral"


def test_an_export_has_the_ids_of_the_run_and_is_compared(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from sidestream.commands.convert_hf import export

    write_random("mixtral", tmp_path / "start")
    copied = resolved(run, tmp_path / "run")
    path = copied / ".hydra" / "resolved.yaml"
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | {"initial_weights": str(tmp_path / "start")})
    )
    (copied / "result.json").write_text(json.dumps({"eos_token": 9}))
    export(copied, tmp_path / "out", dtype="bfloat16")
    told = capsys.readouterr().out
    assert "same logits: Sidestream to 0.0e+00, transformers to" in told
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [written[f"{name}_token_id"] for name in ("pad", "bos", "eos")] == [None, 3, 9]
    assert written["dtype"] == "bfloat16" and written["max_position_embeddings"] == 131072


def test_an_export_that_computes_something_else_is_removed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sidestream.commands import convert_hf

    wrong = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": 77.0}
    monkeypatch.setattr(convert_hf, "config_json", lambda *a, **k: config_json(*a, **k) | wrong)
    with pytest.raises(
        ConfigError, match="what was written is another model, read by Sidestream: logits differ by"
    ):
        convert_hf.export(run, tmp_path / "out", dtype=None)
    assert list(tmp_path.iterdir()) == []


def test_a_bias_that_nobody_names_is_found_in_the_weights(run: Path, tmp_path: Path) -> None:
    from sidestream.commands.convert_hf import export

    write_run(tmp_path / "run", *OF["mixtral"], bias=0.5)
    with pytest.raises(
        ConfigError, match=r"balance\._target_=.*AuxLoss: blocks\.0\.moe\.selection_bias is added"
    ):
        export(tmp_path / "run", tmp_path / "out", dtype=None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_weights_that_do_not_fit_the_dtype_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from sidestream.commands.convert_hf import export
    from sidestream.model.transformer import MoETransformer

    original = MoETransformer.state_dict

    def large(self: MoETransformer, *args: Any, **kwargs: Any) -> Any:
        state = original(self, *args, **kwargs)
        return state | {"final_norm.weight": torch.full_like(state["final_norm.weight"], 1e6)}

    monkeypatch.setattr(MoETransformer, "state_dict", large)
    write_run(tmp_path / "run", *OF["mixtral"])
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight holds values that are not finite in torch\.float16"
    ):
        export(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidestream.commands.convert_hf import import_

    write_random("olmoe", tmp_path / "hf")
    other = verify.their_logits
    monkeypatch.setattr(verify, "their_logits", lambda folder, tokens: other(folder, tokens.flip(1)))
    with pytest.raises(ConfigError, match="read by transformers: logits differ by"):
        import_(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_import_has_its_config_beside_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sidestream.commands.convert_hf import import_
    from sidestream.convert.start import check_weights

    write_random("olmoe", tmp_path / "hf")
    monkeypatch.setattr(verify, "their_logits", lambda folder, tokens: None)  # as if it were not installed
    import_(tmp_path / "hf", tmp_path / "a new folder")
    told = capsys.readouterr()
    assert "not compared with transformers, which is not installed" in told.err
    line = shlex.split(told.out)
    assert (
        line[-1] == f"initial_weights='{tmp_path}/a new folder/checkpoint'" and "router.top_k=3" in told.out
    )
    cfg, _ = compose_run(["model.num_layers=2"], world=1)
    with pytest.raises(
        ConfigError, match=r"are of a model with 200; also model\.num_layers=2 where theirs is 4"
    ):
        check_weights(cfg, tmp_path / "a new folder" / "checkpoint", vocab_size=256)
