"""Finding and reading runs: what is left out is listed, with the reason."""

from pathlib import Path

import pytest

from sidestream.compare.errors import CompareError
from sidestream.compare.runs import MEASUREMENT, TRAINING, flatten, read_folders
from tests.compare.folders import write_run, write_sweep


def test_a_sweep_is_read_in_the_order_of_its_jobs(tmp_path: Path):
    for job in (0, 2, 10):
        write_run(tmp_path / f"{job}-x", seed=job)
    runs, left_out = read_folders([tmp_path])
    assert [run.name for run in runs] == ["0-x", "2-x", "10-x"] and not left_out
    assert [run.seed for run in runs] == [0, 2, 10]
    assert runs[0].kind == TRAINING and len(runs[0].metrics) == 8


def test_a_folder_given_twice_is_one_run(tmp_path: Path):
    write_run(tmp_path / "a")
    runs, _ = read_folders([tmp_path, tmp_path / "a"])
    assert len(runs) == 1


def test_equal_names_are_told_apart(tmp_path: Path):
    write_run(tmp_path / "one" / "0"), write_run(tmp_path / "two" / "0", seed=2)
    runs, _ = read_folders([tmp_path])
    assert [run.name for run in runs] == ["one/0", "two/0"]


def test_long_names_are_cut_where_they_stay_apart(tmp_path: Path):
    write_run(tmp_path / f"0-{'x' * 80}"), write_run(tmp_path / f"1-{'x' * 80}", seed=2)
    runs, _ = read_folders([tmp_path])
    assert [run.name for run in runs] == [f"{job}-{'x' * 55}..." for job in (0, 1)]
    write_run(tmp_path / f"0-{'x' * 80}y", seed=3)
    runs, _ = read_folders([tmp_path])
    assert runs[0].name == f"0-{'x' * 80}"


def test_unfinished_runs_are_left_out_with_the_reason(tmp_path: Path):
    write_sweep(tmp_path)
    write_run(tmp_path / "7", status="failed")
    write_run(tmp_path / "8", status="interrupted", result={"error": None})
    (write_run(tmp_path / "9") / "result.json").unlink()
    (write_run(tmp_path / "10") / "result.json").write_text("{")
    (write_run(tmp_path / "11") / ".hydra" / "resolved.yaml").unlink()
    runs, left_out = read_folders([tmp_path])
    assert len(runs) == 6
    reasons = {item.name: item.reason for item in left_out}
    assert reasons["7"] == "status failed: ValueError: it broke"
    assert reasons["8"] == "status interrupted"
    assert reasons["9"].startswith("no result.json")
    assert reasons["10"].startswith("result.json: no JSON")
    assert reasons["11"].startswith("no .hydra/resolved.yaml")


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_runs_is_refused(tmp_path: Path, there: bool):
    folder = tmp_path / "empty"
    if there:
        folder.mkdir()
    with pytest.raises(CompareError, match="there is no run in it" if there else "no such folder"):
        read_folders([folder])


def test_a_measurement_of_overlap_is_known_by_its_config(tmp_path: Path):
    write_run(tmp_path / "m", config={"measure.rounds": 3}, picture="overlap.svg")
    (run,), _ = read_folders([tmp_path])
    assert run.kind == MEASUREMENT and run.picture == tmp_path / "m" / "overlap.svg"


def test_keys_are_dotted():
    assert flatten({"a": {"b": {"c": 1}, "d": []}, "e": None}) == {"a.b.c": 1, "a.d": [], "e": None}
