"""`python -m sidestream <command>`, as torchrun starts it: `torchrun --nproc-per-node=2 -m sidestream train`."""

import sys

from sidestream import cli

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, whose files would be taken for modules
    cli.main()
