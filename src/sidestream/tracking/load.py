"""How evenly the experts are used, from routes per expert. NumPy only: the counts are on the host already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sidestream.tracking import names


def worst_load(counts: np.ndarray) -> float | None:
    """Returns `names.LOAD` alone, which is shown after every step."""
    return float(_max_over_mean(counts).max()) if counts.shape[0] else None


def load_metrics(counts: np.ndarray, *, num_ranks: int) -> dict[str, Any]:
    """Returns the load metrics of one step, per layer and over the layers.

    Args:
        counts: `[layers, experts]` routes per expert over the global batch.
        num_ranks: ranks that share one copy of the experts, in contiguous parts of equal size.

    Returns:
        `names.LOAD` and its kin; None without MoE layers, and the lists are empty then.
    """
    layers = counts.shape[0]
    ranks = counts.reshape(layers, num_ranks, counts.shape[1] // num_ranks).sum(axis=2)
    values: list[tuple[str, str, np.ndarray, Callable[[list], float]]] = [
        (names.LOAD, names.LAYER_LOAD, _max_over_mean(counts), max),
        (names.LOAD_CV, names.LAYER_LOAD_CV, counts.std(axis=1) / _mean(counts), max),
        (names.DEAD_EXPERTS, names.LAYER_DEAD_EXPERTS, (counts == 0).sum(axis=1), sum),
        (names.RANK_LOAD, names.LAYER_RANK_LOAD, _max_over_mean(ranks), max),
    ]
    metrics: dict[str, Any] = {}
    for name, layer_name, per_layer, over_layers in values:
        metrics[layer_name] = per_layer.tolist()
        metrics[name] = over_layers(metrics[layer_name]) if layers else None
    return metrics


def _mean(counts: np.ndarray) -> np.ndarray:
    # A layer that got no route at all counts as 0, not as a division by zero.
    return np.maximum(counts.mean(axis=1), np.finfo(np.float64).tiny)


def _max_over_mean(counts: np.ndarray) -> np.ndarray:
    return counts.max(axis=1, initial=0) / _mean(counts)
