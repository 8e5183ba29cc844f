"""What fits a schedule: the model's blocks, the router, the batch, the experts. Pure."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.model_check import moe_blocks

_OWN = "sidestream.overlap."
# Steps beside the routed path that a tap leaves, with the shared expert.
_STEPS = {"pos1": 2, "pos2": 3, "pos3": 4}


def check_overlap(cfg: DictConfig, layout: Layout) -> None:
    """Checks the schedule's keys. A user's own class has keys of its own, which are not looked at.

    Raises:
        ConfigError: naming the key to change.
    """
    overlap = cfg.overlap
    kind = str(overlap.get("_target_", "")).removeprefix(_OWN).partition(".")[0]
    blocks = moe_blocks(cfg.model.num_layers, cfg.model.moe_layers, cfg.model.first_dense_layers)
    if overlap.get("delay_wgrad") and str(overlap.get("_target_", "")).startswith(_OWN):
        _check_delay(cfg)
    if kind == "shared_expert":
        _check_shared(cfg)
    elif kind == "chunked":
        _check_chunks(cfg, layout)
    elif kind == "two_batch":
        _check_halves(cfg, layout)
    elif kind == "shortcut":
        _check_tap(cfg, blocks)
        _check_mix(cfg)
        if overlap.double_gating:
            _check_double_gating(cfg)


def _refuse(key: str, value: Any, why: str, *, expected: str, fix: str) -> ConfigError:
    return ConfigError(f"overlap.{key}" if key else "overlap", value, why, expected=expected, fix=fix)


def _check_delay(cfg: DictConfig) -> None:
    if "grouped" not in str(cfg.fusion.get("_target_", "")):
        raise _refuse(
            "delay_wgrad",
            True,
            "these experts cannot put off their weight gradients",
            expected="fusion=grouped",
            fix="fusion=grouped",
        )
    if "fully_shard" in str(cfg.strategy.get("_target_", "")):
        raise _refuse(
            "delay_wgrad",
            True,
            "strategy=fully_shard frees the experts' weights before the late gradient",
            expected="strategy=replicate",
            fix="overlap.delay_wgrad=false",
        )


def _check_shared(cfg: DictConfig) -> None:
    if not cfg.model.num_shared_experts:
        raise _refuse(
            "",
            "shared_expert",
            "model.num_shared_experts=0: there is nothing to compute meanwhile",
            expected="a model with a shared expert, or another schedule",
            fix="overlap=chunked",
        )


def _check_chunks(cfg: DictConfig, layout: Layout) -> None:
    tokens = layout.micro_batch_size * cfg.data.seq_length
    if cfg.overlap.num_chunks > tokens:
        raise _refuse(
            "num_chunks",
            cfg.overlap.num_chunks,
            f"a micro-batch has only {tokens} tokens",
            expected=f"2 to {tokens}",
            fix="overlap.num_chunks=2",
        )


def _check_halves(cfg: DictConfig, layout: Layout) -> None:
    if layout.micro_batch_size < 2:
        raise _refuse(
            "",
            "two_batch",
            "a micro-batch of one sequence has no two halves",
            expected="at least 2 sequences per rank and forward pass",
            fix="overlap=chunked",
        )
    if cfg.router.get("expert_capacity_factor") is not None:
        raise _refuse(
            "",
            "two_batch",
            "router.expert_capacity_factor is a share of the tokens routed together, here a half",
            expected="router.expert_capacity_factor=null",
            fix="overlap=chunked",
        )


def _check_tap(cfg: DictConfig, blocks: list[int]) -> None:
    overlap, steps = cfg.overlap, _STEPS.get(cfg.overlap.tap)
    without = [block for block in blocks if block == 0 or block - 1 in blocks]
    if overlap.tap in ("pos2", "pos3") and without:
        raise _refuse(
            "tap",
            overlap.tap,
            f"MoE block {without[0]} has no dense block in front of it to read in",
            expected="auto or pos1, or dense and MoE blocks in turn (model.moe_layers=2)",
            fix="overlap.tap=auto",
        )
    if steps is None:  # auto
        steps = _STEPS["pos1"] if len(without) == len(blocks) else _STEPS["pos2"]
    steps -= bool(overlap.double_gating)
    if overlap.slot != "auto" and overlap.slot > steps:
        raise _refuse(
            "slot",
            overlap.slot,
            f"there are {steps} steps beside the routed path",
            expected=f"auto or 0 to {steps}",
            fix="overlap.slot=auto",
        )


def _check_mix(cfg: DictConfig) -> None:
    if cfg.overlap.mix != "add" and not cfg.model.num_shared_experts:
        raise _refuse(
            "mix",
            cfg.overlap.mix,
            "there is no shared expert to weigh against the routed ones",
            expected="add, or a model with a shared expert",
            fix="overlap.mix=add",
        )


def _check_double_gating(cfg: DictConfig) -> None:
    def refuse(why: str, fix: str) -> ConfigError:
        return _refuse("double_gating", True, why, expected="a top-1 router and no shared expert", fix=fix)

    if cfg.model.num_shared_experts:
        # What says more about the shared expert goes with it, or the next refusal would ask for it back.
        idle = {"shared_expert_gate": "false", "shared_expert_hidden_size": "null"}
        also = "".join(f" model.{key}={value}" for key, value in idle.items() if cfg.model[key])
        raise refuse("DGMoE has no shared expert", f"model.num_shared_experts=0{also}")
    if cfg.router.get("top_k", 1) != 1:
        raise refuse("each of its two gates takes one expert", "router.top_k=1")
    if cfg.model.num_experts < 2:
        raise refuse("the second gate needs an expert that the first did not take", "model.num_experts=2")
    if cfg.router.get("score_order", "before_top_k") != "before_top_k":
        raise refuse(
            "a softmax over one chosen expert is 1 and teaches nothing", "router.score_order=before_top_k"
        )
    if cfg.router.get("force_balance"):
        raise refuse("router.force_balance deals the same expert to both gates", "router.force_balance=false")
    if cfg.router.get("pad_to_capacity"):
        raise refuse("router.pad_to_capacity fills experts up once per layer", "router.pad_to_capacity=false")
    why = "this balance expects one routing per layer"
    if cfg.balance.get("scope") == "global":
        raise refuse(why, "balance.scope=micro_batch")
    if "quantile" in str(cfg.balance.get("_target_", "")):
        raise refuse(why, "balance=bias")
