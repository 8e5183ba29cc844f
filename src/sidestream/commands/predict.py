"""Predicts what a training run would cost on a cluster."""

from typing import NoReturn

import hydra
from omegaconf import DictConfig

from sidestream.config.place import CONF
from sidestream.launch import entry
from sidestream.predict import command


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="predict")
def main(cfg: DictConfig) -> None:
    command.start(cfg)


def run() -> NoReturn:
    command.rewrite()
    entry.run(main, shows_status=False)
