"""`python scripts/check_part.py` is `sidestream check-part`: src/sidestream/commands/check_part.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("check-part")
