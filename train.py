"""Trains a model: `python train.py`, `python train.py --help`."""

if __name__ == "__main__":
    import sidestream.interrupt  # noqa: F401  from here on Ctrl-C is answered

import hydra
from omegaconf import DictConfig

from sidestream.launch import entry


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    entry.start(cfg)


if __name__ == "__main__":
    entry.run(main)
