"""`fusion=mega` in training: the run that dispatcher and grouped experts make, through every part of the system."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.lightning.checkpoint import checkpoints
from tests.train.fit import assert_same_run, fit, losses, tensors

STATEFUL = [
    "balance=bias",
    "balance.update_rate=0.01",
    "router.jitter=0.05",
    "model.dropout=0.1",
    "trainer.gradient_clip_val=0.5",
    "callbacks.checkpoint.keep_last=9",
]


def assert_close_run(a: Path, b: Path, *, tolerance: float = 2e-5) -> None:
    """Losses and weights up to fp32 rounding: sums over k and over tokens in another order.

    Adam divides by the size of a gradient, so weights whose gradient is rounding alone may take a step of any sign:
    they are compared by the mean.
    """
    first, second = losses(a), losses(b)
    assert first.keys() == second.keys()
    assert all(abs(first[step] - second[step]) <= tolerance * first[step] for step in first)
    one, other = tensors(checkpoints(a)[-1]), tensors(checkpoints(b)[-1])
    assert one.keys() == other.keys()
    for name, value in one.items():
        if name.startswith("model") and value.is_floating_point():
            assert (value - other[name]).abs().mean() <= 1e-4 * value.abs().mean() + 1e-6, name


@pytest.mark.parametrize(
    ("options", "world"),
    [
        pytest.param([], 2, marks=pytest.mark.full),
        (["overlap=shortcut", "overlap.slot=1", "trainer.precision=bf16-mixed"], 2),
        pytest.param(["overlap=two_batch", "strategy=fully_shard"], 2, marks=pytest.mark.full),
        (["overlap=shared_expert", "data.micro_batch_size=2", "model.activation_checkpointing=true"], 2),
        pytest.param(["strategy.expert_parallel_size=1"], 2, marks=pytest.mark.full),
        (["strategy.expert_parallel_size=1", "strategy=fully_shard", "trainer.precision=bf16-mixed"], 2),
        pytest.param(
            ["router.expert_capacity_factor=1.0", "router.pad_to_capacity=true"], 1, marks=pytest.mark.full
        ),
    ],
    ids=lambda value: (
        "-".join(part.split(".")[-1] for part in value) if isinstance(value, list) else str(value)
    ),
)
@pytest.mark.sample(1)
def test_a_run_is_that_of_grouped_experts(options: list[str], world: int, tmp_path: Path) -> None:
    mega, grouped = tmp_path / "mega", tmp_path / "grouped"
    given = [*STATEFUL, *options, "callbacks.checkpoint.every_n_steps=6"]
    result = fit(mega, "fusion=mega", *given, world=world)[0]
    fit(grouped, "fusion=grouped", *given, world=world)
    # bf16: every row is rounded after each product, and sums over k are rounded once instead of once per rank.
    assert_close_run(mega, grouped, tolerance=3e-3 if "trainer.precision=bf16-mixed" in options else 2e-5)
    alone = world == 1 or "strategy.expert_parallel_size=1" in options
    assert result["transport"] == (None if alone else "shared_memory")


@pytest.mark.full
def test_a_checkpoint_moves_between_mega_and_grouped(tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    given = [*STATEFUL, "callbacks.checkpoint.every_n_steps=3"]
    fit(straight, *given)
    for first, then in (("mega", "grouped"), ("grouped", "mega")):
        run = tmp_path / first
        fit(run, f"fusion={first}", *given)
        shutil.rmtree(checkpoints(run)[-1])
        fit(run, f"fusion={then}", f"resume={run}", *given)
        assert_close_run(run, straight)


@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.full), "shortcut"])
@pytest.mark.full
def test_a_taped_run_is_the_eager_one(overlap: str, tmp_path: Path) -> None:
    eager, taped = tmp_path / "eager", tmp_path / "taped"
    given = ["fusion=mega", f"overlap={overlap}", *STATEFUL, "callbacks.checkpoint.every_n_steps=6"]
    given += ["data.micro_batch_size=2", "trainer.val_check_interval=4"]
    fit(eager, *given)
    counts: Any = fit(taped, "graph=step", *given)[0]["graph"]
    assert counts["captures"] == 1 and counts["replays"] >= 2
    assert_same_run(eager, taped)


@pytest.mark.parametrize("graph", [pytest.param("none", marks=pytest.mark.full), "step"])
@pytest.mark.full
def test_a_budget_that_grew_gives_the_run_of_one_that_was_large_enough(graph: str, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    given = ["fusion=mega", f"graph={graph}", *STATEFUL, "callbacks.checkpoint.every_n_steps=6"]
    # The micro model has few rows, and budgets are multiples of 64.
    given += ["data.seq_length=64", "router.top_k=2"]
    counts = fit(small, "fusion.capacity_factor=0.5", *given)[0]["overflow"]
    assert counts["replays"] >= 1 and counts["dropped"] == 0
    fit(large, *given)
    assert losses(small) == losses(large)
    first, second = tensors(checkpoints(small)[-1]), tensors(checkpoints(large)[-1])
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_error_names_the_keys_of_fusion(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"fusion.on_overflow=error: .* set fusion.capacity_factor="):
        fit(
            tmp_path,
            "fusion=mega",
            "fusion.capacity_factor=0.3",
            "fusion.on_overflow=error",
            "data.seq_length=64",
            "router.top_k=2",
        )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_200_steps_of_the_default_model(tmp_path: Path) -> None:
    """Rounding grows with the steps; both runs stay together far closer than seeds do (0.01 and more)."""
    given = ["balance=bias", "trainer.max_steps=200", "trainer.log_every_n_steps=10", "data.seq_length=64"]
    given += ["model.hidden_size=128", "model.ffn_hidden_size=256", "model.expert_hidden_size=128"]
    for fusion in ("mega", "grouped"):
        fit(tmp_path / fusion, f"fusion={fusion}", *given, limit_s=400)
    mega, grouped = losses(tmp_path / "mega"), losses(tmp_path / "grouped")
    assert mega.keys() == grouped.keys() and len(mega) >= 20
    assert abs(mega[10] - grouped[10]) < 1e-4
    assert all(abs(mega[step] - grouped[step]) < 2e-3 for step in mega)
