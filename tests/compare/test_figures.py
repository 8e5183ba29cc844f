"""The figures: equal tokens, pairs, warm-up left out, exposed communication; and what is said about them."""

from pathlib import Path
from typing import Any

import pytest

from sidestream.compare.arms import Comparison, compare
from sidestream.compare.figures import WARMUP_STEPS, Figures, curve, equal_tokens, figures, remarks
from sidestream.compare.runs import read_folders
from sidestream.lightning import recorder
from sidestream.tracking import names
from tests.compare.folders import losses, write_run, write_sweep


def both(folder: Path, **options: Any) -> tuple[Comparison, list[Figures]]:
    runs, left_out = read_folders([folder])
    found = compare(runs, left_out=left_out, **options)
    return found, figures(found)


def test_the_warm_up_is_the_recorders():
    assert WARMUP_STEPS == recorder.WARMUP_STEPS


def test_differences_are_paired_by_seed_and_have_intervals(tmp_path: Path):
    _, (none, chunked) = both(write_sweep(tmp_path))
    assert none.differences["val_loss"] is None
    found = chunked.differences["val_loss"]
    # 0.06, 0.07 and 0.08 lower: mean 0.07, standard deviation 0.01, t = 4.303 for two degrees of freedom.
    assert found.mean == pytest.approx(-0.07) and found.n == 3
    assert found.high - found.mean == pytest.approx(4.302653 * 0.01 / 3**0.5, abs=1e-6)
    assert chunked.flat["val_loss_low"] == found.low and chunked.flat["val_loss_pairs"] == 3
    assert chunked.flat["val_loss"] == pytest.approx(
        sum(losses(s, -0.05 - 0.01 * s)[2000] for s in (1, 2, 3)) / 3
    )
    assert chunked.differences["train_loss"].mean == pytest.approx(-0.07)


def test_losses_are_compared_at_tokens_that_all_runs_have(tmp_path: Path):
    write_run(tmp_path / "0")
    fewer = {tokens: loss for tokens, loss in losses(1, -1.0).items() if tokens <= 1000}
    write_run(tmp_path / "1", choices={"overlap": "chunked"}, val=fewer)
    found, (none, chunked) = both(tmp_path)
    assert equal_tokens(found, names.VAL_LOSS) == 1000
    assert none.flat["val_loss"] == losses(1)[1000] and none.flat["val_loss_tokens"] == 1000
    assert chunked.flat["val_loss_difference"] == pytest.approx(-1.0)
    assert chunked.flat["train_loss_tokens"] == 2000
    assert any("at 1,000 training tokens" in line for line in remarks(found, figures(found)))


def test_no_common_validation_is_no_comparison_of_losses(tmp_path: Path):
    write_run(tmp_path / "0", val={500: 4.0})
    write_run(tmp_path / "1", choices={"overlap": "chunked"}, val={1000: 3.0})
    found, (_, chunked) = both(tmp_path)
    assert chunked.flat["val_loss"] is None and chunked.differences["val_loss"] is None
    assert any(
        line.startswith("No validation at a number of tokens") for line in remarks(found, figures(found))
    )


def test_one_seed_has_no_interval_and_proves_nothing(tmp_path: Path):
    found, (_, chunked) = both(write_sweep(tmp_path, seeds=(1,)))
    assert chunked.flat["val_loss_difference"] == pytest.approx(-0.06)
    assert chunked.flat["val_loss_low"] is None and chunked.flat["val_loss_sd"] is None
    assert any(line.startswith("One seed proves nothing") for line in remarks(found, figures(found)))


def test_times_leave_the_warm_up_out_and_have_quartiles(tmp_path: Path):
    _, (none, chunked) = both(write_sweep(tmp_path))
    # Records after the warm-up: 9, 10 and 11 ms.
    assert [none.flat[key] for key in ("step_ms_q1", "step_ms", "step_ms_q3")] == [9.5, 10.0, 10.5]
    assert none.flat["tokens_per_second"] == pytest.approx(1e4)
    assert none.flat["tokens_per_second_ratio"] is None
    assert chunked.flat["tokens_per_second_ratio"] == pytest.approx(10 / 9)


def test_without_records_behind_the_warm_up_the_result_is_taken(tmp_path: Path):
    _, (none, _) = both(write_sweep(tmp_path / "a"))
    for folder in (tmp_path / "a").iterdir():
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines[:2]))
    _, (none, _) = both(tmp_path / "a")
    assert (none.flat["step_ms"], none.flat["step_ms_q1"]) == (1.0, None)
    assert none.flat["tokens_per_second"] == 1.0


def test_exposed_is_what_exchanges_add_to_compute(tmp_path: Path):
    _, (none, _) = both(write_sweep(tmp_path))
    assert (none.flat["exposed_ms"], none.flat["exposed_share"]) == (2.0, 0.25)
    assert (none.flat["e_hide"], none.flat["e_hide_bound"]) == (0.5, 0.8)


def test_drops_and_replays_are_totals(tmp_path: Path):
    _, (none, _) = both(write_sweep(tmp_path))
    assert (none.flat["dropped"], none.flat["replays"]) == (9, 6)
    assert (none.flat["bytes_on_wire"], none.flat["mfu"], none.flat["peak_memory_bytes"]) == (
        5e6,
        0.25,
        2**20,
    )


def test_curves_have_the_spread_of_the_seeds(tmp_path: Path):
    found, _ = both(write_sweep(tmp_path))
    drawn = curve(found.baseline, names.VAL_LOSS)
    assert drawn.tokens == (500, 1000, 1500, 2000)
    assert (drawn.low[-1], drawn.high[-1]) == (losses(1)[2000], losses(3)[2000])
    assert drawn.mean[-1] == pytest.approx(losses(2)[2000])


def test_a_schedule_that_changes_the_model_is_said(tmp_path: Path):
    found, all_figures = both(write_sweep(tmp_path, overlaps=("none", "shortcut")))
    assert any(line.startswith("† computes another function") for line in remarks(found, all_figures))
    assert any("separate runs" in line for line in remarks(found, all_figures))
    assert any("not corrected for the number of arms" in line for line in remarks(found, all_figures))
