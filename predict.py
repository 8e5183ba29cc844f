"""Predicts what a training run would cost on a cluster: `python predict.py cluster=gb300_nvl72 model=qwen3_30b_a3b`."""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import hydra
from omegaconf import DictConfig

from sidestream.launch import entry
from sidestream.predict import command


@hydra.main(version_base="1.3", config_path="conf", config_name="predict")
def main(cfg: DictConfig) -> None:
    command.start(cfg)


if __name__ == "__main__":
    command.rewrite()
    entry.run(main, shows_status=False)
