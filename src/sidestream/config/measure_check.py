"""What measuring overlap needs: rows that travel, and parts that can be run alone. Pure."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.model_check import moe_blocks

# Slots are searched and libraries warm up before.
WARM_STEPS = 10
_CALLBACK = "callbacks.overlap_report.every_n_steps"


def check_measure(cfg: DictConfig, layout: Layout) -> None:
    """Checks the keys of scripts/measure_overlap.py, or of the training callback.

    Raises:
        ConfigError: naming the key to change.
    """
    if "measure" in cfg:
        _check_anything_travels("measure.scope", cfg.measure.scope, cfg, layout, instead="trainer.devices=2")
        _check_layer(cfg)
        _check_wire(cfg)
    elif (every := cfg.callbacks.overlap_report.every_n_steps) not in (None, "auto"):
        _check_anything_travels(_CALLBACK, every, cfg, layout, instead=f"{_CALLBACK}=null")


def report_steps(cfg: DictConfig, layout: Layout) -> range:
    """Steps after which the training callback measures; checked already.

    `auto`: once, half way, if the schedule overlaps and what it hides can be measured, in a run long enough to be warm.
    """
    every, last = cfg.callbacks.overlap_report.every_n_steps, cfg.trainer.max_steps
    if every is None:
        return range(0)
    if every != "auto":
        return range(every, last + 1, every)
    overlaps = not str(cfg.overlap.get("_target_", "")).startswith("sidestream.overlap.none.")
    try:
        _check_anything_travels(_CALLBACK, every, cfg, layout, instead="")
    except ConfigError:
        return range(0)
    half = last // 2
    return range(half, half + 1) if overlaps and half >= WARM_STEPS else range(0)


def _check_anything_travels(key: str, value: Any, cfg: DictConfig, layout: Layout, *, instead: str) -> None:
    expected = "two or more expert-parallel ranks"
    if layout.expert_parallel_size == 1:
        raise ConfigError(
            key, value, "no rows travel between ranks: nothing to hide", expected=expected, fix=instead
        )
    if "fully_shard" in str(cfg.strategy.get("_target_", "")):
        raise ConfigError(
            key,
            value,
            "strategy=fully_shard gathers weights inside a unit, which is no part of a schedule",
            expected="strategy=replicate, under which schedules do the same",
            fix="strategy=replicate",
        )
    if cfg.dispatcher.get("transport") == "library":
        raise ConfigError(
            key,
            value,
            "transfers of a library cannot be made alone",
            expected="dispatcher.transport=torch",
            fix="dispatcher.transport=torch",
        )


def _check_layer(cfg: DictConfig) -> None:
    layers = len(moe_blocks(cfg.model.num_layers, cfg.model.moe_layers, cfg.model.first_dense_layers))
    if cfg.measure.layer >= layers:
        raise ConfigError(
            "measure.layer",
            cfg.measure.layer,
            f"the model has {layers} MoE layers, counted from 0",
            expected=f"a value from 0 to {layers - 1}",
            fix="measure.layer=0",
        )


def _check_wire(cfg: DictConfig) -> None:
    measure = cfg.measure
    if measure.comm_share is not None and "gbps" not in cfg.link:
        raise ConfigError(
            "measure.comm_share",
            measure.comm_share,
            "only an emulated link can be given a rate",
            expected="link=throttled",
            fix="link=throttled",
        )
    lengths = {part: ms for part, ms in measure.sleep_ms.items() if ms is not None}
    for part in lengths if measure.compute != "sleep" else ():
        raise ConfigError(
            f"measure.sleep_ms.{part}",
            lengths[part],
            "nothing sleeps with measure.compute=real",
            expected="measure.compute=sleep",
            fix="measure.compute=sleep",
        )
