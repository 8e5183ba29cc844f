"""`python scripts/check_cluster.py` is `sidestream check-cluster`: src/sidestream/commands/check_cluster.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("check-cluster")
