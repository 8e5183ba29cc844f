"""`python scripts/doctor.py` is `sidestream doctor`: src/sidestream/commands/doctor.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("doctor")
