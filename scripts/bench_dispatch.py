"""`python scripts/bench_dispatch.py` is `sidestream bench-dispatch`: src/sidestream/commands/bench_dispatch.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("bench-dispatch")
