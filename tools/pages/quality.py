"""The study `experiment=scmoe_quality`: its record, its table, its claim, and the picture of loss against time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidestream.compare.errors import CompareError
from sidestream.compare.runs import read_run
from sidestream.report.charts import COLORS, new_figure, png, styled
from sidestream.report.statistics import Interval, paired
from sidestream.report.table import Column, Table, notes
from sidestream.tracking import names
from sidestream.tracking.folder import write_bytes_atomic

BASELINE = "scmoe_shared"
CLAIMED = ("scmoe_pos1", "scmoe_pos2")
MARGIN = 0.02  # nats; stated in docs/results/scmoe_quality.md before the runs
PLANNED = {arm: 12 if arm in (BASELINE, *CLAIMED) else 6 for arm in (
    BASELINE, "scmoe_pos1", "scmoe_pos2", "scmoe_pos3", "scmoe_top2", "scmoe_dgmoe", "scmoe_matched",
)}  # fmt: skip
_SHARED = ("device", "world_size", "precision", "data_checksum", "commit")


def collect(folders: Sequence[Path], *, commands: Sequence[str]) -> dict[str, Any]:
    """The figures of all finished runs of the study.

    Args:
        folders: Of its sweeps.
        commands: That made them.

    Raises:
        CompareError: Runs differ in code, data, device or precision, or an arm has a seed twice.
    """
    runs, shared = [], None
    for path in sorted(path for folder in folders for path in folder.glob("*/result.json")):
        try:
            run = read_run(path.parent)
        except CompareError:
            continue
        result, arm = run.result, run.choices.get("arm")
        last = next((record for record in reversed(run.metrics) if names.TRAIN_LOSS in record), None)
        if arm not in PLANNED or last is None:
            continue
        facts = {name: result.get(name) for name in _SHARED}
        shared = shared or facts
        if facts != shared:
            key = next(name for name in _SHARED if facts[name] != shared[name])
            why = f"{key}={facts[key]}: it is {shared[key]} in other runs; expected one study; see {path}"
            raise CompareError(why)
        runs.append(
            {
                "arm": arm,
                "seed": run.seed,
                **{name: run.part("metrics").get(name) for name in ("val_loss", "train_loss", "tokens")},
                "load_cv": last.get(names.LOAD_CV),
                **{name: result.get(name) for name in ("params_total", "params_active", "flops_per_token")},
            }
        )
    seen = [(run["arm"], run["seed"]) for run in runs]
    if len(set(seen)) != len(seen) or not runs:
        raise CompareError(f"runs={len(runs)}: expected at least one, and each seed of an arm once")
    runs.sort(key=lambda run: (list(PLANNED).index(run["arm"]), run["seed"]))
    machine = {name: run.env.get(name) for name in ("cpu", "cpu_count", "python")}
    versions = {"versions": run.result.get("versions")}
    return {
        "study": "scmoe_quality",
        "commands": list(commands),
        **(shared or {}),
        **machine,
        **versions,
        "runs": runs,
    }


def of_arm(record: dict[str, Any], arm: str, what: str = "val_loss") -> dict[int, float]:
    """Seed -> figure."""
    return {run["seed"]: run[what] for run in record["runs"] if run["arm"] == arm}


def difference(record: dict[str, Any], arm: str) -> Interval | None:
    """Validation loss minus that of the baseline, over common seeds; None for the baseline itself."""
    return None if arm == BASELINE else paired(of_arm(record, arm), of_arm(record, BASELINE))


def not_worse(found: Interval | None) -> bool | None:
    """The claim: the interval ends below the margin. None with fewer than two pairs."""
    return None if found is None or found.high is None else found.high < MARGIN


def markdown(record: dict[str, Any]) -> str:
    """The table, what it says of the claim, and how it was made."""
    columns = (
        Column("arm", code=True),
        "seeds",
        "parameters",
        "FLOPs per token",
        "validation loss (sd)",
        "minus baseline",
        "95 % interval",
    )
    table = Table(columns)
    for arm in PLANNED:
        losses = of_arm(record, arm)
        if not losses:
            continue
        (params, *_), (flops, *_) = (
            of_arm(record, arm, "params_total").values(),
            of_arm(record, arm, "flops_per_token").values(),
        )
        spread = f" ({statistics.stdev(losses.values()):.4f})" if len(losses) > 1 else ""
        found = difference(record, arm)
        mean = "baseline" if arm == BASELINE else f"{found.mean:+.4f}" if found else "-"
        limits = f"{found.low:+.4f} to {found.high:+.4f}" if found and found.low is not None else "-"
        table.add(
            arm,
            f"{len(losses)} of {PLANNED[arm]}",
            f"{params:,}",
            f"{flops / 1e6:.2f} M",
            f"{statistics.fmean(losses.values()):.4f}{spread}",
            mean,
            limits,
        )
    told = [_claim(record, arm) for arm in CLAIMED]
    facts = [
        *(f"Command: `{command}`" for command in record["commands"]),
        f"Machine: {record['cpu']}, one rank and one core a run, torch {record['versions']['torch']}, "
        f"{record['precision']}",
        f"Commit `{record['commit'][:12]}`; data {record['data_checksum'][:12]}",
        "Emulated: nothing. Losses do not depend on how busy the machine was",
    ]
    return "\n".join([table.markdown(), "", *told, "", notes(facts)])


def _claim(record: dict[str, Any], arm: str) -> str:
    found, planned = difference(record, arm), PLANNED[arm]
    if found is None or found.high is None:
        return f"`{arm}`: no pairs yet."
    done = (
        ""
        if found.n >= planned
        else f" So far {found.n} of {planned} planned pairs: this is not the result yet."
    )
    verdict = "not worse than" if not_worse(found) else "not shown to be no worse than"
    return (
        f"`{arm}` is {verdict} the shared-expert model at a margin of {MARGIN} nat: the interval ends at "
        f"{found.high:+.4f} ({found.n} pairs).{done}"
    )


@styled
def draw(record: dict[str, Any], matrix: dict[str, Any], path: Path) -> None:
    """Time saved against loss changed, a point per schedule.

    Args:
        record: Of the study.
        matrix: Of the overlap measurements (`overlap_matrix.json`): time saved with real compute at about 30 %
            communication. Schedules that compute the same function change no loss.
        path: PNG.
    """
    saved = {}
    for run in matrix["runs"]:
        if run["compute"] == "real" and run["asked_comm_share"] == 0.3:
            saved[run["schedule"]] = 100 * (1 - run["ms"]["overlapped"] / run["ms"]["serial"])
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    axes.axvline(0, color="0.8", linewidth=1)
    axes.axvline(MARGIN, color=COLORS[6], linewidth=1, linestyle=":")
    axes.text(MARGIN, 1, f" margin {MARGIN} nat", color=COLORS[6], fontsize=8, va="bottom")
    for schedule, percent in saved.items():
        if schedule != "shortcut":
            axes.plot(0, percent, "o", color=COLORS[0])
            axes.annotate(f"  {schedule}", (0, percent), va="center", fontsize=9)
    found = difference(record, "scmoe_pos2")
    if found is not None and "shortcut" in saved:
        half = None if found.high is None else [[found.mean - (found.low or 0.0)], [found.high - found.mean]]
        axes.errorbar(found.mean, saved["shortcut"], xerr=half, fmt="o", color=COLORS[2], capsize=3)
        axes.annotate("shortcut (pos2)", (found.mean, saved["shortcut"] + 0.8), ha="center", fontsize=9)
    axes.set_xlabel("validation loss minus that of the same model without the schedule, nats")
    axes.set_ylabel("time of an MoE unit saved, %")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.25)
    write_bytes_atomic(path, png(figure))
