"""A static budget that is too small: what is replayed is, bit for bit, what a large budget would have computed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sidestream.lightning.checkpoint import checkpoints
from tests.train.fit import assert_same_run, fit

# Everything that an attempt could change too early: bias, jitter and dropout draws, accumulation.
STATEFUL = [
    "balance=bias",
    "balance.update_rate=0.01",
    "router.jitter=0.05",
    "model.dropout=0.1",
    "data.micro_batch_size=2",
    "data.seq_length=128",
    "callbacks.checkpoint.keep_last=5",
]
# The whole of `tiny`, as long as it takes to see the router move.
TINY = [
    "model.hidden_size=128",
    "model.ffn_hidden_size=384",
    "model.expert_hidden_size=128",
    "model.num_experts=8",
    "data.seq_length=256",
]


def train(folder: Path, factor: float, *overrides: str, steps: int, dispatcher: str = "nccl_ep") -> Any:
    return fit(
        folder,
        *STATEFUL,
        f"dispatcher={dispatcher}",
        f"dispatcher.capacity_factor={factor}",
        f"trainer.max_steps={steps}",
        f"callbacks.checkpoint.every_n_steps={steps // 2}",
        *overrides,
        limit_s=400,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dispatcher", "steps", "size"),
    [
        ("nccl_ep", 24, []),
        pytest.param("allgather", 24, [], marks=pytest.mark.full),
        pytest.param("deep_ep", 24, [], marks=pytest.mark.full),
        pytest.param("alltoall", 24, [], marks=pytest.mark.full),
        pytest.param("nccl_ep", 200, TINY, marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_a_replayed_run_equals_one_with_a_large_budget(
    dispatcher: str, steps: int, size: list[str], tmp_path: Path
) -> None:
    large, small, resumed = (tmp_path / name for name in ("large", "small", "resumed"))
    options: dict[str, Any] = {"steps": steps, "dispatcher": dispatcher}
    assert train(large, 4.0, *size, **options)[0]["overflow"]["events"] == 0
    overflow = train(small, 0.8, *size, **options)[0]["overflow"]
    assert overflow["events"] == overflow["replays"] >= 2
    assert overflow["dropped"] == 0 and overflow["budget"] % 64 == 0
    assert_same_run(large, small)

    # From the middle, with the budget that had grown until then.
    shutil.copytree(small, resumed)
    shutil.rmtree(checkpoints(resumed)[-1])
    after = train(resumed, 0.8, *size, f"resume={resumed}", **options)[0]["overflow"]
    assert_same_run(large, resumed)
    assert after == overflow


def test_the_recommended_factor_is_enough(tmp_path: Path) -> None:
    small = train(tmp_path / "small", 0.8, steps=8)[0]["overflow"]
    again = train(tmp_path / "again", small["recommended_factor"], steps=8)[0]["overflow"]
    assert small["replays"] > 0 and again["events"] == 0
    assert again["recommended_factor"] == small["recommended_factor"]


def test_drop_trains_on_and_counts(tmp_path: Path) -> None:
    (result, other) = train(tmp_path, 0.8, "dispatcher.on_overflow=drop", steps=6)
    overflow = result["overflow"]
    assert overflow["events"] > 0 and overflow["replays"] == 0 and overflow["dropped"] > 0
    assert overflow["budget"] == 448  # 0.8 x 256 tokens x 2 routes, in units of 64
    assert overflow == other["overflow"] and result["status"] == "finished"


def test_error_stops_every_rank_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        train(tmp_path, 0.3, "dispatcher.on_overflow=error", steps=6)
    text = str(caught.value)
    assert text.count("dispatcher.on_overflow=error: rank ") == 2
    for part in ("MoE layer ", "its budget is 192", "set dispatcher.capacity_factor="):
        assert part in text


@pytest.mark.full
def test_validation_loses_nothing(tmp_path: Path) -> None:
    """A budget that training never fills may be too small for a validation batch; it grows there too."""
    options = ["trainer.val_check_interval=2", "dispatcher=allgather", "trainer.limit_val_batches=4"]
    large, small = tmp_path / "large", tmp_path / "small"
    expected = train(large, 4.0, *options, steps=4)[0]["metrics"]["val_loss"]
    found = train(small, 0.6, *options, steps=4)[0]
    assert found["metrics"]["val_loss"] == expected and found["overflow"]["replays"] > 0


def test_an_eager_dispatcher_has_no_budget(tmp_path: Path) -> None:
    result = fit(tmp_path, "dispatcher=nccl_ep", "trainer.max_steps=2")[0]
    assert set(result["overflow"].values()) == {None}
