"""What fits what in routing and balance. Pure."""

from math import gcd
from typing import Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError
from sidestream.config.model_check import moe_blocks

# Weights are shares of 1 once only the chosen experts are scored.
SHARES = ("sidestream.routing.router.SoftmaxRouter",)
QUANTILE = ("sidestream.routing.quantile.QuantileBalance",)
SHIPPED = "sidestream.routing."


def check_routing(cfg: DictConfig, *, num_tokens: int) -> None:
    """Checks router and balance against each other and the model.

    Of the keys of a user's own router only `top_k` is looked at, if it is there: another one may mean something else
    than the key of that name of a shipped router.

    Args:
        cfg: The root config; `router.top_k` is within its limits.
        num_tokens: Tokens of one rank's micro-batch.

    Raises:
        ConfigError: naming the key to change.
    """
    if not moe_blocks(cfg.model.num_layers, cfg.model.moe_layers, cfg.model.first_dense_layers):
        return
    if str(cfg.router.get("_target_", "")).startswith(SHIPPED):
        _check_score_order(cfg.router)
        _check_groups(cfg.router, cfg.model.num_experts)
        _check_capacity(cfg.router)
        _check_forced(cfg, num_tokens)
    if cfg.balance.get("_target_") in QUANTILE and cfg.router.get("top_k") is not None:
        _check_quantile(cfg, num_tokens)


def _check_score_order(router: DictConfig) -> None:
    if router.get("score_order") != "after_top_k" or router.get("_target_") not in SHARES:
        return
    if router.top_k == 1:
        raise ConfigError(
            "router.score_order",
            "after_top_k",
            "with router.top_k=1 every weight becomes 1 and the loss does not reach the router",
            expected="before_top_k, or router.top_k > 1",
            fix="router.score_order=before_top_k",
        )
    if router.normalize is False:
        raise ConfigError(
            "router.normalize",
            False,
            "with router.score_order=after_top_k the weights of a softmax sum to 1 in any case",
            expected="auto or true, or router.score_order=before_top_k",
            fix="router.normalize=auto",
        )


def _check_groups(router: DictConfig, experts: int) -> None:
    groups, top_groups, top_k = router.get("num_groups"), router.get("top_groups"), router.get("top_k")
    if groups is None and top_groups is None:
        return
    if groups is None or top_groups is None:
        missing = "router.num_groups" if groups is None else "router.top_groups"
        raise ConfigError(
            missing,
            None,
            "num_groups and top_groups belong together",
            expected="both, or null for both",
            fix=f"{missing}={2 if groups is None else 1}",
        )
    if experts % groups:
        raise ConfigError(
            "router.num_groups",
            groups,
            f"does not divide model.num_experts={experts}",
            expected=f"a divisor of {experts}",
            fix=f"router.num_groups={gcd(experts, groups)}",
        )
    size = experts // groups
    possible = [n for n in range(1, groups + 1) if top_k % n == 0 and top_k // n <= size]
    if top_groups not in possible:
        raise ConfigError(
            "router.top_groups",
            top_groups,
            f"router.top_k={top_k} experts cannot come in equal parts from {top_groups} of router.num_groups={groups} "
            f"groups of {size}",
            expected=f"a divisor of {top_k}, at most {groups}, with at most {size} experts from each group",
            fix=f"router.top_groups={possible[-1]}"
            if possible
            else "router.num_groups=1 router.top_groups=1",
        )


def _check_capacity(router: DictConfig) -> None:
    if router.get("expert_capacity_factor") is not None:
        return
    for key, idle in (("pad_to_capacity", False), ("drop_policy", "probs")):
        if router.get(key, idle) != idle:
            raise ConfigError(
                f"router.{key}",
                router[key],
                "experts have no capacity without router.expert_capacity_factor",
                expected="a capacity factor beside it",
                fix="router.expert_capacity_factor=1.25",
            )


def _check_forced(cfg: DictConfig, num_tokens: int) -> None:
    router = cfg.router
    if not router.get("force_balance"):
        return
    if router.num_groups is not None:
        raise ConfigError(
            "router.force_balance",
            True,
            f"the forced choice does not keep to router.num_groups={router.num_groups}",
            expected="no groups",
            fix="router.num_groups=null router.top_groups=null",
        )
    _check_even("router.force_balance", True, cfg, num_tokens, "router.force_balance=false")


def _check_quantile(cfg: DictConfig, num_tokens: int) -> None:
    router, experts = cfg.router, cfg.model.num_experts
    chosen = "quantile"
    if router.top_k >= experts:
        raise ConfigError(
            "balance",
            chosen,
            f"looks at the first expert that is not chosen, and router.top_k={router.top_k} chooses all {experts}",
            expected=f"router.top_k below {experts}",
            fix="balance=none",
        )
    if str(router.get("_target_", "")).startswith(SHIPPED) and router.get("num_groups") is not None:
        raise ConfigError(
            "balance",
            chosen,
            f"its quantiles do not know of router.num_groups={router.num_groups}",
            expected="no groups, or another balance",
            fix="balance=bias",
        )
    _check_even("balance", chosen, cfg, num_tokens, "balance=bias")


def _check_even(key: str, value: Any, cfg: DictConfig, num_tokens: int, fix: str) -> None:
    """All experts can get the same whole number of a micro-batch's routes."""
    top_k, experts = cfg.router.top_k, cfg.model.num_experts
    if num_tokens * top_k % experts:
        raise ConfigError(
            key,
            value,
            f"{num_tokens} tokens of a micro-batch x router.top_k={top_k} cannot be dealt out evenly to "
            f"model.num_experts={experts}",
            expected=f"micro-batch size x data.seq_length x router.top_k to be a multiple of {experts}",
            fix=fix,
        )
