"""`fusion=mega`: what it takes the place of, what it is refused with, and that the printed fix helps."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError

Compose = Callable[..., DictConfig]
# Sizes that Mixture-of-Kittens takes.
MOK = (
    "fusion=mega",
    "fusion.library=mok",
    "strategy.expert_parallel_size=4",
    "trainer.devices=4",
    "trainer.precision=bf16-mixed",
    "model.num_experts=8",
    "model.hidden_size=256",
    "model.num_heads=4",
    "model.expert_hidden_size=256",
    "data.seq_length=256",
    "data.global_batch_size=16",
)

REFUSALS = [
    (["fusion=mega", "dispatcher=nccl_ep"], "dispatcher=nccl_ep: fusion=mega moves", "dispatcher=none"),
    (["dispatcher=none"], "dispatcher=none: without fusion=mega", "dispatcher=alltoall"),
    (["fusion=mega", "link=throttled"], "link=throttled: fusion=mega reads rows", "link=native"),
    (["fusion=mega", "overlap=chunked"], "overlap=chunked: fusion=mega has no", "overlap=none"),
    (
        ["fusion=mega", "overlap=shared_expert", "overlap.delay_wgrad=true"],
        "overlap.delay_wgrad=true: fusion=mega computes",
        "overlap.delay_wgrad=false",
    ),
    (
        ["fusion=mega", "fusion.library=triton"],
        "fusion.library=triton: it runs on GPUs",
        "fusion.library=auto",
    ),
    (["fusion=mega", "fusion.library=mok"], "fusion.library=mok: it runs on GPUs", "fusion.library=auto"),
    (
        [
            "fusion=mega",
            "fusion.capacity_factor=1.5",
            "router.expert_capacity_factor=1.0",
            "router.pad_to_capacity=true",
        ],
        "fusion.capacity_factor=1.5: router.pad_to_capacity=true",
        "fusion.capacity_factor=null",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "begins", "fix"), REFUSALS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_refusal_says_what_helps(compose: Compose, overrides: list[str], begins: str, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(compose(*overrides), device_count=0)
    line = str(refused.value)
    assert line.startswith(begins) and line.endswith(f"set {fix}") and "\n" not in line
    check(compose(*overrides, fix), device_count=0)


def test_ranks_of_several_hosts_do_not_share_memory(compose: Compose) -> None:
    cfg = compose("fusion=mega", "trainer.num_nodes=2", "trainer.devices=2", "model.num_experts=8")
    with pytest.raises(
        ConfigError, match=r"strategy.expert_parallel_size=auto: .*set strategy.expert_parallel_size=2"
    ):
        check(cfg, device_count=0, world_size=4, local_world_size=2)
    cfg.strategy.expert_parallel_size = 2
    check(cfg, device_count=0, world_size=4, local_world_size=2)


def test_it_brings_no_dispatcher_along_and_is_refused_with_none_of_the_others(compose: Compose) -> None:
    assert compose("fusion=mega").dispatcher._target_.endswith("NoDispatcher")
    assert compose("fusion=grouped").dispatcher._target_.endswith("AllToAllDispatcher")
    for overlap in ("none", "shared_expert", "shortcut", "two_batch"):
        check(compose("fusion=mega", f"overlap={overlap}", "graph=step"), device_count=0)


@pytest.mark.parametrize(
    ("overrides", "begins"),
    [
        ([], ""),
        (["overlap=shortcut"], "overlap=shortcut: fusion.library=mok computes the shared expert too"),
        (["fusion.capacity_factor=1.5"], "fusion.capacity_factor=1.5: fusion.library=mok makes room"),
        (["model.hidden_size=128"], "model.hidden_size=128: MoK's tiles"),
        (["model.num_shared_experts=0"], "model.num_shared_experts=0: MoK computes a shared expert"),
        (["data.global_batch_size=4"], "data.micro_batch_size=1: MoK gets 256 tokens"),
        (["trainer.precision=32-true"], "trainer.precision=32-true: MoK computes in bf16"),
        (["strategy.expert_parallel_size=2"], "strategy.expert_parallel_size=2: MoK has no kernels"),
    ],
)
def test_the_limits_of_mok(compose: Compose, overrides: list[str], begins: str) -> None:
    def refusal(*given: str) -> str:
        try:
            check(compose(*MOK, "trainer.accelerator=gpu", *given), device_count=4)
        except ConfigError as error:
            return str(error)
        return ""

    line = refusal(*overrides)
    assert line.startswith(begins) and bool(line) == bool(begins)
    if line:
        fix = line.rpartition("set ")[2]
        if fix == "fusion=grouped":
            return  # which has no library
        after = refusal(*overrides, fix)
        assert not after.startswith(begins), after
