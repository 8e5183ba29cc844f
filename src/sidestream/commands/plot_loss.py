"""Draws the loss of one or more runs over tokens, beside the count models of the same data.

python scripts/plot_loss.py logs/train/<run> [more run folders] --out docs/loss.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sidestream.commands import shared
from sidestream.launch import status
from sidestream.report.charts import NEUTRAL, look, new_figure, styled
from sidestream.tracking import latest, names
from sidestream.tracking.folder import RunFolder, is_count, is_figure
from sidestream.tracking.result import misfit
from sidestream.tracking.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE_STYLES = {"bigram": (0, (6, 3)), "trigram": (0, (2, 2))}


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="folder", help="run folder, or latest")
    parser.add_argument("--out", type=Path, required=True, help="picture to write, e.g. docs/loss.png")
    arguments = parser.parse_args(argv)
    try:
        arguments.folders = [latest.run(folder) for folder in arguments.folders]
        runs = [read_run(folder) for folder in arguments.folders]
        check_same_data(arguments.folders, [result for _, result in runs])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    status.say("drawing")
    figure = draw(
        [records for records, _ in runs], [result for _, result in runs], labels(arguments.folders, runs)
    )
    shared.check_place(arguments.out)
    figure.savefig(arguments.out, dpi=150)
    status.end()
    print(arguments.out)
    return 0


def read_run(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns (records of metrics.jsonl, result.json).

    Raises:
        ValueError: the folder holds no run.
    """
    if not (folder / "metrics.jsonl").exists():
        raise ValueError(f"folder={printable(folder)}: no metrics.jsonl in it; expected the folder of a run")
    run = RunFolder(folder)
    result = run.read_result() or {}
    if wrong := misfit(result):
        raise ValueError(f"folder={printable(folder)}: result.json: {wrong}")
    return run.read_metrics(), result


def check_same_data(folders: list[Path], results: list[dict[str, Any]]) -> None:
    """Losses of different texts cannot be compared.

    Raises:
        ValueError: two runs have different `data_checksum`.
    """
    for folder, result in zip(folders, results):
        first, other = results[0].get("data_checksum"), result.get("data_checksum")
        if first != other:
            raise ValueError(
                f"folder={printable(folder)}: trained on other data ({printable(other)}) than "
                f"{printable(folders[0])} ({printable(first)})"
            )


def labels(folders: list[Path], runs: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    """Names each run by the choices in which the runs differ, or by its folder where that is not enough."""
    choices = [result.get("choices") or {} for _, result in runs]
    groups = sorted({group for choice in choices for group in choice})
    differing = [group for group in groups if len({choice.get(group) for choice in choices}) > 1]
    texts = [" ".join(f"{group}={choice.get(group)}" for group in differing) for choice in choices]
    if len(set(texts)) == len(texts) and all(texts):
        return [printable(text) for text in texts]
    return [printable(folder.resolve().name) for folder in folders]


@styled
def draw(runs: list[list[dict[str, Any]]], results: list[dict[str, Any]], run_labels: list[str]) -> Figure:
    """Draws train and validation loss of each run in one colour, and the baselines of the first."""
    from matplotlib.ticker import EngFormatter

    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    for index, (records, label) in enumerate(zip(runs, run_labels)):
        drawn = look(index)
        color = drawn["color"]
        prefix = f"{label}, " if len(runs) > 1 else ""
        tokens, loss = series(records, names.TRAIN_LOSS)
        axes.plot(tokens, loss, color=color, alpha=0.45, linewidth=1.2, label=f"{prefix}train")
        tokens, loss = series(records, names.VAL_LOSS)
        last = f" ({loss[-1]:.3f})" if loss else ""
        axes.plot(
            tokens,
            loss,
            color=color,
            linewidth=2,
            linestyle=drawn["linestyle"],
            marker=drawn["marker"],
            markersize=4,
            label=f"{prefix}validation{last}",
        )
    baselines = (results[0].get("metrics") or {}).get("baselines") or {}
    for name, value in baselines.items():
        if value is not None:
            style = BASELINE_STYLES.get(name, "--")
            axes.axhline(
                value, color=NEUTRAL, linestyle=style, linewidth=1.2, label=f"{name} counts ({value:.3f})"
            )
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss [nats/byte]")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlim(left=0)
    axes.grid(True)
    axes.legend()
    return figure


def series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Returns (tokens, values) of the records that have a value of this name."""
    points = [
        (r[names.TOKENS], r[name])
        for r in records
        if is_count(r.get(names.TOKENS)) and is_figure(r.get(name))
    ]
    return [tokens for tokens, _ in points], [value for _, value in points]


def run() -> NoReturn:
    shared.run(main, shows_status=True)
