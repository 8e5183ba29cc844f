"""What measuring overlap needs: rows that travel, and parts that can be run alone. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError
from sidestream.config.model_check import moe_blocks

if TYPE_CHECKING:
    from sidestream.config.compatibility import Layout

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
    elif (every := cfg.callbacks.overlap_report.every_n_steps) is not None:
        _check_anything_travels(_CALLBACK, every, cfg, layout, instead=f"{_CALLBACK}=null")


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
    if measure.sleep_ms and measure.compute != "sleep":
        raise ConfigError(
            "measure.sleep_ms",
            "{" + ",".join(f"{part}:{ms:g}" for part, ms in measure.sleep_ms.items()) + "}",
            "nothing sleeps with measure.compute=real",
            expected="measure.compute=sleep",
            fix="measure.compute=sleep",
        )
