"""Trains a model, or with `-m` a sweep of models."""

from typing import NoReturn

import hydra
from omegaconf import DictConfig

from sidestream.config.place import CONF
from sidestream.launch import entry


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> None:
    entry.start(cfg)


def run() -> NoReturn:
    entry.run(main)
