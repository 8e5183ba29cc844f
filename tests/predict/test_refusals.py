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
    "dense": (("model=tiny_dense",), "a dense model dispatches nothing"),
    "loop": (("model=olmoe_1b_7b", "fusion=loop"), "one product per expert"),
    "stages": (("model=tiny", "predict.pipeline_stages=8"), "8 x 1 stages, and the model has 4 layers"),
    "stages_of_virtual": (
        ("model=tiny", "predict.pipeline_stages=2", "predict.virtual_stages=4"),
        "2 x 4 stages, and the model has 4 layers",
    ),
    "stages_go_round": (
        ("model=olmoe_1b_7b", "predict.pipeline_stages=4", "predict.virtual_stages=2", "data.global_batch_size=4"),
        "1 micro-batches a step do not go round 4 stages",
    ),
    "stages_of_nothing": (("model=olmoe_1b_7b", "predict.pipeline_stages=0"), "predict.pipeline_stages=0"),
    "lone_micro_batch": (("model=olmoe_1b_7b", "predict.interleave=true"), "no other one"),
    "interleaved_mega": (
        ("model=olmoe_1b_7b", "predict.interleave=true", "fusion=mega", "strategy.expert_parallel_size=8"),
        "no transfers of its own",
    ),
    "skew_of_ranks": (("model=olmoe_1b_7b", "predict.skew=100"), "none can have more"),
    "skew_alone": (
        ("model=olmoe_1b_7b", "predict.skew=2", "strategy.expert_parallel_size=1", "dispatcher=local"),
        "of 1 ranks",
    ),
    "skew_of_budget": (
        ("model=olmoe_1b_7b", "predict.skew=3", "dispatcher.capacity_factor=1.5"),
        "has no room for it",
    ),
    "wire_of_nccl_ep": (("model=olmoe_1b_7b", "predict.dispatch_wire=fp8"), "NCCL EP moves values of 2 or 4 bytes"),
    "mxfp8_on_hopper": (("model=olmoe_1b_7b", "predict.math=mxfp8"), "no products of block-scaled"),
    "across_domains": (
        ("cluster.num_gpus=24", "model=olmoe_1b_7b", "model.num_experts=96", "strategy.expert_parallel_size=6"),
        "lie across two of them",
    ),
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
@pytest.mark.sample(8)
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
