"""`python scripts/plot_load.py` is `sidestream plot-load`: src/sidestream/commands/plot_load.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("plot-load")
