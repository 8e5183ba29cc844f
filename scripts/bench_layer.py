"""`python scripts/bench_layer.py` is `sidestream bench-layer`: src/sidestream/commands/bench_layer.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("bench-layer")
