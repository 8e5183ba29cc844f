"""`python scripts/measure_overlap.py` is `sidestream measure`: src/sidestream/commands/measure_overlap.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("measure")  # fish completes files with the word @hydra.main
