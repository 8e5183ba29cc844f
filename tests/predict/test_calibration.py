"""The CPU row: what is made of raw times, and that the committed row is the committed measurement's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sidestream.predict.calibration import cpu_row, line, yaml_of
from tests.predict.asking import CONF

RESULT = CONF.parent / "docs" / "results" / "calibration.json"


def test_the_committed_row_is_that_of_the_committed_measurement() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    row = cpu_row(result["measured"])
    assert row == pytest.approx(result["row"])
    text = (CONF / "cluster" / "cpu_2core.yaml").read_text(encoding="utf-8")
    memory = next(text.split() for text in text.splitlines() if text.startswith("memory_gb"))[1]
    facts = next(one for one in text.splitlines() if one.startswith("# On "))
    again = yaml_of(
        row,
        ranks=result["measured"]["ranks"],
        memory_gb=float(memory),
        command=result["command"],
        facts=facts.removeprefix("# On ").removesuffix(". All ranks on one machine, gloo over the loopback."),
    )
    assert text == again


def test_a_line_through_transfers() -> None:
    points = [(size, 2e-4 + size / 1.5e9) for size in (1e3, 1e5, 1e6, 1e7)]
    assert line(points) == pytest.approx((2e-4, 1.5e9))
    with pytest.raises(ValueError, match="quiet machine"):
        line([(1e3, 1.0), (1e6, 0.5)])


def raw(**changed: Any) -> dict[str, Any]:
    """Times of a machine of known rates."""
    kernel = {"forward_flops": 1e9, "forward": 0.01, "backward": 0.02}
    thin = [
        {
            "tokens": tokens,
            "num_experts": experts,
            "top_k": top_k,
            "forward": 3e-3 + 2e-7 * tokens * top_k + 4e-8 * tokens * experts + 4 * 1e-4,
            "backward": 0.7 * (3e-3 + 2e-7 * tokens * top_k + 4e-8 * tokens * experts) + 3 * 1e-4,
        }
        for tokens, experts, top_k in (
            (1024, 8, 2),
            (4096, 8, 2),
            (4096, 32, 2),
            (4096, 32, 4),
            (8192, 16, 4),
        )
    ]
    dtype = {
        "products": [kernel],
        "activation": [{"values": 1e6, "forward": 1e-3, "backward": 3e-3}],
        "scores": [{"forward_flops": 1e9, "forward": 0.02, "backward": 0.04}],
    }
    return {
        "bf16": dtype,
        "fp32": {**dtype, "products": [{**kernel, "forward": 0.02, "backward": 0.04}]},
        "wire": [{"bytes": size, "seconds": 1e-4 + size / 2e9} for size in (4096, 65536, 2**20, 2**24)],
        "rows": {"bytes": 1e7, "order": 1e-3, "sum": 1e-3},
        "throttled": [{"bytes": 1e6, "seconds": 8.5e-3, "link_seconds": 8e-3}],
        "thin": thin,
        "ranks": 2,
        **changed,
    }


def test_known_rates_are_found_again() -> None:
    row = cpu_row(raw())
    wanted = {
        "flops": 1e11,
        "flops_32bit": 5e10,
        "attention_flops": 5e10,
        "activation_rate": 1e9,
        "memory_bandwidth": 1e10,
        "fast_link": 2e9,
        "exchange_latency": 1e-4,
        "emulated_latency": 5e-4,
        "layer_overhead": 3e-3,
        "seconds_per_route": 2e-7,
        "seconds_per_score": 4e-8,
        "backward_overhead": 0.7,
    }
    assert row == pytest.approx(wanted, rel=1e-6)


def test_no_constant_is_negative() -> None:
    measured = raw()
    for one in measured["thin"]:
        one["forward"] -= 3e-8 * one["tokens"] * one["num_experts"] * 2  # faster the more experts there are
    row = cpu_row(measured)
    assert row["seconds_per_score"] == 0 and min(row.values()) >= 0
