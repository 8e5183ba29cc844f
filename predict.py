"""`python predict.py` is `sidestream predict`: src/sidestream/commands/predict.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("predict")  # fish completes files with the word @hydra.main
