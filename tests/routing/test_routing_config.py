"""Combinations that cannot work are refused in one line, before any rank starts; old spellings name the new key."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.config.hydra_errors import USER_ERRORS, explain
from sidestream.launch import entry
from tests.train.fit import CONF


def line_of(*overrides: str) -> str:
    entry.register()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            check(compose("train", list(overrides)), device_count=0)
    except USER_ERRORS as error:
        return explain(error, list(overrides))
    return ""


@pytest.mark.parametrize(
    ("overrides", "start", "end"),
    [
        (
            ["router.score_order=after_top_k", "router.top_k=1"],
            "router.score_order=after_top_k: with router.top_k=1 every weight becomes 1",
            "set router.score_order=before_top_k",
        ),
        (
            ["router.score_order=after_top_k", "router.normalize=false"],
            "router.normalize=false: with router.score_order=after_top_k",
            "set router.normalize=auto",
        ),
        (
            ["router.num_groups=4"],
            "router.top_groups=null: num_groups and top_groups belong",
            "set router.top_groups=1",
        ),
        (
            ["router.top_groups=1"],
            "router.num_groups=null: num_groups and top_groups belong",
            "set router.num_groups=2",
        ),
        (
            ["router.num_groups=3", "router.top_groups=1"],
            "router.num_groups=3: does not divide model.num_experts=8",
            "set router.num_groups=1",
        ),
        (
            ["router.num_groups=2", "router.top_groups=3"],
            "router.top_groups=3: router.top_k=2 experts cannot come in equal parts from 3 of router.num_groups=2",
            "set router.top_groups=2",
        ),
        (
            ["router.num_groups=8", "router.top_groups=1"],
            "router.top_groups=1: router.top_k=2 experts cannot",
            "set router.top_groups=2",
        ),
        (
            ["router.top_k=3", "router.num_groups=4", "router.top_groups=2"],
            "router.top_groups=2: router.top_k=3",
            "set router.top_groups=3",
        ),
        (
            ["router.expert_capacity_factor=0"],
            "router.expert_capacity_factor=0",
            "set router.expert_capacity_factor=1",
        ),
        (["router.expert_capacity_factor=-1"], "router.expert_capacity_factor=-1", "=1"),
        (
            ["router.drop_policy=random"],
            "router.drop_policy=random: not a choice; expected one of probs, position",
            "set router.drop_policy=probs",
        ),
        (
            ["router.pad_to_capacity=true"],
            "router.pad_to_capacity=true: experts have no capacity",
            "set router.expert_capacity_factor=1.25",
        ),
        (["router.drop_policy=position"], "router.drop_policy=position: experts have no capacity", "=1.25"),
        (["router.jitter=1.5"], "router.jitter=1.5: out of range", "0.0"),
        (
            ["router.force_balance=true", "router.num_groups=4", "router.top_groups=2"],
            "router.force_balance=true: the forced choice does not keep to router.num_groups=4",
            "router.top_groups=null",
        ),
        (
            ["router.force_balance=true", "router.top_k=1", "data.seq_length=9", "data.micro_batch_size=1"],
            "router.force_balance=true: 9 tokens of a micro-batch x router.top_k=1 cannot be dealt out evenly",
            "set router.force_balance=false",
        ),
        (
            ["balance=quantile", "router.top_k=1", "data.seq_length=9", "data.micro_batch_size=1"],
            "balance=quantile: 9 tokens of a micro-batch x router.top_k=1",
            "set balance=bias",
        ),
        (
            ["balance=quantile", "router.top_k=8"],
            "balance=quantile: looks at the first expert that is not",
            "=none",
        ),
        (
            ["balance=quantile", "router.num_groups=4", "router.top_groups=2"],
            "balance=quantile: its quantiles do not know of router.num_groups=4",
            "set balance=bias",
        ),
        (
            ["balance=quantile", "+balance.coefficient=0.01"],
            "balance.coefficient=0.01: only another option of balance has",
            "balance=aux_loss",
        ),
        (["balance=quantile", "balance.ema=1.5"], "balance.ema=1.5: out of range", ""),
        (
            ["+router.capacity_factor=1.5"],
            "router.capacity_factor=1.5",
            "set router.expert_capacity_factor=1.5",
        ),
        (["+router.n_group=2"], "router.n_group=2", "set router.num_groups=2"),
        (["balance.scope=world"], "balance.scope=world: not a choice", "set balance.scope=sequence"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(overrides: list[str], start: str, end: str) -> None:
    line = line_of(*overrides)
    assert line.startswith(start), line
    assert line.endswith(end) and "; expected " in line and "\n" not in line, line


@pytest.mark.parametrize(
    "overrides",
    [
        ["router=sigmoid", "router.top_k=1", "router.score_order=after_top_k"],
        ["router=sigmoid", "router.num_groups=4", "router.top_groups=2", "balance=bias"],
        ["router.force_balance=true"],
        ["balance=quantile"],
        ["router.expert_capacity_factor=1.25", "router.drop_policy=position", "router.pad_to_capacity=true"],
        # A model without experts has no routing that could be wrong.
        ["model=tiny_dense", "router.pad_to_capacity=true"],
    ],
    ids=" ".join,
)
def test_accepted(overrides: list[str]) -> None:
    assert line_of(*overrides) == ""


class OwnRouter:
    """It takes any key."""

    def __init__(self, **keys: object) -> None: ...

    def __call__(self, *_: object) -> None: ...


def of_own(group: str, **keys: object) -> str:
    """The refusal of a config with somebody's own option, whose keys no schema of ours has seen."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        whole = OmegaConf.to_container(compose("train", ["trusted_targets=[tests]"]))
    target = {"router": f"{__name__}.OwnRouter"}.get(group, whole[group].get("_target_"))
    cfg = OmegaConf.create({**whole, group: {**whole[group], **keys, "_target_": target}})
    if group == "router":
        cfg.router = {"_target_": target, **keys}
    try:
        check(cfg, device_count=0)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", ["two", 1.5, 0, -1, [1], True], ids=str)
@pytest.mark.parametrize(
    ("group", "key"),
    [("router", "top_k"), ("strategy", "expert_parallel_size"), ("data", "micro_batch_size")],
)
def test_a_value_that_no_schema_has_seen_is_refused_in_one_line(group: str, key: str, value: object) -> None:
    line = of_own(group, **{key: value})
    assert line.startswith(f"{group}.{key}=") and f"; set {group}.{key}=" in line and "\n" not in line


@pytest.mark.parametrize(
    "keys",
    [
        {"num_groups": "a", "top_groups": "b"},
        {"num_groups": 0, "top_groups": 0},
        {"force_balance": "often"},
        {"drop_policy": "mine"},
        {"score_order": "after_top_k", "normalize": True},
    ],
    ids=str,
)
def test_keys_of_an_own_router_mean_what_its_class_says(keys: dict[str, object]) -> None:
    assert of_own("router", top_k=1, **keys) == ""


def test_an_own_router_needs_no_top_k() -> None:
    assert of_own("router") == ""
