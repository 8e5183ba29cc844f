"""Training runs with the state that routing has: random numbers of jitter, beta of quantile balancing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sidestream.lightning.checkpoint import checkpoints
from tests.train.fit import fit, losses, tensors

STATEFUL = [
    "router=sigmoid",
    "router.jitter=0.1",
    "router.expert_capacity_factor=1.25",
    "balance=quantile",
    "balance.ema=0.5",
    "balance.z_loss_coefficient=1e-3",
    "data.micro_batch_size=2",
]


def test_resume_with_jitter_and_quantiles_is_bit_identical(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    fit(straight, *STATEFUL, "callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.keep_last=5")
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000006")
    saved = tensors(checkpoints(resumed)[-1])
    bias = saved["state_dict.model.blocks.1.moe.selection_bias"]
    assert bias.dtype == torch.float32 and bias.abs().max() > 1e-4
    fit(resumed, *STATEFUL, f"resume={resumed}")
    assert losses(resumed) == losses(straight)
    a, b = (tensors(checkpoints(run)[-1]) for run in (straight, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "overrides",
    [
        ["router.score_order=after_top_k", "balance.scope=global", "data.micro_batch_size=1"],
        ["router=sigmoid", "router.num_groups=2", "router.top_groups=2", "balance=bias"],
        ["router=sqrtsoftplus", "router.expert_capacity_factor=1.0", "router.pad_to_capacity=true"],
        ["router.expert_capacity_factor=1.0", "router.drop_policy=position", "trainer.precision=bf16-mixed"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_run_with_each_option(overrides: list[str], tmp_path: Path) -> None:
    results = fit(tmp_path, *overrides, "trainer.max_steps=3")
    assert all(result["status"] == "finished" and not result["changes_model"] for result in results)


def test_forced_balance_says_so_in_the_result(tmp_path: Path) -> None:
    results = fit(tmp_path, "router.force_balance=true", "balance=none", "trainer.max_steps=2")
    assert all(result["changes_model"] for result in results)
