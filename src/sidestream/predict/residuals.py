"""The model against published figures: what `docs/predictor.md` tabulates and every prediction quotes from.

The published tables are data of the tests (tests/predict/published); `tools/predict_residuals.py` writes what comes
out into `residuals.json` beside this module, and a test compares the two.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sidestream.predict.cluster import Cluster
from sidestream.predict.layer import Layer, Mover, layer_seconds, wire_seconds
from sidestream.predict.traffic import Routes, legs, row_bytes

FILE = Path(__file__).with_name("residuals.json")
CLUSTERS = {"H100": "h100", "H800": "h800", "B200": "b200", "GB200": "gb200_nvl72"}
LIBRARIES = {"DeepEP V1": "deep_ep", "DeepEP V2": "deep_ep", "HybridEP": "hybrid_ep"}
# What a layer's time depends on, of a cluster. Fitted only for the leave-one-model-out figures.
CONSTANTS = (
    "gemm_efficiency",
    "gemm_efficiency_8bit",
    "memory_efficiency",
    "fast_link_efficiency",
    "layer_overhead",
)


@dataclass(frozen=True)
class Residual:
    """A published figure and the model's.

    Attributes:
        table: flops, bandwidth, layer or step.
        what: The row in words.
        cluster, dispatcher, model: Options; empty where a row has none.
        ranks: Expert-parallel ranks.
        math: Of products, or what the wire carries.
        unit: Of both figures.
        error: predicted / published - 1, of the time for a layer, else of the figure itself.
        source: Where it was published.
    """

    table: str
    what: str
    cluster: str
    dispatcher: str
    model: str
    ranks: int
    math: str
    unit: str
    published: float
    predicted: float
    error: float
    source: str


def residual(published: float, predicted: float, **facts: Any) -> Residual:
    return Residual(
        **facts, published=published, predicted=round(predicted, 4), error=round(predicted / published - 1, 4)
    )


def bandwidth(row: dict[str, Any], cluster: Cluster) -> Residual:
    """Bytes per second as the library counts them, from kernel times: without the latency of a call."""
    found = legs(
        "per_node",
        Routes(row["num_experts"], row["top_k"], row["num_groups"], row["top_groups"]),
        tokens=row["tokens"],
        ranks=row["ranks"],
        per_domain=min(row["ranks"], row["ranks_per_domain"]),
        row=row_bytes(row["hidden"], row["wire"]),
    )
    seconds = wire_seconds(found, replace(cluster, exchange_latency=0.0), peers=row["ranks"])
    logical = found.logical_fast if row["link"] == "fast" else found.logical_slow
    return residual(
        row["gb_per_second"],
        logical / seconds / 1e9,
        table="bandwidth",
        what=f"{row['library']}, {row['device']}, {row['operation']}, EP {row['ranks']}",
        cluster=CLUSTERS[row["device"]],
        dispatcher=LIBRARIES[row["library"]],
        model="",
        ranks=row["ranks"],
        math=row["wire"],
        unit="GB/s",
        source=row["source"],
    )


def layer_of(row: dict[str, Any]) -> Layer:
    """The layer of a row of the layers' table."""
    library = row["dispatcher"] != "alltoall"
    mover = Mover(packing="per_node" if library else "per_route", packs_in_kernel=library, reads_counts=True)
    return Layer(
        tokens=row["tokens"],
        hidden=row["hidden"],
        width=row["width"],
        routes=Routes(row["num_experts"], row["top_k"], row["num_groups"], row["top_groups"]),
        ranks=row["ranks"],
        per_domain=row["ranks"],
        mover=mover,
        math=row["math"],
        gated=row["gated"],
    )


def layer_milliseconds(row: dict[str, Any], cluster: Cluster) -> float:
    """What the model says of a row."""
    forward, backward = layer_seconds(layer_of(row), cluster)
    return 1e3 * (forward if row["pass"] == "forward" else backward).total


def layer(row: dict[str, Any], cluster: Cluster) -> Residual:
    """Compares one pass of one MoE layer with a published row."""
    return residual(
        row["milliseconds"],
        layer_milliseconds(row, cluster),
        table="layer",
        what=f"{row['model']}-shaped layer, {row['dispatcher']}, {row['math']}, {row['pass']}",
        cluster=CLUSTERS[row["device"]],
        dispatcher=row["dispatcher"],
        model=row["model"],
        ranks=row["ranks"],
        math=row["math"],
        unit="ms",
        source=row["source"],
    )


def mean_error(rows: Sequence[Residual]) -> float:
    """Mean of the absolute errors."""
    return sum(abs(row.error) for row in rows) / len(rows)


def largest_error(rows: Sequence[Residual]) -> float:
    """The largest of the absolute errors."""
    return max(abs(row.error) for row in rows)


@dataclass(frozen=True)
class LeftOut:
    """Constants fitted to the rows of all other models and tried on one.

    Attributes:
        model: Whose rows were not used.
        mean, largest: Of the absolute errors on them.
        fitted: Mean on the rows that were used.
    """

    model: str
    mean: float
    largest: float
    fitted: float


def leave_one_model_out(rows: Sequence[dict[str, Any]], start: Cluster) -> list[LeftOut]:
    """The honest figure: how the layer model does on a model whose rows its constants never saw."""
    found = []
    for model in sorted({row["model"] for row in rows}):
        used = [row for row in rows if row["model"] != model]
        left = [row for row in rows if row["model"] == model]
        fitted = fit(used, start)
        errors = [abs(layer_milliseconds(row, fitted) / row["milliseconds"] - 1) for row in left]
        known = [abs(layer_milliseconds(row, fitted) / row["milliseconds"] - 1) for row in used]
        found.append(LeftOut(model, sum(errors) / len(errors), max(errors), sum(known) / len(known)))
    return found


def fit(rows: Sequence[dict[str, Any]], start: Cluster, *, steps: int = 30) -> Cluster:
    """`start` with the `CONSTANTS` that make the squared relative errors of `rows` smallest.

    Gauss-Newton in the logarithms, held near the start by a small penalty, since one model does not determine all.
    """
    values = np.log([getattr(start, name) for name in CONSTANTS])
    first, penalty = values.copy(), 1e-3

    def errors(at: np.ndarray) -> np.ndarray:
        cluster = _with(start, at)
        return np.array([math.log(layer_milliseconds(row, cluster) / row["milliseconds"]) for row in rows])

    for _ in range(steps):
        now = errors(values)
        slopes = np.stack(
            [(errors(values + 1e-5 * unit) - now) / 1e-5 for unit in np.eye(len(values))], axis=1
        )
        left = slopes.T @ slopes + penalty * np.eye(len(values))
        values = values - np.linalg.solve(left, slopes.T @ now + penalty * (values - first))
    return _with(start, values)


def _with(cluster: Cluster, logarithms: np.ndarray) -> Cluster:
    constants: dict[str, Any] = dict(zip(CONSTANTS, np.exp(logarithms).tolist()))
    return replace(cluster, **constants)


def load() -> list[Residual]:
    """All rows, as they were written last."""
    return [Residual(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))["rows"]]


def nearest(
    rows: Sequence[Residual],
    *,
    table: str,
    cluster: str,
    dispatcher: str,
    model: str,
    ranks: int,
    math_: str,
    most: int = 2,
) -> list[Residual]:
    """The rows of a table that are most like what is predicted: by machine, dispatcher, model, precision, size."""

    def distance(row: Residual) -> float:
        family: Callable[[str], str] = lambda name: name.partition("_")[0].rstrip("0123456789")  # noqa: E731
        return (
            4 * (row.cluster != cluster)
            + 4 * (family(row.cluster) != family(cluster))
            + 3 * (row.dispatcher != dispatcher)
            + 3 * (bool(row.model) and row.model != model)
            + (row.math != math_)
            + abs(math.log2(max(row.ranks, 1) / ranks))
        )

    return sorted((row for row in rows if row.table == table), key=distance)[:most]
