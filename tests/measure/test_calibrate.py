"""Calibration on two ranks, at sizes that take no time: every constant of the row is measured."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from sidestream.exchange import link, ops
from sidestream.measure import calibrate
from sidestream.measure.shapes import LayerShape
from sidestream.predict.calibration import cpu_row, line
from sidestream.profiling import rounds
from tests.clock import virtual_time
from tests.predict.asking import CONF
from tests.rank_pool import ranks

SMALL = {
    "PRODUCTS": ("tiny",),
    "SHAPES": {"tiny": LayerShape("tiny", 64, 32, 32, 4, 2)},
    "WIRE_BYTES": (2**12, 2**20, 2**22),
    "THROTTLED_BYTES": (2**12,),
    "THIN": tuple(LayerShape(f"{t} {e} {k}", t, 16, 16, e, k) for t, e, k in ((64, 4, 2), (128, 8, 4))),
    "ROWS": LayerShape("rows", 256, 64, 64, 4, 2),
    "SCORES": ((2, 2, 32, 16),),
}


WORK_S = 1e-3  # of anything that is timed, by the clock of the test
LATENCY_S, BYTES_PER_S = 50e-6, 1e9  # of an exchange


def measured(rank: int, world: int) -> dict[str, Any]:
    """The calibration on a machine whose times are known."""
    with ExitStack() as changed:
        for name, value in SMALL.items():
            changed.enter_context(patch.object(calibrate, name, value))
        clock = changed.enter_context(virtual_time(rounds, link, ops, tick=WORK_S))

        def exchange(received: Tensor, sent: Tensor) -> None:
            dist.all_to_all_single(received, sent)
            travels = sent.numel() // world * (world - 1)
            clock.now += LATENCY_S + travels / BYTES_PER_S - WORK_S  # with the tick of the reading behind it

        here = SimpleNamespace(**vars(dist) | {"all_to_all_single": exchange})
        changed.enter_context(patch.object(calibrate, "dist", here))
        plain = {"conf": str(CONF), "seed": 1, "rounds": 2, "warmup": 0, "layers": 1}
        return calibrate.run_plain(plain, say=lambda _: None)[0]


@pytest.mark.full
def test_every_constant_is_measured_and_the_same_on_all_ranks() -> None:
    first, second = ranks(2).run(measured)
    assert first == second and first["ranks"] == 2
    row = cpu_row(first)
    assert min(row.values()) >= 0
    assert row["exchange_latency"] == pytest.approx(LATENCY_S)
    assert row["fast_link"] == pytest.approx(BYTES_PER_S)
    # Two passes, three times the products of the first, a tick each.
    flops = 6 * 64 * 2 * 32 * 32
    assert row["flops"] == row["flops_32bit"] == pytest.approx(3 * flops / (2 * WORK_S))
    for name in ("attention_flops", "activation_rate", "memory_bandwidth"):
        assert row[name] > 0, name
    assert [one["bytes"] for one in first["wire"]] == [2**12, 2**20, 2**22]
    (throttled,) = first["throttled"]
    assert throttled["link_seconds"] == pytest.approx(2**12 * 8e-9)
    assert throttled["seconds"] >= throttled["link_seconds"]
    assert row["layer_overhead"] > 0


def test_transfers_that_are_no_line_are_refused() -> None:
    """What a busy machine gives: said, and no row is made of it."""
    with pytest.raises(ValueError, match="measure on a quiet machine"):
        line([(2**12, 3e-3), (2**20, 2e-3), (2**22, 1e-3)])
