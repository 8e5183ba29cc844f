"""Measures what a schedule hides, see docs/overlap.md.

Groups and keys are those of training, and `measure` (conf/measure_overlap.yaml). Starts its ranks itself, or runs under
torchrun.
"""

from typing import NoReturn

import hydra
from omegaconf import DictConfig

from sidestream.config.place import CONF
from sidestream.launch import entry


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="measure_overlap")
def main(cfg: DictConfig) -> None:
    entry.start(cfg)


def run() -> NoReturn:
    entry.run(main)
