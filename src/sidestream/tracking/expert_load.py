"""expert_load.jsonl and expert_load.png: routes per expert and layer over the steps of a run.

A record is `{"step": last step, "steps": how many, "counts": [layer][expert] routes summed over these steps}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sidestream.tracking.folder import RunFolder, is_count, write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "expert_load.jsonl"
PICTURE = "expert_load.png"
HIGHEST = 4.0  # end of the colour scale, always the same: pictures of two runs can be compared
MOST = 4000  # records in a picture; a run that was resumed with more steps may have some times COLUMNS
COLUMNS = 400  # at most in a run: more could not be told apart in the picture


def window(*, every: int, max_steps: int) -> int:
    """Steps in one record: a multiple of `every`, so that a run has at most `COLUMNS` records."""
    return every * max(1, -(-max_steps // (every * COLUMNS)))


def draw(records: list[dict[str, Any]]) -> Figure:
    """Draws a heat map per layer, experts x steps; the colour is the load over the mean of the layer.

    All layers, and all runs, share one scale with white at 1.0. Steps without a record stay grey.

    Args:
        records: of expert_load.jsonl, at least one, with at least one layer.
    """
    from matplotlib import colormaps
    from matplotlib.colors import TwoSlopeNorm

    from sidestream.report.charts import new_figure

    counts = np.array(
        [record["counts"] for record in records], dtype=np.float64
    )  # [records, layers, experts]
    _, layers, experts = counts.shape
    load = counts / np.maximum(counts.mean(axis=2, keepdims=True), np.finfo(np.float64).tiny)
    steps, load = _with_gaps(records, load)

    figure = new_figure(9.0, min(1.2 + 0.13 * layers * (min(experts, 16) + 1), 12.0), dpi=110)
    axes = figure.subplots()
    # One image for all layers: an axes for each takes seconds in a model with many. A strip parts one from the next.
    strip = np.full((len(load), layers, 1), np.nan)
    rows = np.concatenate([load, strip], axis=2).reshape(len(load), -1)[:, :-1]
    heights = np.tile([1.0] * experts + [max(0.7, 0.06 * experts)], layers)[:-1]
    edges = np.concatenate([[0.0], np.cumsum(heights)])
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=HIGHEST)
    colors = colormaps["RdBu_r"].with_extremes(bad="0.8")
    image = axes.pcolorfast(steps, edges, np.ma.masked_invalid(rows.T), norm=norm, cmap=colors)
    axes.invert_yaxis()
    axes.set_xlabel("step")
    axes.set_ylabel(f"MoE layer, experts 0-{experts - 1} downwards", fontsize=9)
    centres = (edges[:-1] + edges[1:]) / 2
    shown = range(0, layers, max(1, layers // 16))
    axes.set_yticks(
        [centres[layer * (experts + 1) + experts // 2] for layer in shown], [str(n) for n in shown]
    )
    bar = figure.colorbar(image, ax=axes, aspect=30, pad=0.02, extend="max")
    bar.set_label("routes / mean of the layer (1 = even)")
    bar.set_ticks([0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 3.0, HIGHEST])
    return figure


def whole(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records that can be drawn together: counts of as many layers and experts as the first, steps in order.

    Anybody may have written them; what is no such record is left out.
    """
    kept: list[dict[str, Any]] = []
    for record in records:
        counts: Any = record.get("counts")
        step: Any = record.get("step")
        steps: Any = record.get("steps")
        if not (is_count(step) and is_count(steps) and 0 < steps <= step and _shape(counts)):
            continue
        if not kept or (_shape(counts) == _shape(kept[0]["counts"]) and step - steps >= kept[-1]["step"]):
            kept.append({"step": step, "steps": steps, "counts": counts})
    return kept[-MOST:]


def _shape(counts: Any) -> tuple[int, int] | None:
    """Layers and experts, None for what is no table of counts."""
    if not isinstance(counts, list) or not counts or not all(isinstance(row, list) for row in counts):
        return None
    if len({len(row) for row in counts}) != 1 or not counts[0]:
        return None
    return (len(counts), len(counts[0])) if all(is_count(n) for row in counts for n in row) else None


def _with_gaps(records: list[dict[str, Any]], load: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges of the columns in steps, and the loads with a column of NaN for steps that no record covers."""
    edges: list[int] = [records[0]["step"] - records[0]["steps"]]
    columns = []
    for record, values in zip(records, load):
        first = record["step"] - record["steps"]
        if first > edges[-1]:
            columns.append(np.full_like(values, np.nan))
            edges.append(first)
        columns.append(values)
        edges.append(record["step"])
    return np.array(edges, dtype=np.float64), np.stack(columns)


def write_picture(folder: Path, out: Path | None = None) -> Path | None:
    """Draws expert_load.png, or `out`, from expert_load.jsonl; returns its path, None where nothing was recorded.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    records = whole(RunFolder(folder).read_expert_load())
    if not records:
        return None
    from sidestream.report.charts import png

    out = out or folder / PICTURE
    write_bytes_atomic(out, png(draw(records)))
    return out
