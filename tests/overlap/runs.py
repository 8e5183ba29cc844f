"""Short trainings under a schedule, with pauses before the exchanges; what the tests of the schedules compare."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from sidestream.model.config import ModelShape
from sidestream.overlap import slots
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from tests.core.build_tiny import SHAPE, Setup, full, local_batch, make_model, make_optimizer, make_step

PAUSE_S = 0.02
# A dense block in front of the MoE block, as pos2 and pos3 need.
PAIRS = replace(SHAPE, num_layers=2, moe_layers=(1,))
# MoE blocks behind nothing and behind a dense block.
MIXED = replace(SHAPE, num_layers=3, moe_layers=(0, 2))


@dataclass(frozen=True)
class Case:
    """A schedule, and the model that it needs.

    Attributes:
        make: Makes the schedule; takes `enabled`, `delay_wgrad` and other options of it.
        shape: Of the model.
        top_k: Of the router.
    """

    make: Callable[..., Any]
    shape: ModelShape = PAIRS
    top_k: int = 2

    def deep(self) -> Case:
        """With twice the blocks, so that units follow one another."""
        layers, blocks = self.shape.num_layers, self.shape.moe_blocks
        again = (*blocks, *(layers + block for block in blocks))
        return replace(self, shape=replace(self.shape, num_layers=2 * layers, moe_layers=again))

    def setup(self, *, dropout: float = 0.1, recompute: bool = False, **changes: Any) -> Setup:
        """With everything that draws random numbers, so that their order is compared too."""
        shape = replace(self.shape, dropout=dropout, activation_checkpointing=recompute)
        # Three sequences per micro-batch, so that halves and chunks are uneven.
        defaults = {"accumulation": 2, "global_batch": 12, "steps": 2, "router": "jitter"}
        return Setup(**{**defaults, "shape": shape, "top_k": self.top_k, **changes})


_shortcut = partial(partial, ShortcutOverlap)
_gates = {"shape": replace(PAIRS, num_shared_experts=0), "top_k": 1}
CASES = {
    "shared_expert": Case(SharedExpertOverlap),
    "chunked": Case(partial(ChunkedOverlap, num_chunks=3)),
    "two_batch": Case(TwoBatchOverlap),
    "pos1": Case(_shortcut(tap="pos1", slot=1), MIXED),
    "pos2_cg1": Case(_shortcut(tap="pos2", mix="cg1", post_norm=True, slot=2)),
    "pos3_cg2": Case(_shortcut(tap="pos3", mix="cg2", tap_norm=False, slot=1)),
    "double_gating": Case(_shortcut(double_gating=True, slot=1), **_gates),
}
# The rest of the options, for the full matrix.
MORE_CASES = {
    "shared_expert_gated": Case(SharedExpertOverlap, replace(PAIRS, shared_expert_gate=True)),
    "chunked_2": Case(partial(ChunkedOverlap, num_chunks=2), MIXED),
    "auto": Case(_shortcut(slot=2), MIXED),
    "no_shared_expert": Case(_shortcut(slot=1), replace(MIXED, num_shared_experts=0)),
    "pos3_top1": Case(_shortcut(tap="pos3", slot=4), top_k=1),
    "double_gating_pos1": Case(_shortcut(tap="pos1", double_gating=True, post_norm=True, slot=0), **_gates),
}


class Pauses:
    """Called before each exchange: notes its tag and sleeps a random time. Short ones are more frequent."""

    def __init__(self, rank: int, longest_s: float) -> None:
        self.tags: list[str] = []
        self._random, self._longest_s = random.Random(rank), longest_s

    def __call__(self, tag: str) -> None:
        self.tags.append(tag)
        if self._longest_s:
            time.sleep(self._longest_s * self._random.random() ** 3)


def train(rank: int, world: int, setup: Setup, *, pause_s: float = 0.0, skew: float = 0.0) -> dict[str, Any]:
    """Losses, the first step's gradients, the last step's parameters, and the tags of all exchanges in order.

    Args:
        rank, world: This rank.
        setup: What to train.
        pause_s: Longest pause before an exchange.
        skew: Added to the selection bias of the first half of the experts, those of the first ranks.
    """
    model = make_model(setup)
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    model.parts.dispatcher.channel.on_start = pauses = Pauses(rank, pause_s)
    search = getattr(model.schedule, "slots", None)
    out: dict[str, Any] = {"loss": [], "norm": [], "counts": []}
    with mock.patch.object(slots, "MEASURED_STEPS", 1):
        for index in range(setup.steps):
            for moe in model.moe_layers() if skew else ():
                moe.selection_bias.zero_()[: setup.shape.num_experts // 2] = skew
            step.attempt(local_batch(setup, index, rank, world))
            if index == 0:
                out["grads"] = {name: full(p.grad) for name, p in model.named_parameters()}
            report = step.check()
            norm = step.commit(report, optimizer_step=optimizer.step, max_norm=setup.max_norm)
            if search is not None:
                search.end_step(step.parallel.control, torch.device("cpu"))
            out["loss"].append(report.loss)
            out["norm"].append(float(norm))
            out["counts"].append(report.counts)
    out["params"] = {name: full(p) for name, p in model.named_parameters()}
    out["tags"], out["slots"] = pauses.tags, {} if search is None else dict(search.found)
    step.reduction.close()
    model.parts.dispatcher.close()  # finds a transfer that nobody waited for
    return out


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two runs do not have in common, bit for bit."""
    assert one["grads"].keys() == other["grads"].keys()
    found = [what for what in ("loss", "norm") if one[what] != other[what]]
    found += [
        f"counts of step {i}"
        for i, (a, b) in enumerate(zip(one["counts"], other["counts"]))
        if (a != b).any()
    ]
    for kind in ("grads", "params"):
        found += [f"{kind} {n}" for n, value in one[kind].items() if not torch.equal(value, other[kind][n])]
    return found
