"""`python scripts/overlap_cost.py` is `sidestream overlap-cost`: src/sidestream/commands/overlap_cost.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("overlap-cost")
