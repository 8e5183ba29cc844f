"""`callbacks.overlap_report`: it measures during training and changes nothing in it."""

import json
from pathlib import Path

import pytest
import torch

from sidestream import run
from sidestream.config.errors import ConfigError
from sidestream.tracking import names
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.result import OverlapResult, RunResult
from tests.train.fit import compose_run, fit, losses, tensors

# Everything a measurement could disturb: random numbers in the model, load statistics, a static budget, bytes.
BUSY = [
    "overlap=shortcut",
    "dispatcher=nccl_ep",
    "dispatcher.capacity_factor=1.1",
    "link=throttled",
    "link.gbps=1",
    "model.dropout=0.1",
    "router.jitter=0.1",
    "balance=bias",
    "balance.z_loss_coefficient=0.01",
    "data.micro_batch_size=2",
    "trainer.max_steps=5",
    "callbacks.checkpoint.every_n_steps=5",
]


@pytest.mark.full
def test_a_run_is_bit_identical_with_and_without_it(tmp_path: Path):
    off = fit(tmp_path / "off", *BUSY)[0]
    on = fit(tmp_path / "on", *BUSY, "callbacks.overlap_report.every_n_steps=2", "logger=csv")[0]
    assert losses(tmp_path / "on") == losses(tmp_path / "off")
    before, after = (tensors(tmp_path / name / "checkpoints" / "step-00000005") for name in ("off", "on"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    meta = [
        torch.load(tmp_path / name / "checkpoints" / "step-00000005" / "meta.pt", weights_only=True)[
            "sidestream"
        ]
        for name in ("off", "on")
    ]
    assert all(torch.equal(a["cpu"], b["cpu"]) for a, b in zip(*(m["rng"] for m in meta)))
    assert on["overflow"] == off["overflow"]
    for name in ("bytes_on_wire", "train_loss", "val_loss", "tokens"):
        assert on["metrics"][name] == off["metrics"][name], name
    skipped = {names.STEP, names.TOKENS}
    records = [
        record for record in RunFolder(tmp_path / "on").read_metrics() if names.OVERLAP_E_HIDE in record
    ]
    assert [record[names.STEP] for record in records] == [2, 4]
    assert all(record.keys() - skipped == set(names.OVERLAP) for record in records)
    # result.json holds the last report.
    assert set(on["overlap"]) == {name.rpartition("/")[2] for name in names.OVERLAP}
    assert on["overlap"] == {name.rpartition("/")[2]: records[-1][name] for name in names.OVERLAP}
    assert on["overlap"]["serial_ms"] > 0 and on["overlap"]["bound"] > 0
    assert set(off["overlap"].values()) == {None}
    (table,) = (tmp_path / "on" / "csv").rglob("metrics.csv")
    assert names.OVERLAP_E_HIDE in table.read_text().splitlines()[0]
    saved = json.loads((tmp_path / "on" / "result.json").read_text())
    assert saved["overlap"] == on["overlap"]


@pytest.mark.parametrize(
    ("overlap", "measured", "shown"),
    [("shortcut", True, True), ("shortcut", False, False), ("none", True, False)],
)
def test_a_run_says_at_its_end_what_it_measured(overlap: str, measured: bool, shown: bool):
    figures = (
        OverlapResult(serial_ms=105.0, overlapped_ms=65.0, e_hide=0.9, bound=1.0)
        if measured
        else OverlapResult()
    )
    line = run._overlap_line(RunResult(status="finished", choices={"overlap": overlap}, overlap=figures))
    wanted = "overlap of one MoE unit: 105.0 ms serial, 65.0 ms overlapped; E_hide 0.90, at most 1.00"
    assert line == (f"{wanted} with this schedule" if shown else None)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["strategy=fully_shard"], "strategy=replicate"),
        (["strategy.expert_parallel_size=1"], "callbacks.overlap_report.every_n_steps=null"),
        (["dispatcher=nccl_ep", "dispatcher.transport=library"], "dispatcher.transport"),
    ],
)
def test_what_it_cannot_measure_is_refused_before_the_run(overrides: list[str], fix: str):
    with pytest.raises(ConfigError, match=fix):
        compose_run([*overrides, "callbacks.overlap_report.every_n_steps=1"], world=2)
