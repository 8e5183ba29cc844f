"""`python scripts/bench_graph.py` is `sidestream bench-graph`: src/sidestream/commands/bench_graph.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("bench-graph")
