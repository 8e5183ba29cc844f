"""`graph=step backend=tape` through Lightning: bit for bit the run without it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestream.lightning.checkpoint import checkpoints
from tests.train.fit import assert_same_run, fit, losses, tensors

# All that lives between steps: bias, jitter and dropout draws, clipping, a validation in the middle.
STATEFUL = [
    "balance=bias",
    "balance.update_rate=0.01",
    "router.jitter=0.05",
    "model.dropout=0.1",
    "trainer.gradient_clip_val=0.5",
    "trainer.val_check_interval=4",
    "callbacks.checkpoint.keep_last=9",
]
SCHEDULES = {
    "none": [],
    "shared_expert": ["overlap=shared_expert"],
    "shortcut": ["overlap=shortcut"],
    "chunked": ["overlap=chunked"],
    "two_batch": ["overlap=two_batch"],
    "delay_wgrad": ["overlap=shared_expert", "overlap.delay_wgrad=true"],
}


def train(folder: Path, *overrides: str, factor: float = 4.0, world: int = 2, limit_s: float = 240) -> Any:
    return fit(
        folder, *STATEFUL, f"dispatcher.capacity_factor={factor}", *overrides, world=world, limit_s=limit_s
    )


def compare(tmp_path: Path, *overrides: str, steps: int, **options: Any) -> dict[str, Any]:
    """Train with and without the graph; compare; return the counts of the graph."""
    eager, taped = tmp_path / "eager", tmp_path / "taped"
    given = [f"trainer.max_steps={steps}", f"callbacks.checkpoint.every_n_steps={steps}", *overrides]
    train(eager, *given, **options)
    counts = train(taped, "graph=step", *given, **options)[0]["graph"]
    assert_same_run(eager, taped)
    return counts


# Every dispatcher and every schedule, with both accumulations and both worlds. All pairs of them: test_taped_steps.py.
MATRIX = [
    ("nccl_ep", "shortcut", 2, 2),
    ("hybrid_ep", "chunked", 1, 2),
    ("allgather", "shared_expert", 2, 2),
    ("deep_ep", "two_batch", 1, 2),
    ("nccl_ep", "delay_wgrad", 2, 2),
    ("alltoall", "shortcut", 1, 1),
    pytest.param("alltoall", "none", 2, 2, marks=pytest.mark.full),
    pytest.param("hybrid_ep", "two_batch", 2, 1, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("dispatcher", "schedule", "accumulation", "world"), MATRIX, ids=str)
@pytest.mark.sample(1)
def test_a_taped_run_is_the_eager_one(
    dispatcher: str, schedule: str, accumulation: int, world: int, tmp_path: Path
) -> None:
    per_step = 4 * world  # two halves of a micro-batch
    options = [
        f"dispatcher={dispatcher}",
        *SCHEDULES[schedule],
        f"data.global_batch_size={per_step}",
        f"data.micro_batch_size={4 // accumulation}",
    ]
    counts = compare(tmp_path, *options, steps=6, world=world)
    # shortcut measures its slot in three steps, and two more run as they are written.
    assert (counts["captures"], counts["replays"] + counts["eager"]) == (1, 6)
    assert counts["replays"] >= 2


# Six named combinations over 30 steps: validations and a checkpoint in the middle, and a resume from it.
LONG = {
    "flagship": ["dispatcher=nccl_ep", "overlap=shortcut"],
    "baseline": ["dispatcher=alltoall"],
    "chunked_accumulated": ["dispatcher=hybrid_ep", "overlap=chunked", "data.micro_batch_size=2"],
    "to_all_shared": ["dispatcher=allgather", "overlap=shared_expert"],
    "late_bf16": [
        "dispatcher=nccl_ep",
        "overlap=two_batch",
        "overlap.delay_wgrad=true",
        "trainer.precision=bf16-mixed",
    ],
    "auxiliary_recomputed": [
        "dispatcher=alltoall",
        "overlap=shortcut",
        "overlap.tap=pos1",
        "model.activation_checkpointing=true",
        "balance=aux_loss",
        "balance.scope=global",
        "model.num_experts=8",
        "strategy.expert_parallel_size=2",
    ],
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LONG)
def test_thirty_steps_with_a_resume_in_the_middle(name: str, tmp_path: Path) -> None:
    eager, taped, resumed = (tmp_path / each for each in ("eager", "taped", "resumed"))
    own = [part for part in LONG[name] if not part.startswith("balance")]
    balance = [part for part in LONG[name] if part.startswith("balance")]
    options = [*own, *balance, "trainer.max_steps=30", "callbacks.checkpoint.every_n_steps=15"]
    stateful = [part for part in STATEFUL if not (balance and part.startswith("balance"))]
    given = [*stateful, "dispatcher.capacity_factor=4.0", *options]
    fit(eager, *given)
    counts = fit(taped, "graph=step", *given)[0]["graph"]
    assert counts["captures"] == 1 and counts["replays"] >= 26
    assert_same_run(eager, taped)
    shutil.copytree(taped, resumed)
    shutil.rmtree(checkpoints(resumed)[-1])
    again = fit(resumed, "graph=step", *given, f"resume={resumed}")[0]["graph"]
    assert again["captures"] == 1 and again["replays"] >= 10
    assert_same_run(eager, resumed)


@pytest.mark.full
def test_the_optimizer_in_the_graph(tmp_path: Path) -> None:
    eager, taped, resumed = (tmp_path / each for each in ("eager", "taped", "resumed"))
    options = [
        "dispatcher=nccl_ep",
        "optimizer.fused=true",
        "scheduler=cosine",
        "trainer.max_steps=12",
        "callbacks.checkpoint.every_n_steps=6",
    ]
    train(eager, *options)
    train(taped, "graph=step", "graph.include_optimizer=true", *options)
    assert losses(eager) == losses(taped)
    shutil.copytree(taped, resumed)
    shutil.rmtree(checkpoints(resumed)[-1])
    train(resumed, "graph=step", "graph.include_optimizer=true", *options, f"resume={resumed}")
    first = {k: v for k, v in tensors(checkpoints(eager)[-1]).items() if not k.endswith(".lr")}
    for run in (taped, resumed):
        other = tensors(checkpoints(run)[-1])
        assert all(torch.equal(value, other[name]) for name, value in first.items()), run.name


def test_a_stop_request_ends_a_taped_run_after_the_step_and_it_goes_on(tmp_path: Path) -> None:
    """`trainer.should_stop`, which early stopping sets too, and a resume that captures anew."""
    eager, stopped = tmp_path / "eager", tmp_path / "stopped"
    options = ["dispatcher=nccl_ep", "trainer.max_steps=10", "callbacks.checkpoint.every_n_steps=10"]
    train(eager, *options)
    given = [*STATEFUL, "dispatcher.capacity_factor=4.0", *options, "graph=step"]
    results = fit(stopped, *given, stop=(1, 5))
    assert [(r["status"], r["graph"]["replays"]) for r in results] == [("interrupted", 3)] * 2
    assert fit(stopped, *given, f"resume={stopped}")[0]["graph"]["captures"] == 1
    assert_same_run(eager, stopped)
