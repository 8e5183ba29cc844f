"""An option of somebody's own in each group: a class in their package and a YAML file, and nothing else edited."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.launch import entry
from sidestream.predict.here import check_memory
from sidestream.predict.predict import predict

CONF = Path(__file__).resolve().parents[2] / "conf"
BASES = {
    "router": ("sidestream.routing.router", "SoftmaxRouter", "softmax"),
    "balance": ("sidestream.routing.balance", "AuxLoss", "aux_loss"),
    "dispatcher": ("sidestream.dispatch.alltoall", "AllToAllDispatcher", "alltoall"),
    "fusion": ("sidestream.fusion.grouped", "GroupedExperts", "grouped"),
    "overlap": ("sidestream.overlap.shared_expert", "SharedExpertOverlap", "shared_expert"),
    "graph": ("sidestream.graph.none", "NoGraph", "none"),
    "link": ("sidestream.exchange.link", "NativeLink", "native"),
    "strategy": ("sidestream.parallel.replicate", "Replicate", "replicate"),
    "optimizer": ("torch.optim", "AdamW", "adamw"),
    "scheduler": ("sidestream.lightning.schedules", "Cosine", "cosine"),
    "data": ("sidestream.data.python_source", "PythonSource", "python_source"),
}
PREDICTED = ["model=qwen3_30b_a3b", "cluster=gb300_nvl72", "cluster.num_gpus=8", "predict.plot=false"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the package `own_parts` and a config folder; `mine` has the keys of a shipped option, and one more.

    `bare` has no key but `_target_`.
    """
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts").mkdir()
    lines = []
    for group, (module, base, option) in BASES.items():
        lines += [
            f"import {module}",
            f"class {base}Mine({module}.{base}):",
            "    def __init__(self, *values, my_key=3, **options):",
            "        super().__init__(*values, **options)",
        ]
        shipped = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
        plain = re.sub(r"^defaults:\n(  - .*\n)+", "", shipped, flags=re.M)
        target = f"_target_: own_parts.{base}Mine\n"
        (folder / "conf" / group).mkdir(parents=True)
        mine = re.sub(r"_target_: .*\n", f"{target}my_key: 3\n", plain)
        (folder / "conf" / group / "mine.yaml").write_text(mine, encoding="utf-8")
        (folder / "conf" / group / "bare.yaml").write_text(target, encoding="utf-8")
    (folder / "own_parts" / "__init__.py").write_text("\n".join(lines), encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def composed(own: Path, *overrides: str, command: str = "train") -> DictConfig:
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        places = [f"hydra.searchpath=[file://{own / 'conf'}]", "trusted_targets=[own_parts]"]
        return compose(command, [*places, *overrides])


@pytest.mark.parametrize("group", BASES)
def test_it_may_have_keys_of_its_own(group: str, own: Path) -> None:
    cfg = composed(own, f"{group}=mine", f"{group}.my_key=4")
    layout = check(cfg, device_count=0)
    assert (layout.world_size, cfg[group].my_key) == (2, 4)
    check_memory(cfg, layout)


@pytest.mark.parametrize("group", BASES)
def test_what_it_lacks_is_one_line(group: str, own: Path) -> None:
    """Keys that something else needs are named; all others may be missing."""
    needed = {"strategy": "strategy.expert_parallel_size", "data": "data.seq_length"}
    if group not in needed:
        check(composed(own, f"{group}=bare"), device_count=0)
        return
    with pytest.raises(ConfigError, match=f"{needed[group]}=.*needed by every"):
        check(composed(own, f"{group}=bare"), device_count=0)


@pytest.mark.parametrize("value", ["0", "-1", "true", "soon"])
def test_the_time_out_of_an_own_strategy_is_checked(value: str, own: Path) -> None:
    with pytest.raises(ConfigError, match=f"strategy.timeout_seconds={value}.*more than 0"):
        check(composed(own, "strategy=mine", f"strategy.timeout_seconds={value}"), device_count=0)


@pytest.mark.parametrize("option", ["mine", "bare"])
@pytest.mark.parametrize("group", BASES)
def test_it_is_predicted_or_what_is_not_known_is_named(group: str, option: str, own: Path) -> None:
    cfg = composed(own, *PREDICTED, f"{group}={option}", command="predict")
    # A library moves rows by itself: no link can slow it. Models bring what predictions need of `router`
    # and `data`.
    if group not in ("dispatcher", "overlap", "link") and (group, option) != ("strategy", "bare"):
        predict(cfg, cluster="gb300_nvl72", model="qwen3_30b_a3b")
        return
    with pytest.raises(ConfigError, match=rf"^{group}[^\n]*; set [^\n]*$"):
        predict(cfg, cluster="gb300_nvl72", model="qwen3_30b_a3b")


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"),
    [
        (["optimizer=adamw"], 8),
        (["optimizer=sgd"], 4),
        (["optimizer=sgd", "optimizer.momentum=0"], 0),
        (["optimizer._target_=torch.optim.Adagrad"], 4),
        (["optimizer._target_=torch.optim.NAdam"], 8),
        (["optimizer=mine"], 8),
    ],
)
def test_memory_of_the_optimizer(optimizer: list[str], bytes_per_parameter: int, own: Path) -> None:
    from sidestream.predict.read import state_bytes

    cfg = composed(own, *optimizer, "trainer.precision=32-true", command="predict")
    assert state_bytes(cfg) == (4, 4, bytes_per_parameter)
