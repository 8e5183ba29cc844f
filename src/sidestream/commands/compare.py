"""Puts runs side by side: one table, losses, loads and timelines; refuses pairs that are not fair.

python scripts/compare.py logs/train/multiruns/<sweep>
python scripts/compare.py RUN RUN --studied link --baseline link=native
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from sidestream.commands import shared
from sidestream.compare import wandb_runs
from sidestream.compare.arms import compare
from sidestream.compare.errors import CompareError
from sidestream.compare.fairness import STUDIED
from sidestream.compare.outputs import write
from sidestream.compare.runs import read_folders
from sidestream.launch import status
from sidestream.tracking import latest


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    arguments.folders = [latest.sweep(folder) for folder in arguments.folders]
    status.say("reading the runs")
    try:
        runs, left_out = read_folders(arguments.folders)
        if arguments.wandb is not None:
            more, more_left_out = wandb_runs.read(arguments.wandb, arguments.group)
            runs, left_out = [*runs, *more], [*left_out, *more_left_out]
        comparison = compare(
            runs,
            studied=None if arguments.studied is None else _names(arguments.studied),
            differ=_names(arguments.differ),
            baseline=arguments.baseline,
            left_out=left_out,
        )
    except CompareError as error:
        print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return 2
    status.say("drawing")
    written = write(comparison, arguments.out or default_out(arguments.folders))
    status.end()
    print(comparison.title)
    for item in comparison.left_out:
        print(f"left out: {item.name}: {item.reason}")
    print(*written, sep="\n")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = shared.parser(__doc__)
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="folder", help="of a sweep or a run, or latest"
    )
    parser.add_argument(
        "--studied",
        metavar="KEY,...",
        help=f"groups or keys that may differ (default: what was swept, and {','.join(STUDIED)})",
    )
    parser.add_argument(
        "--differ",
        default="",
        metavar="KEY,...",
        help="groups, keys or facts that differ on purpose; they go into the title of every output",
    )
    parser.add_argument(
        "--baseline", metavar="'KEY=VALUE ...'", help="choices of the arm that others are compared with"
    )
    parser.add_argument("--out", type=Path, help="folder to write; default: the sweep folder, else ./compare")
    parser.add_argument(
        "--wandb",
        metavar="ENTITY/PROJECT",
        help="also runs from wandb, through its public API; untested without a server",
    )
    parser.add_argument("--group", help="the wandb group, with --wandb")
    arguments = parser.parse_args(argv)
    if not arguments.folders and arguments.wandb is None:
        parser.error("expected folders, or --wandb ENTITY/PROJECT --group GROUP")
    if (arguments.wandb is None) != (arguments.group is None):
        parser.error("--wandb and --group belong together; pass both")
    return arguments


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def default_out(folders: list[Path]) -> Path:
    """The folder itself where one sweep is compared."""
    return folders[0] if len(folders) == 1 else Path("compare")


def run() -> NoReturn:
    shared.run(main, shows_status=True)
