"""`python eval.py` is `sidestream eval`: src/sidestream/commands/eval.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("eval")
