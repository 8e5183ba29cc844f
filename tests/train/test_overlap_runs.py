"""Whole runs under a schedule: what a checkpoint may be resumed with, bit for bit, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.lightning.checkpoint import checkpoints
from sidestream.lightning.fits import check_facts
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from tests.train.fit import fit, losses, tensors

STATEFUL = ["balance=bias", "balance.update_rate=0.01", "model.dropout=0.1", "data.micro_batch_size=2"]
SAVING = ["callbacks.checkpoint.every_n_steps=4", "callbacks.checkpoint.keep_last=5"]
# The slot is measured in the first three of six steps, so step 4 on runs overlapped, wherever the experts are.
SHORTCUT = ["overlap=shortcut", "overlap.mix=cg1", "overlap.post_norm=true", "dispatcher=nccl_ep"]


@pytest.fixture(scope="module")
def shortcut_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 steps on 2 ranks, with a checkpoint at 4."""
    folder = tmp_path_factory.mktemp("shortcut")
    results = fit(folder, *STATEFUL, *SHORTCUT, *SAVING)
    assert results[0]["status"] == "finished" and results[0]["changes_model"]
    return folder


def resumed_copy(run: Path, folder: Path) -> Path:
    """A copy of a run as it was at step 4."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    return folder


def assert_same_run(a: Path, b: Path) -> None:
    assert losses(a) == losses(b)
    first, second = tensors(checkpoints(a)[-1]), tensors(checkpoints(b)[-1])
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "switches",
    [
        ["overlap.enabled=false"],
        ["overlap.delay_wgrad=true", "overlap.slot=0"],
    ],
    ids=" ".join,
)
@pytest.mark.sample(1)
def test_resumed_serially_late_or_from_another_slot_a_run_is_the_same(
    shortcut_run: Path, switches: list[str], tmp_path: Path
) -> None:
    folder = resumed_copy(shortcut_run, tmp_path / "resumed")
    fit(folder, *STATEFUL, *SHORTCUT, *switches, f"resume={folder}")
    assert_same_run(folder, shortcut_run)


def test_a_checkpoint_of_a_shortcut_refuses_another_model(shortcut_run: Path, tmp_path: Path) -> None:
    folder = resumed_copy(shortcut_run, tmp_path / "resumed")
    with pytest.raises(AssertionError) as refused:
        fit(folder, *STATEFUL, "dispatcher=nccl_ep", f"resume={folder}")
    text = str(refused.value)
    names = "shortcut auto cg1 tap_norm post_norm there and plain here"
    why = f"was trained under an overlap or router.force_balance that computes another model: {names}"
    assert text.count(why) >= 2  # on both ranks, before they exchange anything
    assert "overlap.enabled=false is the same model" in text


def load(saved: Any, present: Any) -> None:
    """What is compared when a checkpoint of one schedule is loaded under another."""
    facts = [
        {"format": 1, "data_checksum": "text", "changes_model": one.changes_model, "function": one.function}
        for one in (saved, present)
    ]
    check_facts(Path("run/checkpoints/step-1"), *facts)


PLAIN = [SharedExpertOverlap(), ChunkedOverlap(num_chunks=3), TwoBatchOverlap(enabled=False)]
MODELS = [
    PLAIN[0],
    ShortcutOverlap(),
    ShortcutOverlap(tap="pos1"),
    ShortcutOverlap(tap="pos2"),
    ShortcutOverlap(tap="pos3"),
    ShortcutOverlap(mix="cg1"),
    ShortcutOverlap(mix="cg2"),
    ShortcutOverlap(tap_norm=False),
    ShortcutOverlap(post_norm=True),
    ShortcutOverlap(double_gating=True),
]


def test_every_pair_of_different_models_is_refused_and_the_same_is_taken() -> None:
    for saved in MODELS:
        for present in MODELS:
            if saved is present:
                load(saved, present)
                continue
            with pytest.raises(ValueError, match=r"overlap\.enabled=false is the same model"):
                load(saved, present)


def test_switches_that_change_no_number_are_taken() -> None:
    for saved in PLAIN:
        for present in PLAIN:
            load(saved, present)
    load(ShortcutOverlap(slot=1), ShortcutOverlap(slot="auto", enabled=False, delay_wgrad=True))


@pytest.mark.full
def test_a_plain_run_goes_on_under_a_schedule_of_the_same_model(tmp_path: Path) -> None:
    """Of the three such schedules one is bit-identical."""
    whole, folder = tmp_path / "whole", tmp_path / "resumed"
    assert not fit(whole, *STATEFUL, *SAVING)[0]["changes_model"]
    resumed_copy(whole, folder)
    fit(folder, *STATEFUL, "overlap=shared_expert", "overlap.delay_wgrad=true", f"resume={folder}")
    assert_same_run(folder, whole)
