"""Dimensions: in other units of bytes, FLOP and seconds every answer is the same one, in the other units."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from sidestream.predict.cluster import Cluster
from sidestream.predict.job import Job
from sidestream.predict.memory import memory
from sidestream.predict.step import step
from tests.predict.asking import asked

ASKED = {
    "gpu": ("cluster=gb300_nvl72", "cluster.num_gpus=256", "model=deepseek_v3", "overlap=shortcut",
            "strategy.expert_parallel_size=32", "predict.pipeline_stages=2", "predict.math=mxfp8",
            "predict.shard_optimizer=true"),
    "cpu": ("cluster=cpu_2core", "model=tiny", "overlap=chunked", "dispatcher=alltoall"),
    "nodes": ("cluster=h100", "dispatcher=deep_ep", "overlap=none", "graph=step", "dispatcher.capacity_factor=1.5"),
}  # fmt: skip


def found(name: str) -> tuple[Job, Cluster]:
    one = asked(*ASKED[name])
    return one.job, one.cluster


def test_every_number_of_a_machine_has_a_dimension() -> None:
    plain = {"name", "kind", "mxfp8", "num_gpus", "gpus_per_domain"}
    assert {item.name for item in fields(Cluster) if "dimension" not in item.metadata} == plain


def in_units(cluster: Cluster, *, byte: float = 1.0, flop: float = 1.0, second: float = 1.0) -> Cluster:
    """The same machine, where the unit of bytes is `1 / byte` bytes, and so on."""
    factors = {"byte": byte, "flop": flop, "second": second}
    changed: dict[str, Any] = {}
    for item in fields(cluster):
        value = getattr(cluster, item.name)
        if value is None or not item.metadata:
            continue
        for unit, exponent in item.metadata.get("dimension", {}).items():
            value *= factors[unit] ** exponent
        changed[item.name] = value
    return replace(cluster, **changed)


OVERHEADS = ("layer_overhead", "block_overhead", "exchange_latency", "seconds_per_route", "seconds_per_score")
ENDLESS = 1e40


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("unit", ["byte", "flop"])
def test_a_rate_twice_as_high_halves_its_time(name: str, unit: str) -> None:
    """With nothing else to wait for: so bytes are divided by bytes per second only, and FLOP by FLOP per second."""
    job, cluster = found(name)
    other = {"byte": "flop", "flop": "byte"}[unit]
    alone = replace(
        in_units(cluster, **{other: ENDLESS}), activation_rate=None, **dict.fromkeys(OVERHEADS, 0.0)
    )
    one, two = step(job, alone), step(job, in_units(alone, **{unit: 2.0}))
    assert one.seconds > 0 and two.seconds == pytest.approx(one.seconds / 2, rel=1e-9)


@pytest.mark.parametrize("name", ASKED)
def test_seconds_are_all_there_is_in_an_answer(name: str) -> None:
    job, cluster = found(name)
    twice = in_units(cluster, second=2.0)  # half-seconds: twice as many of them everywhere
    one, two = step(job, cluster), step(job, twice)
    assert two.seconds == pytest.approx(2 * one.seconds, rel=1e-12)
    assert [part.seconds for part in two.parts] == pytest.approx(
        [2 * part.seconds for part in one.parts], rel=1e-12
    )
    assert two.unit.e_hide == pytest.approx(one.unit.e_hide, rel=1e-12)
    assert memory(job, twice).total == memory(job, cluster).total


@pytest.mark.parametrize("name", ASKED)
def test_a_time_is_made_of_bytes_flop_and_seconds(name: str) -> None:
    """With infinitely fast memory, links and products only the overheads are left, and without these nothing is."""
    job, cluster = found(name)
    fast = in_units(cluster, byte=1e30, flop=1e30)
    fast = replace(fast, activation_rate=None)
    left = step(job, fast)
    overheads = (
        "layer_overhead",
        "block_overhead",
        "exchange_latency",
        "seconds_per_route",
        "seconds_per_score",
    )
    nothing = step(job, replace(fast, **dict.fromkeys(overheads, 0.0)))
    assert 0 < left.seconds < step(job, cluster).seconds
    assert nothing.seconds == pytest.approx(0.0, abs=1e-12)
