"""Draws the load of every expert over the steps of a run, from what the run recorded.

python scripts/plot_load.py logs/train/runs/<run>                   writes expert_load.png in it
python scripts/plot_load.py logs/train/runs/<run> --out load.png
"""

import sys
from pathlib import Path
from typing import NoReturn

from sidestream.commands import shared
from sidestream.launch import status
from sidestream.tracking import latest
from sidestream.tracking.expert_load import FILE, write_picture
from sidestream.tracking.untrusted import Unreadable


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("folder", type=Path, help="run folder, or latest")
    parser.add_argument("--out", type=Path, help="picture to write; default expert_load.png in the folder")
    arguments = parser.parse_args(argv)
    folder, out = latest.run(arguments.folder), arguments.out
    picture = None
    if (folder / FILE).exists():
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
        status.say("drawing")
        try:
            picture = write_picture(folder, out)
        except Unreadable as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if picture is None:
        print(
            f"error: folder={folder}: no expert load in it; expected a run with MoE layers", file=sys.stderr
        )
        return 2
    status.end()
    print(picture)
    return 0


def run() -> NoReturn:
    shared.run(main, shows_status=True)
