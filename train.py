"""`python train.py` is `sidestream train`: src/sidestream/commands/train.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("train")  # fish completes files with the word @hydra.main
