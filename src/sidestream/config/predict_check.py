"""What only predict.py takes, and presets that it knows and training cannot build. Pure."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError

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
    if not cfg.trainable:
        model = not cfg.model.trainable
        raise ConfigError(
            "model.trainable" if model else "trainable",
            False,
            "this preset is known to predict.py only: it has parts that training does not build",
            expected="a preset that can be trained, or predict.py",
            fix="model=tiny" if model else "experiment=null",
        )
    if cfg.model.num_mtp_layers:
        raise ConfigError(
            "model.num_mtp_layers",
            cfg.model.num_mtp_layers,
            "training has no multi-token prediction",
            expected="0, or predict.py",
            fix="model.num_mtp_layers=0",
        )
    if cfg.cluster:
        raise ConfigError(
            "cluster.num_gpus",
            cfg.cluster.get("num_gpus"),
            "training runs where it is started, and only predict.py asks which machine that is",
            expected="no cluster, or predict.py",
            fix="cluster=none",
        )
    for name, default in _DEFAULTS.items():
        if (value := cfg.predict[name]) != default:
            key, why = f"predict.{name}", "nothing is predicted here"
            expected = "its default, or predict.py"
            raise ConfigError(key, value, why, expected=expected, fix=f"{key}={str(default).lower()}")
