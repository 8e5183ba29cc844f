"""Measures what a schedule hides, see docs/overlap.md.

    python scripts/measure_overlap.py overlap=shortcut link=throttled measure.comm_share=0.3

Groups and keys are those of train.py, and `measure` (conf/measure_overlap.yaml). Starts its ranks itself, or runs under
torchrun.
"""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import hydra
from omegaconf import DictConfig

from sidestream.launch import entry


@hydra.main(version_base="1.3", config_path="../conf", config_name="measure_overlap")
def main(cfg: DictConfig) -> None:
    entry.start(cfg)


if __name__ == "__main__":
    entry.run(main)
