"""The study's record, its claim and its picture, on made-up runs."""

import json
from pathlib import Path

import pytest

from sidestream.compare.errors import CompareError
from tests.compare.folders import write_run
from tests.docs.pages import script

quality = script("tools/render_readme.py").quality

MATRIX = {
    "runs": [
        {
            "schedule": name,
            "compute": "real",
            "asked_comm_share": 0.3,
            "ms": {"serial": 100.0, "overlapped": ms},
        }
        for name, ms in {"chunked": 80.0, "shortcut": 70.0}.items()
    ]
}


def study(folder: Path, shifts: dict[str, float], *, seeds: int = 4) -> dict:
    for arm, shift in shifts.items():
        for seed in range(1, seeds + 1):
            loss = 1.6 + 0.01 * seed + shift * (1 + 0.1 * (-1) ** seed)
            metrics = {
                "metrics.val_loss": loss,
                "params_total": 9,
                "flops_per_token": 1e6,
                "choices.arm": arm,
            }
            write_run(folder / f"{arm}-{seed}", seed=seed, result=metrics)
    return quality.collect([folder], commands=["python train.py -m experiment=scmoe_quality"])


@pytest.mark.parametrize(
    ("shift", "verdict"), [(0.001, "is not worse than"), (0.05, "is not shown to be no worse")]
)
def test_the_claim_is_about_the_end_of_the_interval(shift: float, verdict: str, tmp_path: Path) -> None:
    record = study(tmp_path, {"scmoe_shared": 0.0, "scmoe_pos1": shift, "scmoe_pos2": shift})
    found = quality.difference(record, "scmoe_pos1")
    assert found is not None and found.mean == pytest.approx(shift) and found.n == 4
    page = quality.markdown(record)
    assert f"`scmoe_pos1` {verdict}" in page and "4 of 12 planned pairs: this is not the result yet" in page
    assert "| `scmoe_shared` | 4 of 12 | 9 | 1.00 M |" in page


def test_one_pair_claims_nothing(tmp_path: Path) -> None:
    record = study(tmp_path, {"scmoe_shared": 0.0, "scmoe_pos1": 0.0}, seeds=1)
    assert quality.not_worse(quality.difference(record, "scmoe_pos1")) is None
    assert "`scmoe_pos1`: no pairs yet." in quality.markdown(record)


def test_runs_of_another_code_or_a_seed_twice_are_refused(tmp_path: Path) -> None:
    study(tmp_path / "one", {"scmoe_shared": 0.0})
    with pytest.raises(CompareError, match="each seed of an arm once"):
        quality.collect([tmp_path / "one", tmp_path / "one"], commands=[])
    write_run(tmp_path / "two" / "x", seed=9, result={"choices.arm": "scmoe_pos1", "commit": "other"})
    with pytest.raises(CompareError, match=r"^commit=other: "):
        quality.collect([tmp_path / "one", tmp_path / "two"], commands=[])


def test_the_picture_has_a_point_per_schedule(tmp_path: Path) -> None:
    record = study(tmp_path, {"scmoe_shared": 0.0, "scmoe_pos2": 0.004})
    quality.draw(json.loads(json.dumps(record)), MATRIX, tmp_path / "q.png")
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
