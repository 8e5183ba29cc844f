"""`python scripts/two_hosts.py` is `sidestream two-hosts`: src/sidestream/commands/two_hosts.py."""

from sidestream import cli

if __name__ == "__main__":
    cli.script("two-hosts")
