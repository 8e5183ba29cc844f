"""Unfair pairs are refused by name, with both values; accepted when they are declared, which the title then says."""

from pathlib import Path
from typing import Any

import pytest

from sidestream.compare.arms import Comparison, compare
from sidestream.compare.errors import CompareError
from sidestream.compare.fairness import covers
from sidestream.compare.runs import read_folders
from tests.compare.folders import write_run, write_sweep

THROTTLED = {"link": "throttled"}
# What the second arm differs in, beside its schedule -> the key that names it, and both values.
UNFAIR: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "transport": ({"result": {"transport": "nccl_ep"}}, "transport", "nccl_ep", "torch"),
    "commit": ({"result": {"commit": "fedcba"}}, "commit", "fedcba", "0123456789abcdef"),
    "dirty": (
        {"result": {"commit": "0123456789abcdef-dirty"}},
        "commit",
        "0123456789abcdef-dirty",
        "0123456789abcdef",
    ),
    "device": ({"result": {"device": "cuda"}}, "device", "cuda", "cpu"),
    "world": ({"result": {"world_size": 4}, "config": {"trainer.devices": 4}}, "world_size", "4", "2"),
    "ep": ({"result": {"expert_parallel_size": 1}}, "expert_parallel_size", "1", "2"),
    "precision": ({"result": {"precision": "bf16-mixed"}}, "precision", "bf16-mixed", "32-true"),
    "data": ({"result": {"data_checksum": "xyz"}}, "data_checksum", "xyz", "abc"),
    "tokens": ({"result": {"metrics.tokens": 1000}}, "tokens", "1000", "2000"),
    "cpu": ({"env": {"cpu": "Other CPU"}}, "cpu", "Other CPU", "Some CPU"),
    "torch": ({"result": {"versions.torch": "2.14"}}, "torch", "2.14", "2.13.0"),
    "model key": ({"config": {"model.hidden_size": 128}}, "model.hidden_size", "128", "64"),
    "new key": ({"config": {"model.new": 1}}, "model.new", "1", "absent"),
    "optimizer": (
        {"choices": {"optimizer": "sgd"}, "config": {"optimizer.lr": 1}},
        "optimizer",
        "sgd",
        "adamw",
    ),
    "link": ({"choices": THROTTLED, "config": {"link.gbps": 1.0}}, "link", "throttled", "native"),
    "seeds": ({"seed": 2}, "seeds", "[2]", "[1]"),
}


def pair(folder: Path, other: dict[str, Any]) -> Path:
    """Two schedules with one run each; the second differs in more than the schedule."""
    write_run(folder / "0-plain")
    changed = {**other, "choices": {"overlap": "chunked", **other.get("choices", {})}}
    write_run(folder / "1-other", **changed)
    return folder


def comparison(folder: Path, **options: Any) -> Comparison:
    runs, left_out = read_folders([folder])
    return compare(runs, left_out=left_out, **options)


@pytest.mark.parametrize("case", UNFAIR)
def test_an_unfair_pair_is_refused_by_name(case: str, tmp_path: Path):
    other, key, here, there = UNFAIR[case]
    with pytest.raises(CompareError) as refused:
        comparison(pair(tmp_path, other))
    (line,) = refused.value.lines
    arm = case == "seeds"
    assert line.startswith(
        f"{key}={here} in {chr(39).join(('arm ', 'overlap=chunked', '')) if arm else '1-other'}: "
    )
    assert f"it is {there} in {chr(39).join(('arm ', 'overlap=none', '')) if arm else '0-plain'};" in line
    assert line.endswith(f"pass --differ {key} if this difference is meant")


@pytest.mark.parametrize("case", UNFAIR)
def test_a_declared_difference_is_in_the_title(case: str, tmp_path: Path):
    other, key, here, there = UNFAIR[case]
    found = comparison(pair(tmp_path, other), differ=[key])
    assert found.title == f"Comparison of overlap; the runs also differ in {key} ({there}, {here})"
    assert len(found.arms) == 2


def test_another_rate_of_the_link_is_refused(tmp_path: Path):
    for number, (overlap, gbps) in enumerate([("none", 1.0), ("chunked", 10.0)]):
        choices = {"overlap": overlap, **THROTTLED}
        write_run(tmp_path / str(number), choices=choices, config={"link.gbps": gbps})
    with pytest.raises(CompareError, match=r"^link\.gbps=10\.0 in 1: it is 1\.0 in 0;"):
        comparison(tmp_path)
    for declared in ("link.gbps", "link"):
        assert "link.gbps (1.0, 10.0)" in comparison(tmp_path, differ=[declared]).title


def test_every_difference_has_its_line(tmp_path: Path):
    other = {
        "result": {"transport": "nccl_ep", "commit": "fed"},
        "config": {"data.seq_length": 64},
        "seed": 3,
    }
    with pytest.raises(CompareError) as refused:
        comparison(pair(tmp_path, other))
    assert [line.partition("=")[0] for line in refused.value.lines] == [
        "data.seq_length",
        "transport",
        "commit",
        "seeds",
    ]


def test_a_failed_run_makes_seed_sets_differ_and_the_refusal_says_so(tmp_path: Path):
    write_sweep(tmp_path)
    write_run(tmp_path / "6", seed=4)
    write_run(tmp_path / "7", seed=4, choices={"overlap": "chunked"}, status="failed")
    with pytest.raises(CompareError) as refused:
        comparison(tmp_path)
    assert refused.value.lines[0].startswith("seeds=[1,2,3] in arm 'overlap=chunked': it is [1,2,3,4] in arm")
    assert refused.value.lines[1] == "left out: 7: status failed: ValueError: it broke"


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"data.cache_dir": "/b"}},
        {"config": {"paths.log_dir": "elsewhere"}},
        {"config": {"logger.project": "x"}},
        {"config": {"callbacks.progress.enabled": False}},
        {"config": {"trainer.devices": "auto"}},
        {"config": {"debug": True, "resume": "x", "name": "y"}},
        {"config": {"overlap.num_chunks": 3}},
    ],
)
def test_what_does_not_matter_is_not_refused(other: dict[str, Any], tmp_path: Path):
    assert comparison(pair(tmp_path, other)).title == "Comparison of overlap"


@pytest.mark.parametrize("flag", ["studied", "differ"])
def test_a_misspelt_name_is_refused(flag: str, tmp_path: Path):
    with pytest.raises(CompareError, match=rf"^{flag}=overlop: no run has such a key"):
        comparison(pair(tmp_path, {}), **{flag: ["overlop"]})


def test_a_name_that_does_not_differ_is_not_in_the_title(tmp_path: Path):
    found = comparison(pair(tmp_path, {}), differ=["transport"])
    assert found.title == "Comparison of overlap"
    assert found.notes == ("--differ transport was given, but the runs do not differ in it.",)


def test_what_nobody_recorded_is_said(tmp_path: Path):
    for number, overlap in enumerate(("none", "chunked")):
        write_run(tmp_path / str(number), choices={"overlap": overlap}, result={"commit": None})
    assert comparison(tmp_path).notes == ("Not recorded in any run, so not checked: commit.",)


def test_uncommitted_changes_are_said(tmp_path: Path):
    for number, overlap in enumerate(("none", "chunked")):
        write_run(tmp_path / str(number), choices={"overlap": overlap}, result={"commit": "abc-dirty"})
    (note,) = comparison(tmp_path).notes
    assert "uncommitted changes" in note


def test_the_transport_of_a_fused_run_is_part_of_that_choice(tmp_path: Path):
    for seed in (1, 2):
        for fusion, transport in (("mega", "shared_memory"), ("grouped", "torch"), ("loop", "torch")):
            given = {"choices": {"fusion": fusion}, "result": {"transport": transport}}
            write_run(tmp_path / f"{fusion}{seed}", seed=seed, **given)
    assert len(comparison(tmp_path).arms) == 3
    write_run(tmp_path / "loop3", seed=3, choices={"fusion": "loop"}, result={"transport": "nccl_ep"})
    with pytest.raises(CompareError, match="transport="):
        comparison(tmp_path)


def test_a_group_covers_its_keys_and_no_longer_name():
    assert covers("link", "link") and covers("link", "link.gbps") and not covers("link", "linked.gbps")
