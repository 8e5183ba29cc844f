"""Medians: of an even number of rounds the mean of the middle two, everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from sidestream.measure.graph_bench import figures
from sidestream.profiling.rounds import median
from sidestream.report.statistics import summarize

REPOSITORY = Path(__file__).parents[2]


def test_of_an_even_number_it_lies_between_the_middle_two() -> None:
    seconds = torch.tensor([[4.0, 1.0], [1.0, 1.0], [2.0, 8.0], [3.0, 9.0]], dtype=torch.float64)
    assert median(seconds).tolist() == [2.5, 4.5]
    assert median(seconds[:3]).tolist() == [2.0, 1.0]
    assert summarize(seconds[:, 0].tolist())["median"] == 2.5


def test_a_median_lies_between_its_quartiles() -> None:
    """Two rounds, ratios 0.2 and 0.8: the lower one is no median."""
    found = figures([(2.0, 10.0), (8.0, 10.0)], kinds=["eager", "graph"], tokens=100)
    assert found["speedup"] == {"median": 0.5, "q1": 0.35, "q3": 0.65}
    assert found["tokens_per_second"] == {"eager": pytest.approx(20_000), "graph": pytest.approx(10_000)}
    assert found["step_ms"] == {"eager": [2.0, 8.0], "graph": [10.0, 10.0]}


def test_published_figures_are_those_of_their_rounds() -> None:
    result = json.loads((REPOSITORY / "docs" / "results" / "bench_graph.json").read_text())
    for record in result["results"]:
        kinds = list(record["step_ms"])
        tokens = record["tokens_per_step"]
        again = figures(list(zip(*record["step_ms"].values())), kinds=kinds, tokens=tokens)
        assert {name: record[name] for name in again} == again


def test_nothing_takes_the_lower_middle() -> None:
    """`torch.median` and `Tensor.median` do, `kthvalue` can, and so does an index at half the length."""
    wrong = re.compile(
        r"torch\.(nan)?median|\.(nan)?median\((dim|\))|kthvalue\(|\[len\([\w.]+\) // 2\]|n=4\)"
    )
    for folder in ("src", "scripts"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            found = [line for line in path.read_text().splitlines() if wrong.search(line)]
            assert not found, (path, found)
