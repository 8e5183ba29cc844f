"""Trains a model: `python train.py`, `python train.py --help`."""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import hydra
from omegaconf import DictConfig

from sidestream.launch import entry


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    entry.start(cfg)


if __name__ == "__main__":
    entry.run(main)
