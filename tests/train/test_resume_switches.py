"""Switches that change no number, each against each other: a run that is started under one goes on under another,
with the bits of the run that was never stopped.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.train.resumed import Ended, changes, config, cut_back, run_all

# Replays of a recorded update follow the resume: two steps warm up, and the third one's rate must not stay.
STEPS = 8
STATE = ["balance=bias", "balance.update_rate=0.01", "model.dropout=0.1", "router.jitter=0.05"]
# The rate rises over the checkpoint in the middle, or falls.
RATES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "warm-up": ({}, {"scheduler.warmup_steps": STEPS}),
    "cosine": ({"scheduler": "cosine"}, {"scheduler.warmup_steps": 2}),
}
EVERYWHERE = {"trainer.max_steps": STEPS, "optimizer.fused": True, "dispatcher.capacity_factor": 4.0}
RECORDED = "recorded update"
SWITCHES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "plain": ({}, {}),
    "recorded": ({"graph": "step"}, {}),
    RECORDED: ({"graph": "step"}, {"graph.include_optimizer": True}),
    "recomputed": ({}, {"model.activation_checkpointing": True}),
    "exact sizes": ({}, {"dispatcher.capacity_factor": None}),
    "beside the shared expert": ({"overlap": "shared_expert"}, {"overlap.delay_wgrad": True}),
    "serially": ({"overlap": "shared_expert"}, {"overlap.enabled": False}),
    "slow wire": ({"link": "throttled"}, {}),
}
PAIRS = list(itertools.permutations(SWITCHES, 2))
# In `make test`: all to and from a recorded update, which keeps the rate in memory, and a ring through the others.
RING = set(zip(SWITCHES, [*list(SWITCHES)[1:], next(iter(SWITCHES))]))
SAMPLED = [pair for pair in PAIRS if RECORDED in pair or pair in RING]


def switched(place: Path, rates: str, switch: str, **keys: Any) -> Any:
    options, given = SWITCHES[switch]
    schedule, of_it = RATES[rates]
    return config(place, *STATE, options={**schedule, **options}, **{**EVERYWHERE, **of_it, **given, **keys})


def hold(place: Path, rates: str, pairs: list[tuple[str, str]]) -> None:
    """Run what is started with, then every pair; all end with the same bits."""
    started = dict.fromkeys(first for first, _ in pairs)
    straight = run_all([(switched(place, rates, name), place / name, None) for name in started])
    cases = []
    for number, (first, then) in enumerate(pairs):
        folder = cut_back(place / first, place / str(number))
        cfg = switched(place, rates, then, resume=str(folder))
        assert changes(folder, cfg)
        cases.append((cfg, folder, None))
    ended = dict(zip([*started, *pairs], [*straight, *run_all(cases, limit_s=600)]))
    failed = {name: end for name, end in ended.items() if not isinstance(end, Ended)}
    assert not failed
    other = [name for name, end in ended.items() if end.bits != straight[0].bits]
    assert not other, f"other bits than {next(iter(started))}: {other}"


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.full
def test_a_switch_on_resume_changes_no_bit(rates: str, tmp_path: Path) -> None:
    # Half of them under each schedule; `full` has all under both.
    hold(tmp_path, rates, SAMPLED[list(RATES).index(rates) :: len(RATES)])


@pytest.mark.full
@pytest.mark.parametrize("rates", RATES)
def test_every_switch_against_every_other(rates: str, tmp_path: Path) -> None:
    hold(tmp_path, rates, PAIRS)
