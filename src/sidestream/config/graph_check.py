"""What a step graph can record: nothing whose shapes or course depend on values the host would have to read. Pure.

`scripts/doctor.py` asks the same function, `obstacle`, as the check of a config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from sidestream.config.capabilities import CAPABILITIES, capabilities
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout

FACTOR = 1.5  # that the flagship command uses


@dataclass(frozen=True)
class Obstacle:
    """Why something cannot be captured.

    Attributes:
        key, value: What is in the way.
        why: In one clause.
        expected: What would do.
        fix: The override.
    """

    key: str
    value: Any
    why: str
    expected: str
    fix: str


def obstacle(dispatcher: DictConfig, fusion: DictConfig) -> Obstacle | None:
    """The first thing in the way of capturing a dispatcher with these experts; None: nothing is.

    A user's own class is taken to be capturable; the capture says where it is not.
    """
    target = dispatcher.get("_target_", "")
    can = capabilities(dispatcher)
    if target in CAPABILITIES and can.static and dispatcher.get("capacity_factor") is None:
        return Obstacle(
            "dispatcher.capacity_factor",
            None,
            "without a budget the host reads in every step how many rows there are, and a graph has fixed sizes",
            "a number: room for so many times the mean load",
            f"dispatcher.capacity_factor={FACTOR}",
        )
    if str(fusion.get("_target_", "")).endswith("LoopExperts"):
        return Obstacle(
            "fusion",
            "loop",
            "one product per expert needs the row counts on the host",
            "fusion=grouped, which takes them from the device",
            "fusion=grouped",
        )
    return None


def is_step(graph: DictConfig) -> bool:
    """Whether this is `graph=step`."""
    return str(graph.get("_target_", "")).endswith("graph.step.StepGraph")


def check_graph(cfg: DictConfig, layout: Layout) -> None:
    """Checks `graph=step`.

    Raises:
        ConfigError: naming the key to change.
    """
    if not is_step(cfg.graph):
        return
    found = (
        _backend(cfg, layout)
        or _strategy(cfg)
        or obstacle(cfg.dispatcher, cfg.fusion)
        or _balance(cfg, layout)
        or _on_a_gpu(cfg, layout)
        or _optimizer(cfg)
    )
    if found is not None:
        why = f"graph=step: {found.why}"
        raise ConfigError(found.key, found.value, why, expected=found.expected, fix=found.fix)


def _backend(cfg: DictConfig, layout: Layout) -> Obstacle | None:
    backend = cfg.graph.backend
    if backend == "auto" or (backend == "cuda") == (layout.device_type == "cuda"):
        return None
    where = "a GPU" if backend == "cuda" else "a CPU"
    why = f"this backend records on {where}, and the ranks are on {layout.device_type}"
    return Obstacle("graph.backend", backend, why, "auto", "graph.backend=auto")


def _strategy(cfg: DictConfig) -> Obstacle | None:
    if "fully_shard" not in str(cfg.strategy.get("_target_", "")):
        return None
    why = "it frees and allocates weights within a step"
    return Obstacle("strategy", "fully_shard", why, "strategy=replicate", "strategy=replicate")


def _balance(cfg: DictConfig, layout: Layout) -> Obstacle | None:
    if cfg.balance.get("scope") != "global" or layout.accumulation == 1:
        return None
    why = (
        "with several micro-batches it runs them forward twice from the same random numbers, and a graph draws "
        "fresh ones"
    )
    fix = "data.micro_batch_size=auto"
    return Obstacle("balance.scope", "global", why, "another scope, or one micro-batch per step", fix)


def _on_a_gpu(cfg: DictConfig, layout: Layout) -> Obstacle | None:
    if layout.device_type != "cuda":
        return None
    if "gbps" in cfg.link:
        why = "the emulated link sleeps on the host, which a graph on a GPU does not wait for"
        return Obstacle("link", "throttled", why, "link=native", "link=native")
    if cfg.trainer.precision == "32-true":
        why = "on a GPU torch's grouped product reads sizes on the host for other dtypes than bf16"
        fix = "trainer.precision=bf16-mixed"
        return Obstacle("trainer.precision", "32-true", why, "bf16-mixed or bf16-true", fix)
    return None


def _optimizer(cfg: DictConfig) -> Obstacle | None:
    if not cfg.graph.include_optimizer:
        return None
    key, value = "graph.include_optimizer", True
    if cfg.optimizer.get("_target_") != "torch.optim.AdamW":
        why = "of the shipped optimizers only AdamW takes its rate from memory"
        return Obstacle(key, value, why, "optimizer=adamw", "graph.include_optimizer=false")
    if not cfg.optimizer.get("fused"):
        why = "only the fused AdamW takes its rate and its step from memory"
        return Obstacle(key, value, why, "optimizer.fused=true", "optimizer.fused=true")
    return None
