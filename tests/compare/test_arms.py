"""Arms, their names and the baseline."""

from pathlib import Path
from typing import Any

import pytest

from sidestream.compare.arms import Comparison, compare
from sidestream.compare.errors import CompareError
from sidestream.compare.runs import read_folders
from tests.compare.folders import write_run, write_sweep


def comparison(folder: Path, **options: Any) -> Comparison:
    runs, left_out = read_folders([folder])
    return compare(runs, left_out=left_out, **options)


def test_seeds_are_repetitions(tmp_path: Path):
    found = comparison(write_sweep(tmp_path))
    assert [(arm.name, [run.seed for run in arm.runs]) for arm in found.arms] == [
        ("overlap=none", [1, 2, 3]),
        ("overlap=chunked", [1, 2, 3]),
    ]
    assert found.baseline.name == "overlap=none" and found.studied == ("overlap",)


def test_keys_of_a_studied_group_make_arms(tmp_path: Path):
    for number, factor in enumerate((None, 1.5, 2.0)):
        choices = {"dispatcher": "alltoall" if factor is None else "nccl_ep"}
        write_run(tmp_path / str(number), choices=choices, config={"dispatcher.capacity_factor": factor})
    assert [arm.name for arm in comparison(tmp_path).arms] == [
        "dispatcher=alltoall dispatcher.capacity_factor=null",
        "dispatcher=nccl_ep dispatcher.capacity_factor=1.5",
        "dispatcher=nccl_ep dispatcher.capacity_factor=2.0",
    ]
    assert comparison(tmp_path).title == "Comparison of dispatcher"
    assert comparison(tmp_path, baseline="dispatcher.capacity_factor=2.0").baseline.runs[0].name == "2"


def test_a_key_that_only_one_option_has_is_part_of_the_option(tmp_path: Path):
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", choices={"overlap": "chunked"}, config={"overlap.num_chunks": 2})
    assert [arm.name for arm in comparison(tmp_path).arms] == ["overlap=none", "overlap=chunked"]
    write_run(tmp_path / "2", choices={"overlap": "chunked"}, config={"overlap.num_chunks": 4})
    assert [arm.name for arm in comparison(tmp_path).arms] == [
        "overlap=none",
        "overlap=chunked overlap.num_chunks=2",
        "overlap=chunked overlap.num_chunks=4",
    ]


def test_another_study(tmp_path: Path):
    for number, size in enumerate((64, 128)):
        write_run(tmp_path / str(number), config={"model.hidden_size": size})
    with pytest.raises(CompareError, match=r"^model\.hidden_size=128"):
        comparison(tmp_path)
    assert comparison(tmp_path, studied=["model"]).title == "Comparison of model.hidden_size"


@pytest.mark.parametrize(
    ("baseline", "arms"), [("overlap=shortcut", 0), ("dispatcher=alltoall", 2), ("overlop=none", 0)]
)
def test_a_baseline_is_one_arm(baseline: str, arms: int, tmp_path: Path):
    write_sweep(tmp_path)
    assert (
        comparison(tmp_path, baseline="overlap=chunked dispatcher=alltoall").baseline.name
        == "overlap=chunked"
    )
    with pytest.raises(CompareError, match=rf"^baseline={baseline}: {arms} arms have these choices"):
        comparison(tmp_path, baseline=baseline)


def test_two_runs_of_one_arm_and_seed_are_refused(tmp_path: Path):
    write_sweep(tmp_path)
    write_run(tmp_path / "again", seed=2)
    with pytest.raises(
        CompareError, match=r"^seed=2: arm 'overlap=none' has two runs with it, .* and again;"
    ):
        comparison(tmp_path)


def test_one_arm_is_no_comparison(tmp_path: Path):
    write_run(tmp_path / "0"), write_run(tmp_path / "1", choices={"overlap": "chunked"}, status="failed")
    with pytest.raises(CompareError) as refused:
        comparison(tmp_path)
    assert "do not differ in any of it" in refused.value.lines[0]
    assert refused.value.lines[1].startswith("left out: 1: status failed")


def test_nothing_finished(tmp_path: Path):
    write_run(tmp_path / "0", status="failed")
    with pytest.raises(CompareError, match="no finished run is left"):
        comparison(tmp_path)


def test_measurements_illustrate_the_arm_of_their_choices(tmp_path: Path):
    write_sweep(tmp_path / "train")
    measured = {"config": {"measure.rounds": 3, "model.hidden_size": 128}, "picture": "overlap.svg"}
    write_run(tmp_path / "measured" / "m1", choices={"overlap": "chunked"}, **measured)
    write_run(tmp_path / "measured" / "m2", choices={"overlap": "shortcut"}, **measured)
    found = comparison(tmp_path)
    none, chunked = found.arms
    assert none.illustration is None and chunked.illustration.name == "m1"
    assert chunked.caveat == "model.hidden_size=128"
    assert [(item.name, item.reason) for item in found.left_out] == [
        ("m2", "a measurement of overlap that illustrates no arm")
    ]


def test_measurements_alone_are_compared(tmp_path: Path):
    for number, overlap in enumerate(("none", "chunked")):
        write_run(
            tmp_path / str(number),
            choices={"overlap": overlap},
            config={"measure.rounds": 3},
            result={"metrics": {}, "data_checksum": None},
            val={},
        )
        (tmp_path / str(number) / "metrics.jsonl").unlink()
    found = comparison(tmp_path)
    assert len(found.arms) == 2 and not found.notes
