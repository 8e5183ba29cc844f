"""A schedule's own keys: what is refused in which words, and that the printed fix helps."""

from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.config.hydra_errors import USER_ERRORS, explain

Compose = Callable[..., DictConfig]
CONF = Path(__file__).parents[2] / "conf"
SCHEDULES = sorted(path.stem for path in (CONF / "overlap").glob("*.yaml"))
# 4 blocks, dense and MoE in turn, 1 shared expert, 2 CPU ranks; what the refusals need instead.
LONE, UNSHARED = "model.moe_layers=1", "model.num_shared_experts=0"
GATES = ("overlap=shortcut", "overlap.double_gating=true", UNSHARED, "router.top_k=1")


def refusal(compose: Compose, *overrides: str) -> str:
    """The error's line, "" if there is none."""
    try:
        check(compose(*overrides), device_count=0)
    except USER_ERRORS as error:
        return explain(error, list(overrides)) if not isinstance(error, ConfigError) else str(error)
    return ""


REFUSALS = [
    (
        ["overlap=chunked", "fusion=loop", "overlap.delay_wgrad=true"],
        "overlap.delay_wgrad=true: these experts",
        "fusion=grouped",
    ),
    (
        ["overlap=shared_expert", "strategy=fully_shard", "overlap.delay_wgrad=true"],
        "overlap.delay_wgrad=true: strategy=fully_shard frees",
        "overlap.delay_wgrad=false",
    ),
    (
        ["overlap=shared_expert", UNSHARED],
        "overlap=shared_expert: model.num_shared_experts=0",
        "overlap=chunked",
    ),
    (
        ["overlap=chunked", "overlap.num_chunks=300", "data.seq_length=32"],
        "overlap.num_chunks=300: a micro-batch has only 128 tokens; expected 2 to 128",
        "overlap.num_chunks=2",
    ),
    (
        ["overlap=two_batch", "data.micro_batch_size=1"],
        "overlap=two_batch: a micro-batch of one sequence has no two halves",
        "overlap=chunked",
    ),
    (
        ["overlap=two_batch", "router.expert_capacity_factor=1.25"],
        "overlap=two_batch: router.expert_capacity_factor is a share",
        "overlap=chunked",
    ),
    (
        ["overlap=shortcut", "overlap.tap=pos2", LONE],
        "overlap.tap=pos2: MoE block 0 has no dense",
        "overlap.tap=auto",
    ),
    (
        ["overlap=shortcut", "overlap.tap=pos3", "model.moe_layers=[1,2]"],
        "overlap.tap=pos3: MoE block 2 has no dense block in front",
        "overlap.tap=auto",
    ),
    (
        ["overlap=shortcut", "overlap.slot=4"],
        "overlap.slot=4: there are 3 steps beside the routed path; expected auto or 0 to 3",
        "overlap.slot=auto",
    ),
    (
        ["overlap=shortcut", "overlap.tap=pos1", "overlap.slot=3"],
        "overlap.slot=3: there are 2 steps",
        "overlap.slot=auto",
    ),
    (
        ["overlap=shortcut", "overlap.tap=pos3", "overlap.slot=5"],
        "overlap.slot=5: there are 4 steps",
        "overlap.slot=auto",
    ),
    (["overlap=shortcut", LONE, "overlap.slot=3"], "overlap.slot=3: there are 2 steps", "overlap.slot=auto"),
    ([*GATES, "overlap.slot=3"], "overlap.slot=3: there are 2 steps", "overlap.slot=auto"),
    (
        ["overlap=shortcut", "overlap.mix=cg1", UNSHARED],
        "overlap.mix=cg1: there is no shared expert",
        "overlap.mix=add",
    ),
    ([*GATES[:2], "router.top_k=1"], "overlap.double_gating=true: DGMoE has no shared expert", UNSHARED),
    (  # taking the shared expert away alone was refused because of its gate, which asked for it back
        [*GATES[:2], "model.shared_expert_gate=true", "model.shared_expert_hidden_size=64"],
        "overlap.double_gating=true: DGMoE has no shared expert",
        f"{UNSHARED} model.shared_expert_gate=false model.shared_expert_hidden_size=null",
    ),
    ([*GATES[:3]], "overlap.double_gating=true: each of its two gates takes one", "router.top_k=1"),
    (
        [*GATES, "model.num_experts=1"],
        "overlap.double_gating=true: the second gate needs",
        "model.num_experts=2",
    ),
    (
        [*GATES, "router=sigmoid", "router.score_order=after_top_k"],
        "overlap.double_gating=true: a softmax over one chosen expert",
        "router.score_order=before_top_k",
    ),
    (
        [*GATES, "router.force_balance=true"],
        "overlap.double_gating=true: router.force_balance",
        "router.force_balance=false",
    ),
    (
        [*GATES, "router.expert_capacity_factor=1.0", "router.pad_to_capacity=true"],
        "overlap.double_gating=true: router.pad_to_capacity",
        "router.pad_to_capacity=false",
    ),
    (
        [*GATES, "balance.scope=global"],
        "overlap.double_gating=true: this balance expects one",
        "balance.scope=micro_batch",
    ),
    ([*GATES, "balance=quantile"], "overlap.double_gating=true: this balance expects one", "balance=bias"),
]


@pytest.mark.parametrize(
    ("overrides", "start", "fix"), [pytest.param(*row, id=" ".join(row[0])) for row in REFUSALS]
)
@pytest.mark.sample(4)
def test_a_refusal_says_what_to_set_and_following_it_ends_in_a_config_that_runs(
    compose: Compose, overrides: list[str], start: str, fix: str
) -> None:
    line = refusal(compose, *overrides)
    assert line.startswith(start), line
    assert line.endswith(f"; set {fix}"), line
    seen: list[str] = []
    while line:
        assert "; expected " in line and line not in seen and len(seen) < 4, [*seen, line]
        seen.append(line)
        overrides = with_fix(overrides, line.rpartition("; set ")[2])
        line = refusal(compose, *overrides)


def with_fix(overrides: list[str], fix: str) -> list[str]:
    """As a user would: the key typed before is replaced; keys of an option that is left go with it."""
    for part in fix.split():
        key = part.partition("=")[0]
        if "." not in key:
            overrides = [o for o in overrides if not o.startswith(f"{key}.")]
        overrides = [*(o for o in overrides if o.partition("=")[0] != key), part]
    return overrides


@pytest.mark.parametrize(
    "overrides",
    [
        ["overlap=chunked", "overlap.num_chunks=128", "data.seq_length=32"],
        ["overlap=chunked", "router.expert_capacity_factor=1.25", "router.pad_to_capacity=true"],
        ["overlap=two_batch", "data.micro_batch_size=2"],
        ["overlap=shortcut", "overlap.tap=pos3", "overlap.slot=4"],
        ["overlap=shortcut", LONE, "overlap.slot=2"],
        ["overlap=shortcut", "model.moe_layers=[0,2,3]"],
        ["overlap=shortcut", UNSHARED],
        ["overlap=shortcut", "overlap.delay_wgrad=true", "overlap.mix=cg2", "overlap.post_norm=true"],
        [*GATES, "overlap.slot=2", "balance=bias"],
    ],
    ids=" ".join,
)
def test_what_fits_is_taken(compose: Compose, overrides: list[str]) -> None:
    assert refusal(compose, *overrides) == ""


@pytest.mark.parametrize("option", SCHEDULES)
@pytest.mark.parametrize(
    "others",
    [
        ["dispatcher=nccl_ep", "dispatcher.capacity_factor=1.5", "strategy=fully_shard", "link=throttled"],
        ["overlap.enabled=false", "model.activation_checkpointing=true", "trainer.precision=bf16-mixed"],
    ],
    ids=" ".join,
)
@pytest.mark.sample(4)
def test_every_schedule_fits_the_other_choices(compose: Compose, option: str, others: list[str]) -> None:
    assert refusal(compose, f"overlap={option}", *others) == ""


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["overlap=chunked", "overlap.num_chunks=1"], "overlap.num_chunks=1: "),
        (["overlap=shortcut", "overlap.slot=-1"], "overlap.slot=-1: "),
        (["overlap=shortcut", "overlap.slot=first"], "overlap.slot=first: "),
        (["overlap=shortcut", "overlap.tap=pos4"], "expected one of auto, pos1, pos2, pos3"),
        (["overlap=shortcut", "overlap.mix=cg3"], "expected one of add, cg1, cg2"),
        (["overlap=none", "overlap.delay_wgrad=true"], "overlap.delay_wgrad"),
        (["overlap=two_batch", "overlap.num_chunks=2"], "overlap.num_chunks"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_wrong_values_and_keys_of_another_schedule_are_refused(
    compose: Compose, overrides: list[str], part: str
) -> None:
    line = refusal(compose, *overrides)
    assert part in line and "\n" not in line, line


def test_a_users_own_schedule_is_not_looked_at(compose: Compose) -> None:
    own = "++overlap._target_=sidestream_not_ours.Mine"
    line = refusal(compose, "overlap=shared_expert", UNSHARED, own, "trusted_targets=[sidestream_not_ours]")
    assert "num_shared_experts" not in line
