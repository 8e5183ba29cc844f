"""From raw times of `measure.calibrate` to the row of a CPU in the cluster table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

DTYPES = ("bf16", "fp32")
BLOCK_SHARE = 0.25  # of a MoE layer's overhead that an attention or a feed-forward has: a guess, and small
SIGNIFICANT = 4  # digits
ACTIVATION_PASSES = 4  # forward, and a backward that counts three


def cpu_row(raw: dict[str, Any]) -> dict[str, Any]:
    """The measured constants, in SI units, by the names of `cluster.Cluster`.

    Efficiencies are 1: what was measured is what is reached.
    """
    alpha, beta = line([(w["bytes"], w["seconds"]) for w in raw["wire"]])
    overhead, per_route, per_score, backward = _thin(raw["thin"], exchange=alpha)
    moved = sum(raw["rows"][part] for part in ("order", "sum"))
    return {
        "flops": _rate(raw["bf16"]["products"]),
        "flops_32bit": _rate(raw["fp32"]["products"]),
        "attention_flops": _rate([one for dtype in DTYPES for one in raw[dtype]["scores"]]),
        "activation_rate": _activation([one for dtype in DTYPES for one in raw[dtype]["activation"]]),
        "memory_bandwidth": 2 * raw["rows"]["bytes"] / moved,
        "fast_link": beta,
        "exchange_latency": alpha,
        "emulated_latency": float(
            np.mean([one["seconds"] - one["link_seconds"] for one in raw["throttled"]])
        ),
        "layer_overhead": overhead,
        "seconds_per_route": per_route,
        "seconds_per_score": per_score,
        "backward_overhead": backward,
    }


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds = alpha + bytes / beta through `(bytes, seconds)`, least squares of relative errors: (alpha, beta)."""
    sizes, seconds = (np.array(column, dtype=float) for column in zip(*points))
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if alpha <= 0 or per_byte <= 0:
        raise ValueError("transfers did not take longer the larger they were; measure on a quiet machine")
    return float(alpha), float(1 / per_byte)


def _rate(measured: Sequence[dict[str, Any]]) -> float:
    """FLOP per second, backward being twice the forward pass."""
    return 3 * sum(m["forward_flops"] for m in measured) / sum(m["forward"] + m["backward"] for m in measured)


def _activation(measured: Sequence[dict[str, Any]]) -> float:
    """Values per second and pass."""
    return (
        ACTIVATION_PASSES
        * sum(m["values"] for m in measured)
        / sum(m["forward"] + m["backward"] for m in measured)
    )


def _thin(measured: Sequence[dict[str, Any]], *, exchange: float) -> tuple[float, float, float, float]:
    """Overhead, seconds per route, seconds per score, and what backward takes of the three."""
    counts = np.array([[1.0, m["tokens"] * m["top_k"], m["tokens"] * m["num_experts"]] for m in measured])
    # The model has exchanges apart: counts, routes, rows and the way back; in backward one less.
    forward = np.array([m["forward"] for m in measured]) - 4 * exchange
    backward = np.array([m["backward"] for m in measured]) - 3 * exchange
    found = _not_negative(counts / forward[:, None], np.ones_like(forward))
    if not found.any():
        raise ValueError("layers took no longer than their exchanges; measure on a quiet machine")
    overhead, per_route, per_score = (float(value) for value in found)
    return overhead, per_route, per_score, float(backward.sum() / (counts @ found).sum())


def _not_negative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with no coefficient below 0: those that would be are left out, one after another."""
    used = list(range(columns.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(columns[:, used], wanted, rcond=None)
        if (found >= 0).all():
            answer = np.zeros(columns.shape[1])
            answer[used] = found
            return answer
        del used[int(found.argmin())]


def yaml_of(row: dict[str, Any], *, ranks: int, memory_gb: float, command: str, facts: str) -> str:
    """The text of a `cluster` option.

    Args:
        row: Of `cpu_row`.
        ranks: That were measured, all on one machine.
        memory_gb: Of each.
        command: That measured.
        facts: Machine and versions.
    """

    def scaled(name: str, factor: float) -> str:
        return f"{row[name] / factor:.{SIGNIFICANT}g}"

    lines = [
        "# python predict.py cluster=cpu_2core model=tiny data.seq_length=256 trainer.precision=32-true",
        f"# {'Two' if ranks == 2 else ranks} CPU ranks, measured by `{command}`.",
        f"# On {facts}. All ranks on one machine, gloo over the loopback.",
        "defaults:",
        "  - /schema/cluster/machine@_here_",
        "  - _self_",
        "",
        "kind: cpu",
        "mxfp8: false",
        f"num_gpus: {ranks} # ranks, one core each",
        f"gpus_per_domain: {ranks}",
        f"bf16_tflops: {scaled('flops', 1e12)}",
        "fp8_tflops: null",
        f"fp32_tflops: {scaled('flops_32bit', 1e12)}",
        f"attention_tflops: {scaled('attention_flops', 1e12)}",
        f"memory_tb_per_s: {scaled('memory_bandwidth', 1e12)}",
        f"memory_gb: {memory_gb:g}",
        f"activation_gvalues_per_s: {scaled('activation_rate', 1e9)}",
        f"fast_link_gb_per_s: {scaled('fast_link', 1e9)}",
        "slow_link_gb_per_s: null",
        "gemm_efficiency: 1.0 # what was measured is what is reached",
        "fp8_gemm_efficiency: 1.0",
        "memory_efficiency: 1.0",
        "fast_link_efficiency: 1.0",
        "slow_link_efficiency: 1.0",
        f"layer_overhead_us: {scaled('layer_overhead', 1e-6)}",
        f"route_ns: {scaled('seconds_per_route', 1e-9)}",
        f"score_ns: {scaled('seconds_per_score', 1e-9)}",
        f"backward_overhead: {scaled('backward_overhead', 1)}",
        f"block_overhead_us: {BLOCK_SHARE * row['layer_overhead'] / 1e-6:.{SIGNIFICANT}g}",
        "overhead_in_graph: 1.0 # a tape replays the same operators",
        f"exchange_latency_us: {scaled('exchange_latency', 1e-6)}",
        f"emulated_latency_us: {scaled('emulated_latency', 1e-6)} # of link=throttled, beside the link's own",
        "wire_on_compute: 1.0 # the core that computes copies too",
    ]
    return "\n".join(lines) + "\n"
