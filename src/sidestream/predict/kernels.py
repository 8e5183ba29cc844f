"""Seconds of single kernels. m rows, k and n features."""

from __future__ import annotations

from sidestream.predict.cluster import Cluster, Math

VALUE_BYTES: dict[str, int] = {
    "fp32": 4,
    "bf16": 2,
    "fp8": 2,
    "mxfp8": 2,
}  # of activations, by what products use


def grouped_product(
    cluster: Cluster, math: Math, *, rows: float, k: int, n: int, experts: float, alignment: int = 1
) -> float:
    """One grouped product of `rows` rows in all, evenly over the experts: bound by arithmetic or by memory.

    Args:
        alignment: Rows of each expert are padded to a multiple, half of it on average.
    """
    padded = rows + experts * (alignment - 1) / 2
    arithmetic = 2 * padded * k * n / cluster.products(math)
    operand_bytes = 1 if math in ("fp8", "mxfp8") else VALUE_BYTES[math]
    moved = (padded * k + experts * k * n) * operand_bytes + padded * n * VALUE_BYTES[math]
    return max(arithmetic, moved / cluster.memory)


def product(cluster: Cluster, math: Math, *, rows: float, k: int, n: int) -> float:
    """One product with a single weight."""
    return grouped_product(cluster, math, rows=rows, k=k, n=n, experts=1)


def activation_pass(cluster: Cluster, math: Math, *, values: float, gated: bool) -> float:
    """The pass between the experts' products, forward; `values` of its output.

    On a GPU it moves one read or write per value and operand half (1.5 in all if gated): what is left of it beside the
    products' own epilogues in published layers. On a CPU arithmetic decides.
    """
    moved = (1.5 if gated else 1.0) * values * VALUE_BYTES[math] / cluster.memory
    return max(moved, values / cluster.activation_rate) if cluster.activation_rate else moved
