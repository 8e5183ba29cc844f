"""`python scripts/convert_hf.py` is `sidestream convert-hf`: src/sidestream/commands/convert_hf.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("convert-hf")
