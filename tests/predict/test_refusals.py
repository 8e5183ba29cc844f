"""Layouts that cannot be: refused in one line, and what the line advises helps."""

from __future__ import annotations

import re
import shlex

import pytest

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from tests.predict.asking import composed, predicted

SMALL = ("data.seq_length=1024", "predict.plot=false")
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "memory": (("model=qwen3_235b_a22b", "strategy.expert_parallel_size=8"), "a rank would need"),
    "memory_of_activations": (
        ("model=qwen3_30b_a3b", "strategy.expert_parallel_size=16", "data.micro_batch_size=8",
         "data.global_batch_size=128", "strategy=fully_shard", "cluster.num_gpus=16", "data.seq_length=1024"),
        "activations",
    ),
    "divides_ranks": (("strategy.expert_parallel_size=3",), "does not divide the world size 16"),
    "divides_experts": (
        ("cluster.num_gpus=24", "strategy.expert_parallel_size=24", "data.global_batch_size=24"),
        "does not divide model.num_experts=128",
    ),
    "library_ranks": (("cluster.num_gpus=128", "strategy.expert_parallel_size=128"), "128 ranks, and NCCL EP takes 64"),
    "library_tokens": (
        ("data.seq_length=16384", "strategy.expert_parallel_size=16"),
        "16384 tokens per rank, and NCCL EP takes 8192",
    ),
    "domain_of_mega": (
        ("fusion=mega", "strategy.expert_parallel_size=16"),
        "fusion=mega shares memory among 16 ranks, and a host has 8",
    ),
    "domain_of_cpus": (
        ("cluster=cpu_2core", "cluster.num_gpus=4", "model=tiny", "strategy.expert_parallel_size=4"),
        "joins 2 ranks",
    ),
    "pipeline": (("predict.pipeline_stages=3",), "does not divide cluster.num_gpus=16"),
    "virtual": (("predict.virtual_stages=2",), "without a pipeline"),
    "fp8_on_cpu": (("cluster=cpu_2core", "model=tiny", "predict.math=fp8"), "fp8 products is not known"),
    "fp32_on_b200": (("cluster=b200", "trainer.precision=32-true", "dispatcher=alltoall"), "fp32 products is not"),
    "devices": (("trainer.devices=4",), "the cluster sets the size"),
    "interleave": (("predict.interleave=true", "overlap=chunked"), "overlap=chunked is a schedule already"),
    "graph": (("model=olmoe_1b_7b", "graph=step"), "without a budget the host reads"),
    "skew": (("predict.skew=0.5",), "predict.skew=0.5"),
}  # fmt: skip


def on_h100(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return overrides if any(o.startswith("cluster=") for o in overrides) else ("cluster=h100", *overrides)


def refused(overrides: tuple[str, ...]) -> str:
    with pytest.raises(ConfigError) as caught:
        predicted(*overrides)
    return str(caught.value)


def advice(line: str) -> list[str]:
    """The overrides that a line tells to set."""
    assert "\n" not in line and "; expected " in line, line
    words = shlex.split(re.sub(r"^set ", "", line.rpartition("; ")[2]))
    return [word for word in words if "=" in word]


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_and_what_helps(name: str) -> None:
    overrides, why = on_h100(REFUSED[name][0]), REFUSED[name][1]
    line = refused(overrides)
    assert why in line
    for _ in range(4):  # one piece of advice may lead to the next
        fixes = advice(line)
        keys = {fix.partition("=")[0] for fix in fixes}
        overrides = (*(o for o in overrides if o.partition("=")[0] not in keys), *fixes)
        try:
            predicted(*overrides)
            return
        except ConfigError as error:
            line = str(error)
    raise AssertionError(line)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("experiment=recipe/deepseek_v3_gb300",), "trainable=false"),
        (("experiment=recipe/qwen3_30b_h100",), "trainable=false"),
        (("model=gpt_oss_120b",), "model.trainable=false"),
        (("model.num_mtp_layers=1",), "training has no multi-token prediction"),
        (("cluster=h100",), "only predict.py asks which machine"),
        (("predict.skew=2",), "nothing is predicted here"),
        (("predict.math=fp8",), "nothing is predicted here"),
    ],
)
def test_training_refuses_what_only_a_prediction_takes(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides, command="train"))
    line = str(caught.value)
    assert why in line and "\n" not in line and "predict.py" in line


def test_every_recipe_is_one_that_training_refuses_or_can_run() -> None:
    """A preset that says nothing of `trainable` composes into a config that passes the check."""
    check(composed("experiment=qwen3_30b_a3b", "model.num_layers=2", command="train"))
