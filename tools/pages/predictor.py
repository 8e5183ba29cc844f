"""The tables of docs/predictor.md, from `residuals.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sidestream.predict import residuals
from sidestream.predict.measured import CALIBRATED_AT
from sidestream.predict.residuals import Residual, largest_error, mean_error
from sidestream.report.table import Column, Markdown, Table

TITLES = {
    "flops": "FLOP per token, forward and backward",
    "bandwidth": "Bandwidth of dispatch and combine, as the libraries count it",
    "layer": "One MoE layer on 8 H100, forward or backward",
    "step": "Whole training steps",
    "cpu_layer": "One MoE layer on two CPU ranks, forward and backward",
    "cpu_fused": "Fused experts on two CPU ranks, forward and backward",
    "cpu_overlap": "What schedules hide on two CPU ranks and a throttled link",
}
SHORT = {
    "flops": "FLOP per token",
    "bandwidth": "bandwidths of DeepEP and HybridEP",
    "layer": "single layers on H100",
    "step": "training steps",
    "cpu_layer": "layers on this kind of CPU",
    "cpu_fused": "fused experts on this kind of CPU",
    "cpu_overlap": "E_hide on this kind of CPU (difference)",
}


def markdown() -> list[str]:
    """Lines: a summary, then every row."""
    written = json.loads(residuals.FILE.read_text(encoding="utf-8"))
    rows = [Residual(**row) for row in written["rows"]]
    tables = {name: [row for row in rows if row.table == name] for name in TITLES}
    summary = [
        (
            SHORT[name],
            str(len(of_table)),
            _percent(mean_error(of_table), name),
            _percent(largest_error(of_table), name),
        )
        for name, of_table in tables.items()
    ]
    lines = [
        Table(("against", "rows", "mean error", "largest"), summary).markdown(),
        "",
        _left_out(written["left_out"]),
        "",
        _without_gpt_oss(tables["step"]),
        "",
        _cpu(written, tables),
    ]
    for name, of_table in tables.items():
        lines += ["", "<details>", f"<summary>{TITLES[name]}: all rows</summary>", ""]
        lines += [Table(("row", "published", "predicted", "error"), map(_row, of_table)).markdown()]
        lines += ["", "</details>"]
    return lines


def _row(row: Residual) -> tuple[str, ...]:
    unit = f" {row.unit}" if row.unit else ""
    error = f"{row.error:+.2f}" if row.table == "cpu_overlap" else f"{row.error:+.1%}"
    return row.what, f"{row.published:.5g}{unit}", f"{row.predicted:.5g}{unit}", error


def _percent(value: float, name: str) -> str:
    if name == "cpu_overlap":
        return f"{value:.2f}"
    return f"{value:.2%}" if name == "flops" else f"{value:.1%}"


def _left_out(left_out: Sequence[dict[str, Any]]) -> str:
    words = [
        f"tried on the rows of {one['model']}: mean {one['mean']:.1%}, largest {one['largest']:.1%}"
        for one in left_out
    ]
    return f"Layers, leave one model out: constants fitted without it, {'; '.join(words)}."


def _without_gpt_oss(steps: Sequence[Residual]) -> str:
    known = [row for row in steps if not row.model.startswith("gpt_oss")]
    return (
        f"Training steps without GPT-OSS: {len(known)} rows, mean {mean_error(known):.1%}, "
        f"largest {largest_error(known):.1%}."
    )


def _cpu(written: dict[str, Any], tables: dict[str, list[Residual]]) -> str:
    unseen = [row for row in tables["cpu_layer"] if row.what.split(",")[0].split()[1] not in CALIBRATED_AT]
    beside = written["beside_products"]
    return (
        f"CPU layers of shapes not calibrated at: {len(unseen)} rows, mean {mean_error(unseen):.1%}. What layers "
        f"take beside their products, all rows: mean {sum(map(abs, beside)) / len(beside):.1%}."
    )


def recipes() -> str:
    """The table of recipes."""
    rows = [
        (
            one["name"],
            one["machine"],
            Markdown(f"`{one['dispatcher']}`: {one['why']}"),
            f"{one['published']:,.0f}",
            f"{one['predicted']:,.0f} ({one['predicted'] / one['published'] - 1:+.0%})",
            one["source"],
        )
        for one in json.loads(residuals.FILE.read_text(encoding="utf-8"))["recipes"]
    ]
    columns = (
        Column("recipe", code=True),
        "machine",
        "dispatcher, and why",
        "tokens/s per GPU, published",
        "predicted",
        "source",
    )
    return Table(columns, rows).markdown()
