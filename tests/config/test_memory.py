"""What cannot fit into this machine's memory is refused before ranks start, with a cut-down that does."""

import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sidestream.config.compatibility import check, remarks
from sidestream.config.errors import ConfigError
from sidestream.predict import here
from tests.config.conftest import Compose

GIB = 2**30
LAPTOP = 8 * GIB


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mixtral_8x7b"],
        ["experiment=deepseek_v3"],
        ["experiment=qwen3_235b_a22b", "strategy=fully_shard"],
        ["model=olmoe_1b_7b", "trainer.precision=bf16-true", "optimizer=sgd"],
        ["data.seq_length=1000000000"],
        ["model.hidden_size=131072", "model.num_heads=1024", "model.num_kv_heads=1024"],
        ["model.vocab_size=16777216", "model.hidden_size=2048"],
    ],
)
@pytest.mark.sample(2)
def test_what_cannot_fit_is_refused_and_the_advice_fits(compose: Compose, overrides: list[str]):
    cfg = compose(*overrides)
    layout = check(cfg, device_count=0)
    with pytest.raises(ConfigError) as refused:
        here.check_memory(cfg, layout, free=LAPTOP)
    line = str(refused.value)
    assert "\n" not in line and "GiB for each on this machine" in line
    advice = line.rpartition("; set ")[2].split()
    assert advice != ["model=tiny"]
    smaller = compose(*overrides, *advice)
    here.check_memory(smaller, check(smaller, device_count=0), free=LAPTOP)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=small"],
        ["model=small", "trainer.precision=bf16-mixed"],
        ["strategy=fully_shard", "model.moe_layers=[]"],
    ],
)
def test_what_fits_is_not_refused(compose: Compose, overrides: list[str]):
    cfg = compose(*overrides)
    here.check_memory(cfg, check(cfg, device_count=0), free=LAPTOP)


def test_parts_of_a_users_own_are_not_refused_for_what_nobody_knows(compose: Compose):
    cfg = compose()
    layout = check(cfg, device_count=0)
    OmegaConf.set_struct(cfg, False)
    cfg.dispatcher = {"_target_": "my_package.Mine", "capacity_factor": "auto"}
    cfg.optimizer = {"_target_": "my_package.Adam8Bit", "lr": 0.1}
    needed = here.account_here(cfg, layout)
    assert needed.optimizer == 0 and needed.weights > 0


def test_more_ranks_share_the_experts_and_the_state(compose: Compose):
    def needed(*overrides: str) -> float:
        cfg = compose("model=olmoe_1b_7b", *overrides)
        return here.least(here.account_here(cfg, check(cfg, world_size=8, device_count=0)))

    assert needed() < needed("strategy.expert_parallel_size=1") / 3
    assert needed("strategy=fully_shard") < needed()
    assert needed("optimizer=sgd", "optimizer.momentum=0.0") < needed()


def test_a_run_is_counted_like_its_prediction(compose: Compose):
    from sidestream.predict.memory import memory
    from sidestream.predict.read import read

    asked = read(compose("cluster=cpu_2core", "model=tiny", config_name="predict"), name="cpu_2core")
    predicted = memory(asked.job, asked.cluster)
    cfg = compose()
    ours = here.account_here(cfg, check(cfg, device_count=0))
    assert OmegaConf.is_config(cfg)
    assert (ours.weights, ours.optimizer) == (predicted.weights, predicted.optimizer)


def test_the_smallest_of_memory_and_limits_counts(compose: Compose, monkeypatch: pytest.MonkeyPatch):
    layout = check(compose(), device_count=0)
    monkeypatch.setattr(here, "_available", lambda: 10 * GIB)
    monkeypatch.setattr(here, "_limits", lambda: [4 * GIB, None])
    assert here.free_bytes(layout) == 2 * GIB
    monkeypatch.setattr(here, "_limits", list)
    monkeypatch.setattr(here, "_available", lambda: None)
    assert here.free_bytes(layout) is None


def test_a_gpu_says_how_much_it_has(compose: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\necho 40960\n")
    tool.chmod(0o755)
    monkeypatch.setattr(here.shutil, "which", lambda _: str(tool))
    layout = check(compose("trainer.devices=2"), device_count=2)
    assert here.free_bytes(layout) == 40960 * 2**20
    monkeypatch.setattr(here.subprocess, "run", _fails)
    assert here.free_bytes(layout) is None


def _fails(*args, **kwargs):
    raise subprocess.CalledProcessError(9, "nvidia-smi")


@pytest.mark.parametrize(
    ("overrides", "world", "says"),
    [
        (["model.num_experts=7", "router.top_k=2"], 2, "expert parallelism is off"),
        (["model.num_experts=6"], 4, "expert parallelism has groups of 2"),
        (["scheduler.warmup_steps=50", "trainer.max_steps=20"], 2, "scheduler.warmup_steps=50 is not over"),
        (["model.num_experts=7", "strategy.expert_parallel_size=1"], 2, None),
        (["model=tiny_dense"], 2, None),
        (["dispatcher=local"], 2, None),
        (["trainer.max_steps=20"], 2, None),
        ([], 2, None),
    ],
)
def test_what_somebody_may_not_have_meant_is_said(
    compose: Compose, overrides: list[str], world: int, says: str | None
):
    cfg = compose(*overrides, "data.global_batch_size=8")
    found = remarks(cfg, check(cfg, world_size=world, device_count=0))
    assert len(found) == (says is not None)
    assert says is None or found[0].startswith(says)


def test_a_short_run_warms_up_for_a_tenth_of_it():
    from sidestream.lightning.schedules import WSD, Constant

    assert [Constant(max_steps=steps, warmup_steps="auto").warmup_steps for steps in (5, 20, 500, 9999)] == [
        0,
        2,
        50,
        50,
    ]
    schedule = WSD(max_steps=20, warmup_steps="auto", min_ratio=0.0, decay_fraction=0.4)
    assert max(map(schedule, range(20))) == 1.0
