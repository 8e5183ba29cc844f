"""Predictions of composed configs, for the tests."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from sidestream.launch import entry
from sidestream.predict.predict import Prediction, predict
from sidestream.predict.read import Asked, read

CONF = Path(__file__).resolve().parents[2] / "conf"


def composed(*overrides: str, command: str = "predict") -> DictConfig:
    """The root config of predict.py, or of train.py."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command, list(overrides))


def option(overrides: tuple[str, ...], group: str, default: str) -> str:
    """What overrides choose of a group."""
    return next((o.partition("=")[2] for o in overrides if o.startswith(f"{group}=")), default)


def asked(*overrides: str) -> Asked:
    """What is asked for, without whether it fits."""
    return read(composed(*overrides), name=option(overrides, "cluster", "gb300_nvl72"))


def predicted(*overrides: str) -> Prediction:
    """The whole prediction."""
    cluster, model = option(overrides, "cluster", "gb300_nvl72"), option(overrides, "model", "qwen3_30b_a3b")
    return predict(composed(*overrides), cluster=cluster, model=model)
