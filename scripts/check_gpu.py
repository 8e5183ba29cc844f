"""`python scripts/check_gpu.py` is `sidestream check-gpu`: src/sidestream/commands/check_gpu.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("check-gpu")
