"""`python scripts/compare.py` is `sidestream compare`: src/sidestream/commands/compare.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("compare")
