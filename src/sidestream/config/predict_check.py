"""What only predict.py takes, and presets that it knows and training cannot build. Pure."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from sidestream.config.dispatch_check import LIMITS
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.model_check import moe_blocks

# Keys of the group that say something when nothing is predicted, and what they are then.
_DEFAULTS: dict[str, Any] = {
    "math": "auto",
    "dispatch_wire": "auto",
    "skew": 1.0,
    "pipeline_stages": 1,
    "virtual_stages": 1,
    "shard_optimizer": False,
    "interleave": False,
    "plot": True,
}


def check_for_training(cfg: DictConfig) -> None:
    """Refuses, for train.py and the scripts that share its groups, what only predict.py can work with.

    Raises:
        ConfigError: naming the key to change.
    """
    if cfg.get("trainable") is False:  # the record of an older run has none of these keys
        model = cfg.model.get("trainable") is False
        raise ConfigError(
            "model.trainable" if model else "trainable",
            False,
            "this preset is known to predict.py only: it has parts that training does not build",
            expected="a preset that can be trained, or predict.py",
            fix="model=tiny" if model else "experiment=null",
        )
    if cfg.model.get("num_mtp_layers"):
        raise ConfigError(
            "model.num_mtp_layers",
            cfg.model.num_mtp_layers,
            "training has no multi-token prediction",
            expected="0, or predict.py",
            fix="model.num_mtp_layers=0",
        )
    if cfg.get("cluster"):
        raise ConfigError(
            "cluster.num_gpus",
            cfg.cluster.get("num_gpus"),
            "training runs where it is started, and only predict.py asks which machine that is",
            expected="no cluster, or predict.py",
            fix="cluster=none",
        )
    for name, default in _DEFAULTS.items():
        if (value := cfg.get("predict", _DEFAULTS)[name]) != default:
            key, why = f"predict.{name}", "nothing is predicted here"
            expected = "its default, or predict.py"
            raise ConfigError(key, value, why, expected=expected, fix=f"{key}={str(default).lower()}")


def check_prediction(cfg: DictConfig, layout: Layout) -> None:
    """Refuses what could be trained, or typed, and is not modelled.

    Raises:
        ConfigError: naming the key to change.
    """
    blocks = moe_blocks(cfg.model.num_layers, cfg.model.moe_layers, cfg.model.first_dense_layers)
    if not blocks:
        raise ConfigError(
            "model.moe_layers",
            list(cfg.model.moe_layers),
            "a dense model dispatches nothing, and what a prediction is about is not there",
            expected="a model with experts",
            fix="model.moe_layers=1",
        )
    if str(cfg.fusion.get("_target_", "")).endswith("LoopExperts"):
        raise ConfigError(
            "fusion",
            "loop",
            "one product per expert is as slow as the host that launches them, which is not modelled",
            expected="grouped or mega",
            fix="fusion=grouped",
        )
    _check_pipeline(cfg, layout)
    _check_skew(cfg, layout)
    name = str(cfg.dispatcher.get("_target_", "")).removeprefix("sidestream.dispatch.").partition(".")[0]
    library = layout.device_type == "cuda" and cfg.dispatcher.get("transport", "torch") != "torch"
    if library and name == "nccl_ep" and cfg.predict.dispatch_wire in ("fp8", "mxfp8"):
        raise ConfigError(
            "predict.dispatch_wire",
            cfg.predict.dispatch_wire,
            f"NCCL EP moves values of {' or '.join(map(str, LIMITS[name].value_bytes))} bytes",
            expected="auto, or another dispatcher",
            fix="predict.dispatch_wire=auto",
        )


def _check_pipeline(cfg: DictConfig, layout: Layout) -> None:
    stages, virtual = cfg.predict.pipeline_stages, cfg.predict.virtual_stages
    layers = cfg.model.num_layers + cfg.model.num_mtp_layers
    if stages * virtual > layers:
        key = "predict.virtual_stages" if stages <= layers else "predict.pipeline_stages"
        raise ConfigError(
            key,
            virtual if stages <= layers else stages,
            f"{stages} x {virtual} stages, and the model has {layers} layers",
            expected=f"at most {layers} stages in all",
            fix=f"{key}=1",
        )
    if virtual > 1 and layout.accumulation % stages:
        raise ConfigError(
            "predict.virtual_stages",
            virtual,
            f"{layout.accumulation} micro-batches a step do not go round {stages} stages evenly",
            expected=f"a multiple of {stages} micro-batches, or 1",
            fix="predict.virtual_stages=1",
        )


def _check_skew(cfg: DictConfig, layout: Layout) -> None:
    skew, ranks = cfg.predict.skew, layout.expert_parallel_size
    group = "dispatcher" if cfg.dispatcher.get("capacity_factor") is not None else "fusion"
    factor = cfg[group].get("capacity_factor")
    if skew > ranks:
        raise ConfigError(
            "predict.skew",
            skew,
            f"of {ranks} ranks none can have more than {ranks} times the mean",
            expected=f"1 to {ranks}",
            fix=f"predict.skew={ranks}",
        )
    if factor is not None and skew > factor:
        raise ConfigError(
            "predict.skew",
            skew,
            f"{group}.capacity_factor={factor} has no room for it: every step would be repeated, or lose rows",
            expected=f"at most {factor}",
            fix=f"{group}.capacity_factor={skew}",
        )
