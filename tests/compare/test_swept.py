"""A comparison studies what its sweep varied, whatever that is; what nobody swept is refused as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidestream.compare.arms import Comparison, compare
from sidestream.compare.errors import CompareError
from sidestream.compare.figures import figures
from sidestream.compare.runs import read_folders
from sidestream.launch import arguments
from sidestream.tracking.sweep import group_of, typed
from tests.compare.folders import write_run
from tests.docs.pages import script


def job(sweep: Path, overrides: list[str], **written: Any) -> Path:
    """A job of a sweep, with what train.py leaves of its command line."""
    sweep.mkdir(exist_ok=True)
    (sweep / "multirun.yaml").touch()
    seed = next((int(part[5:]) for part in overrides if part.startswith("seed=")), 1)
    folder = write_run(sweep / str(len(list(sweep.iterdir()))), seed=seed, **written)
    (folder / ".hydra" / "launch.json").write_text(json.dumps({"overrides": overrides}))
    return folder


def compared(*folders: Path) -> Comparison:
    runs, left_out = read_folders(folders)
    return compare(runs, left_out=left_out)


def balance(option: str, rate: float | None = None) -> dict[str, Any]:
    keys = {"balance.update_rate": rate} if rate else {"balance.coefficient": 0.01}
    return {"choices": {"balance": option}, "config": keys}


SWEEPS: dict[str, list[tuple[list[str], dict[str, Any]]]] = {
    "router": [
        ([f"router={name}"], {"choices": {"router": name}, "config": {"router.top_k": 2}})
        for name in ("softmax", "sigmoid")
    ],
    "balance": [(["balance=aux_loss"], balance("aux_loss")), (["balance=bias"], balance("bias", 1e-3))],
    "optimizer.lr": [([f"optimizer.lr={lr}"], {"config": {"optimizer.lr": lr}}) for lr in (0.01, 0.001)],
    # Keys that follow from the one that was swept are not what the arms are called.
    "model.hidden_size": [
        (
            [f"model.hidden_size={size}"],
            {"config": {"model.hidden_size": size, "model.ffn_hidden_size": 4 * size}},
        )
        for size in (32, 64)
    ],
    "model": [
        (
            [f"model={name}"],
            {"choices": {"model": name}, "config": {"model.num_layers": n, "router.top_k": n}},
        )
        for name, n in (("tiny", 4), ("small", 8))
    ],
    # Facts that follow from a key.
    "trainer.devices": [
        ([f"trainer.devices={n}"], {"config": {"trainer.devices": n}, "result": {"world_size": n}})
        for n in (1, 2)
    ],
    "trainer.precision": [
        ([f"trainer.precision={p}"], {"config": {"trainer.precision": p}, "result": {"precision": p}})
        for p in ("32-true", "bf16-mixed")
    ],
    "trainer.max_steps": [
        ([f"trainer.max_steps={n}"], {"config": {"trainer.max_steps": n}, "result": {"metrics.tokens": 100 * n}})
        for n in (20, 40)
    ],
    "data": [
        ([f"data={d}"], {"choices": {"data": d}, "config": {"data.name": d}, "result": {"data_checksum": d}})
        for d in ("python", "text")
    ],
    "arm": [
        ([f"arm={a}"], {"choices": {"arm": a, "overlap": o}, "config": {"model.num_layers": n}})
        for a, o, n in (("scmoe_pos1", "shortcut", 4), ("plain", "none", 8))
    ],
}  # fmt: skip


@pytest.mark.parametrize("key", SWEEPS)
@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_arms_are_what_was_swept(tmp_path: Path, key: str, seeds: tuple[int, ...]) -> None:
    for overrides, written in SWEEPS[key]:
        for seed in seeds:
            job(tmp_path / "s", ["name=x", *overrides, f"seed={seed}"], **written)
    found = compared(tmp_path / "s")
    values = [overrides[0].partition("=")[2] for overrides, _ in SWEEPS[key]]
    assert [arm.values[key] for arm in found.arms] == values
    assert key in found.title and ("also differ" in found.title) == (key == "arm")
    assert all([run.seed for run in arm.runs] == list(seeds) for arm in found.arms)
    if key not in ("arm", "model"):
        assert [arm.name for arm in found.arms] == [f"{key}={value}" for value in values]
    assert len(figures(found)) == 2


def test_several_keys_and_places_that_nobody_studies(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        for k in (1, 2):
            job(
                tmp_path / "s",
                [f"optimizer.lr={lr}", f"router.top_k={k}", f"paths.log_dir=/{lr}{k}"],
                config={"optimizer.lr": lr, "router.top_k": k, "paths.log_dir": f"/{lr}{k}"},
            )
    found = compared(tmp_path / "s")
    assert found.arms[0].name == "optimizer.lr=0.1 router.top_k=1" and len(found.arms) == 4


def test_seeds_alone_are_compared_with_each_other(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        job(tmp_path / "s", [f"seed={seed}"])
    found = compared(tmp_path / "s")
    assert [arm.name for arm in found.arms] == ["seed=1", "seed=2", "seed=3"]
    assert all(figure.differences["val_loss"] is None for figure in figures(found))


@pytest.mark.parametrize(
    ("fact", "values"),
    [("commit", ("a", "b")), ("transport", ("torch", "nccl")), ("device", ("cpu", "cuda"))],
)
def test_what_was_not_swept_is_refused_by_name(tmp_path: Path, fact: str, values: tuple[str, str]) -> None:
    for rate, value in zip((0.1, 0.2), values):
        job(tmp_path / "s", [f"optimizer.lr={rate}"], config={"optimizer.lr": rate}, result={fact: value})
    with pytest.raises(CompareError) as refused:
        compared(tmp_path / "s")
    assert [line.partition("=")[0] for line in refused.value.lines] == [fact]


def test_two_sweeps_may_not_differ_in_what_neither_varied(tmp_path: Path) -> None:
    for sweep, layers in (("s", 4), ("t", 8)):
        for rate in (0.1, 0.2) if sweep == "s" else (0.3, 0.4):
            config = {"optimizer.lr": rate, "model.num_layers": layers}
            job(tmp_path / sweep, [f"optimizer.lr={rate}", f"model.num_layers={layers}"], config=config)
    with pytest.raises(CompareError, match=r"model\.num_layers=8"):
        compared(tmp_path / "s", tmp_path / "t")


def test_runs_of_no_sweep_are_compared_as_before(tmp_path: Path) -> None:
    for place, rate in enumerate((0.1, 0.2)):
        folder = write_run(tmp_path / str(place), config={"optimizer.lr": rate})
        (folder / ".hydra" / "launch.json").write_text(json.dumps({"overrides": [f"optimizer.lr={rate}"]}))
    with pytest.raises(CompareError, match=r"optimizer.lr=0.2"):
        compared(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"overrides": 3}', '{"overrides": [1, {}]}'])
def test_a_launch_file_that_cannot_be_read_makes_nothing_swept(tmp_path: Path, content: str) -> None:
    for overlap in ("none", "chunked"):
        folder = job(tmp_path / "s", [f"overlap={overlap}"], choices={"overlap": overlap})
        (folder / ".hydra" / "launch.json").write_text(content)
    assert len(compared(tmp_path / "s").arms) == 2


def test_the_script_needs_no_flag_for_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, written in SWEEPS["balance"]:
        job(tmp_path / "s", overrides, **written)
    assert script("scripts/compare.py").main([str(tmp_path / "s"), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("Comparison of balance\n")


# Names


def test_names_of_jobs_tell_what_was_swept_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    typed_words = [
        "-m",
        "trusted_targets=[my_pkg]",
        "optimizer.lr=0.1,0.2",
        "data.files=[a, b]",
        "router.top_k=1,2",
    ]
    monkeypatch.setattr("sys.argv", ["train.py", *typed_words, "name=x"])
    of_job = ["trusted_targets=[my_pkg]", "optimizer.lr=0.1", "data.files=[a,b]", "router.top_k=2", "name=x"]
    assert arguments.job_label(of_job) == "lr-0.1_top_k-2"
    assert arguments.job_label(["paths.log_dir=/x", "resume=y", "logger.tags=[a]", "seed=3"]) == "seed-3"


def test_no_name_ends_in_the_middle_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    label = arguments.job_label([f"model.key_{n}={'v' * 20}" for n in range(10)])
    assert len(label) <= arguments.LONGEST_NAME and label.endswith("_...")
    assert label.count("v" * 20) == label.count("key_") > 2


def test_a_group_has_a_name_and_a_date(tmp_path: Path) -> None:
    sweep = tmp_path / "logs" / "lr" / "multiruns" / "2026-11-30" / "12-22-34-001"
    sweep.mkdir(parents=True)
    assert group_of(sweep, "lr") is None and typed(sweep) == []
    (sweep / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": ["seed=1,2", 3]}}}))
    assert group_of(sweep, "lr") == "lr-2026-11-30-12-22-34-001" and typed(sweep) == ["seed=1,2"]
    own = tmp_path / "mine"
    own.mkdir()
    (own / "multirun.yaml").write_text("[")
    assert group_of(own, "lr") == "lr-mine" and typed(own) == []


def test_what_hydra_writes_in_another_way_was_not_swept():
    typed = ["trainer.pin_cpu=false", "optimizer.lr=1e-3", "data.files=[ a, b ]", "seed=1,2"]
    of_job = ["trainer.pin_cpu=False", "optimizer.lr=0.001", "data.files=[a,b]", "seed=1"]
    assert arguments.swept(of_job, typed) == ["seed=1"]
