"""`initial_weights`: a model that is not the one of the weights is refused, with both values and what to set."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from sidestream.config import schema
from sidestream.config.errors import ConfigError
from sidestream.convert.function import KEYS
from sidestream.convert.start import _config_beside, check_weights
from tests.convert.tiny import change_config, write_random, write_run
from tests.train.fit import compose_run

pytest.importorskip("transformers", reason="pip install 'transformers>=5'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "hf"
    write_random("qwen3_moe", path, vocab_size=256)
    return path


def words(folder: Path) -> list[str]:
    from sidestream.commands.convert_hf import overrides, read_options

    return [*overrides(read_options(folder)), f"initial_weights={folder}"]


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, Any]:
    """The config of a model that is that of the folder."""
    return compose_run(words(folder), world=1)[0]


def changed(cfg: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """The config with `key=value` words applied; values are YAML, a bare class is a `_target_`."""
    new: Any = OmegaConf.create(copy.deepcopy(cfg))
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(new, key, yaml.safe_load(value), force_add=True)
    return OmegaConf.to_container(new)  # type: ignore[return-value]


SIGMOID = "router._target_=sidestream.routing.router.SigmoidRouter"
SHORTCUT = "overlap._target_=sidestream.overlap.shortcut.ShortcutOverlap"
BIAS = "balance._target_=sidestream.routing.balance.ExpertBias"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.rope_theta=1000000.0",
            r"model\.rope_theta=1000000\.0: .*with 500\.0.*set model\.rope_theta=500\.0",
        ),
        ("model.norm_eps=0.000001", r"model\.norm_eps=1e-06: .*0\.001"),
        ("router.top_k=2", r"router\.top_k=2: .*with 3; .*set router\.top_k=3"),
        ("router.normalize=false", r"router\.normalize=false: .*true"),
        ("router.scaling_factor=2.5", r"router\.scaling_factor=2\.5: .*set router\.scaling_factor=1\.0"),
        (SIGMOID, r"SigmoidRouter: .*set router=softmax"),
        ("router.num_groups=5 router.top_groups=3", r"router\.num_groups=5: .*set router\.num_groups=null"),
        ("model.sliding_window=null", r"model\.sliding_window=null: .*with 5"),
        ("model.sliding_window=6", r"model\.sliding_window=6: .*with 5"),
        (
            "model.full_attention_layers=[0]",
            r"full_attention_layers=\[0\]: .*set model\.full_attention_layers=\[\]",
        ),
        ("model.num_heads=3", r"model\.num_heads=3: .*with 6"),
        ("model.num_kv_heads=6", r"model\.num_kv_heads=6: .*with 3"),
        ("model.head_dim=8", r"model\.head_dim=8: .*with 10"),
        ("model.qk_norm=none", r"model\.qk_norm=none: .*with head"),
        ("model.vocab_size=300", r"model\.vocab_size=300: .*with 256"),
        ("model.tie_embeddings=false", r"model\.tie_embeddings=false: .*with true"),
        ("model.num_layers=5", r"model\.num_layers=5: .*with 4"),
        ("model.num_experts=6", r"model\.num_experts=6: .*with 5"),
        ("model.moe_layers=[3]", r"model\.moe_layers=\[3\]: .*with \[1\]; .*set model\.moe_layers=\[1\]"),
        ("model.moe_layers=1", r"model\.moe_layers=\[0,1,2,3\]: .*with \[1\]"),
        ("model.num_shared_experts=1", r"model\.num_shared_experts=1: .*with 0"),
        ("model.ffn_hidden_size=64", r"model\.ffn_hidden_size=64: .*with 40"),
        (SHORTCUT, r"ShortcutOverlap: .*set overlap=none"),
        (
            "model.rope_theta=5 router.top_k=1",
            r"model\.rope_theta=5\.0: .*also router\.top_k=1 where theirs is 3",
        ),
    ],
)
def test_each_difference_from_config_json_is_refused(
    override: str, message: str, folder: Path, built: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_weights(changed(built, *override.split()), folder)
    assert "\n" not in str(refused.value)


def test_a_difference_is_refused_before_ranks_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.rope_theta=10\.0"):
        compose_run([*words(folder), "model.rope_theta=10"], world=2)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [BIAS],
        ["router.score_order=after_top_k", "router.normalize=auto"],
        ["router.expert_capacity_factor=1.5"],
        [
            "overlap._target_=sidestream.overlap.chunked.ChunkedOverlap",
            "model.dropout=0.1",
            "router.jitter=0.01",
        ],
        ["model.vocab_size=null"],
    ],
)
def test_what_leaves_the_function_as_it_is_may_differ(
    overrides: list[str], folder: Path, built: dict[str, Any]
) -> None:
    assert check_weights(changed(built, *overrides), folder) is None


def test_the_vocabulary_is_compared_once_the_data_is_known(folder: Path, built: dict[str, Any]) -> None:
    cfg = changed(built, "model.vocab_size=null")
    check_weights(cfg, folder, vocab_size=256)
    with pytest.raises(ConfigError, match=r"model\.vocab_size=100: .*with 256"):
        check_weights(cfg, folder, vocab_size=100)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of ours, and the config of its run."""
    path = tmp_path_factory.mktemp("ours") / "run"
    cfg = write_run(path, "model.num_layers=2", "balance=bias", "router.normalize=true")
    return path / "checkpoints" / "step-00000001", cfg


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.rope_theta=5", r"model\.rope_theta=5\.0: .*with 10000\.0"),
        ("router.top_k=1 router.normalize=false", r"router\.top_k=1: .*also router\.normalize=false"),
        (SIGMOID, r"SigmoidRouter: .*set router=softmax"),
        (
            "router.score_order=after_top_k",
            r"router\.score_order=after_top_k: .*set router\.score_order=before",
        ),
        ("balance._target_=sidestream.routing.balance.NoBalance", r"NoBalance: .*set balance=bias"),
        (SHORTCUT, r"ShortcutOverlap: .*set overlap=none"),
    ],
)
def test_a_checkpoint_of_ours_is_compared_with_the_config_of_its_run(
    override: str, message: str, run: tuple[Path, dict[str, Any]]
) -> None:
    checkpoint, cfg = run
    assert check_weights(cfg, checkpoint) is None
    with pytest.raises(ConfigError, match=message):
        check_weights(changed(cfg, *override.split()), checkpoint)


def test_a_run_folder_is_refused_with_its_newest_checkpoint(run: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"set initial_weights=.*step-00000001"):
        compose_run([f"initial_weights={run[0].parents[1]}"], world=1)


def test_a_checkpoint_without_a_config_and_a_router_of_ones_own_are_said(
    tmp_path: Path, folder: Path, built: dict[str, Any], run: tuple[Path, dict[str, Any]]
) -> None:
    moved = tmp_path / "a" / "b" / "checkpoint"
    shutil.copytree(run[0], moved)
    assert "no config beside this checkpoint" in (check_weights(run[1], moved) or "")
    assert _config_beside(Path("/checkpoint")) is None  # such as a volume of a container
    own = {**built, "router": {"_target_": "my_package.MyRouter"}}
    assert "a class of your own" in (check_weights(own, folder) or "")


def test_a_damaged_config_beside_a_checkpoint_is_one_line(
    tmp_path: Path, run: tuple[Path, dict[str, Any]]
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    shutil.copytree(run[0].parents[1], tmp_path / "run")
    huge = "model: {num_layers: 4000000000, num_heads: 1, hidden_size: 2, moe_layers: 1}"
    for text in (
        huge,
        "model: 3\n",
        "model: {num_layers: x}\n",
        "[",
        "a: &a [*a]\n",
        "model: {}\nrouter: []\n",
    ):
        (tmp_path / "run" / ".hydra" / "resolved.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"resolved\.yaml") as refused:
            check_weights(run[1], checkpoint)
        assert "\n" not in str(refused.value)


def test_every_key_is_part_of_the_function_or_has_a_reason() -> None:
    for group, keys in KEYS.items():
        theirs = {key for option in schema.SCHEMAS[group].values() for key in option.__dataclass_fields__}
        assert keys.keys() == theirs, group


def test_the_folder_is_looked_at_before_ranks_start(
    folder: Path, built: dict[str, Any], tmp_path: Path
) -> None:
    copied = tmp_path / "hf"
    shutil.copytree(folder, copied)
    change_config(copied, attention_bias=True)
    with pytest.raises(ConfigError, match="attention_bias=true"):
        check_weights(built, copied)
    change_config(copied, attention_bias=False)
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors: no weights in the folder"):
        check_weights(built, copied)
