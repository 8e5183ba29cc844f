"""`python scripts/plot_loss.py` is `sidestream plot-loss`: src/sidestream/commands/plot_loss.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("plot-loss")
