"""Calibration on two ranks, at sizes that take no time: every constant of the row is measured."""

from __future__ import annotations

from typing import Any

from sidestream.measure import calibrate
from sidestream.measure.shapes import LayerShape
from sidestream.predict.calibration import cpu_row
from tests.predict.asking import CONF
from tests.rank_pool import ranks

SMALL = {
    "PRODUCTS": ("tiny",),
    "SHAPES": {"tiny": LayerShape("tiny", 64, 32, 32, 4, 2)},
    "WIRE_BYTES": (2**12, 2**20, 2**22),
    "THROTTLED_BYTES": (2**12,),
    "THIN": tuple(
        LayerShape(f"{t} {e} {k}", t, 16, 16, e, k) for t, e, k in ((256, 4, 2), (512, 4, 2), (512, 16, 4))
    ),
    "ROWS": LayerShape("rows", 256, 64, 64, 4, 2),
    "SCORES": ((2, 2, 32, 16),),
}


def measured(rank: int, world: int) -> dict[str, Any]:
    kept = {name: getattr(calibrate, name) for name in SMALL}
    try:
        for name, value in SMALL.items():
            setattr(calibrate, name, value)
        plain = {"conf": str(CONF), "seed": 1, "rounds": 2, "warmup": 1, "layers": 2}
        return calibrate.run_plain(plain, say=lambda _: None)[0]
    finally:
        for name, value in kept.items():
            setattr(calibrate, name, value)


def test_every_constant_is_measured_and_the_same_on_all_ranks() -> None:
    first, second = ranks(2).run(measured)
    assert first == second and first["ranks"] == 2
    row = cpu_row(first)
    assert min(row.values()) >= 0
    for name in (
        "flops",
        "flops_32bit",
        "attention_flops",
        "activation_rate",
        "memory_bandwidth",
        "fast_link",
    ):
        assert row[name] > 1e6, name
    assert [one["bytes"] for one in first["wire"]] == [2**12, 2**20, 2**22]
    (throttled,) = first["throttled"]
    assert throttled["seconds"] >= throttled["link_seconds"]
