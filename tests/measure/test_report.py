import io

import pytest
from rich.console import Console

from sidestream.measure.report import add_statistics, draw, print_tables
from sidestream.report.statistics import summarize


def rounds(forward, backward):
    both = [f + b for f, b in zip(forward, backward)]
    return {"forward": list(forward), "forward_backward": both}


def record(*, peers=True, frozen=False):
    times = {
        "dense": ("dense", [1.0, 1.0, 3.0], [1.0, 3.0, 1.0]),  # fwd+bwd 2, 4, 4
        "sidestream/alltoall+grouped": ("sidestream", [2.0, 2.0, 2.0], [1.0, 3.0, 4.0]),  # 3, 5, 6
    }
    if peers:
        times["one"] = ("peer", [2.0, 4.0, 4.0], [0.5, 4.0, 4.0])  # 2.5, 8, 8: fastest by minimum
        times["two"] = ("peer", [3.0, 3.0, 3.0], [1.0, 1.0, 2.0])  # 4, 4, 5: fastest by median
    arms = {
        name: {
            "kind": kind,
            "rounds_ms": rounds(forward, backward),
            "frozen_rounds_ms": rounds([1.0], [1.0]) if frozen else None,
            "peak_memory_bytes": None,
            "bytes_on_wire": 1_500_000,
            "error": None,
        }
        for name, (kind, forward, backward) in times.items()
    }
    return {
        "shape": "A",
        "tokens": 8,
        "hidden_size": 4,
        "expert_hidden_size": 4,
        "num_experts": 4,
        "top_k": 2,
        "world_size": 2,
        "routing": {"expert_max_over_mean": 1.25},
        "left_out": {"sidestream/local+grouped": "two ranks"},
        "arms": arms,
    }


def test_summary_of_rounds():
    assert summarize([4.0, 1.0, 2.0, 3.0]) == {"min": 1.0, "q1": 1.75, "median": 2.5, "q3": 3.25, "max": 4.0}
    assert summarize([2.0]) == {"min": 2.0, "q1": 2.0, "median": 2.0, "q3": 2.0, "max": 2.0}


def test_ratios_by_minimum_and_by_median():
    case = record()
    add_statistics(case)
    ours = case["arms"]["sidestream/alltoall+grouped"]
    assert ours["forward_backward_ms"]["min"] == 3.0 and ours["forward_backward_ms"]["median"] == 5.0
    assert ours["ratio_to_dense"] == {"min": 1.5, "median": 1.25}
    assert case["fastest_peer"] == {"min": "one", "median": "two"}
    assert ours["ratio_to_fastest_peer"] == {"min": 1.2, "median": 1.25}


def test_ratios_to_any_arm():
    case = record()
    add_statistics(case, against=["two", "absent"])
    assert case["arms"]["sidestream/alltoall+grouped"]["ratio_to"] == {
        "two": {"min": 0.75, "median": 1.25},
        "absent": None,
    }
    result = {"results": [case], "precision": "bf16", "peers": ["one"], "peers_left_out": {}, "rounds": 3}
    out = io.StringIO()
    print_tables({**result, "load_average": {"before": [0.1], "after": [0.2]}}, Console(file=out, width=180))
    assert "(1) is two" in out.getvalue() and "(2) is absent, which is not there" in out.getvalue()


def test_frozen_rounds_are_a_second_set_of_figures():
    case = record(frozen=True)
    add_statistics(case)
    frozen = case["arms"]["one"]["frozen"]
    assert frozen["forward_backward_ms"]["min"] == 2.0
    assert frozen["ratio_to_dense"] == {"min": 1.0, "median": 1.0}
    assert case["arms"]["one"]["forward_backward_ms"]["min"] == 2.5


@pytest.mark.parametrize("peers", [True, False])
def test_table_and_picture(peers):
    case = record(peers=peers)
    add_statistics(case)
    result = {
        "results": [case],
        "precision": "bf16",
        "peers": ["one", "two"] if peers else [],
        "peers_left_out": {},
        "rounds": 3,
        "load_average": {"before": [0.1, 0, 0], "after": [0.2, 0, 0]},
    }
    out = io.StringIO()
    print_tables(result, Console(file=out, width=140))
    text = out.getvalue()
    assert "1.50 / 1.25" in text and "left out: sidestream/local+grouped: two ranks" in text
    assert ("peers=none" in text) is not peers
    assert len(draw(result).axes[0].patches) == (3 if peers else 1)
