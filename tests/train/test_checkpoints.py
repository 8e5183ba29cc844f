"""Checkpoint and resume: the same bits as without, each expert saved once, and what a kill leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from sidestream.lightning.checkpoint import checkpoints
from sidestream.tracking.folder import RunFolder
from tests.train.fit import fit, losses, tensors

# Everything that has a state: bias balancing, dropout on every rank, accumulation, a decaying rate.
STATEFUL = ["balance=bias", "balance.update_rate=0.01", "model.dropout=0.1", "data.micro_batch_size=2"]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} tensors differ, first {different[0]}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 steps in one go on 2 ranks, with a checkpoint at 3."""
    folder = tmp_path_factory.mktemp("straight")
    fit(folder, *STATEFUL, "callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.keep_last=5")
    return folder


def resumed_copy(run: Path, folder: Path) -> Path:
    """A copy of a run as it was at step 3."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    return folder


def test_resume_is_bit_identical(straight: Path, tmp_path: Path) -> None:
    folder = resumed_copy(straight, tmp_path / "resumed")
    fit(folder, *STATEFUL, f"resume={folder}")
    assert losses(folder) == losses(straight)
    # Parameters, both moments, step counts, balancing bias.
    assert_same(tensors(checkpoints(folder)[-1]), tensors(checkpoints(straight)[-1]))


def test_moments_are_not_zero_after_load(straight: Path) -> None:
    state = tensors(checkpoints(straight)[0])
    moments = {name: value for name, value in state.items() if name.endswith("exp_avg")}
    assert any(".experts." in name for name in moments)
    assert all(value.any() for value in moments.values())


@pytest.mark.parametrize(
    ("world", "ep"), [(1, 1), (2, 1), (4, 2), pytest.param(4, 4, marks=pytest.mark.full)]
)
@pytest.mark.sample(1)
def test_resume_with_another_world_or_ep(world: int, ep: int, tmp_path: Path) -> None:
    # No dropout: its random numbers belong to a rank, and there are other ranks now.
    options = ["balance=bias", "balance.update_rate=0.01"]
    whole, folder = tmp_path / "whole", tmp_path / "resumed"
    fit(whole, *options, "callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.keep_last=5")
    resumed_copy(whole, folder)
    fit(folder, *options, f"resume={folder}", f"strategy.expert_parallel_size={ep}", world=world)
    after, before = losses(folder), losses(whole)
    # fp32: sums over ranks are taken in another order.
    assert after.keys() == before.keys()
    assert all(abs(after[step] - before[step]) < 2e-6 for step in before)


def test_each_expert_is_saved_once_and_by_its_owner(tmp_path: Path) -> None:
    sizes = []
    for world, ep in [(1, 1), (2, 2), (4, 2)]:
        folder = tmp_path / f"w{world}ep{ep}"
        fit(folder, "trainer.max_steps=1", f"strategy.expert_parallel_size={ep}", world=world)
        (checkpoint,) = checkpoints(folder)
        state = tensors(checkpoint)
        experts = state["state_dict.model.blocks.1.moe.experts.w_down"]
        assert experts.shape == (4, 64, 64)
        assert len({tuple(expert.flatten()[:8].tolist()) for expert in experts}) == 4
        sizes.append(sum(value.numel() for value in state.values()))
        on_disk = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
        bytes_held = sum(value.numel() * value.element_size() for value in state.values())
        assert on_disk < 1.5 * bytes_held, "shards carry more than their tensors"
    assert len(set(sizes)) == 1


def test_balancing_bias_is_saved_as_it_is(straight: Path) -> None:
    state = tensors(checkpoints(straight)[-1])
    bias = state["state_dict.model.blocks.1.moe.selection_bias"]
    assert bias.dtype == torch.float32
    # 6 updates of +-0.01.
    assert bias.any()
    assert bias.abs().max() <= 0.06 + 1e-6


def test_metrics_are_cut_at_the_checkpoint(straight: Path, tmp_path: Path) -> None:
    folder = resumed_copy(straight, tmp_path / "resumed")
    fit(folder, *STATEFUL, f"resume={folder}")
    steps = [record["step"] for record in RunFolder(folder).read_metrics() if "train/loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_half_written_checkpoint_is_not_taken(straight: Path, tmp_path: Path) -> None:
    folder = resumed_copy(straight, tmp_path / "resumed")
    partial = folder / "checkpoints" / ".step-00000006.partial"
    partial.mkdir()
    (partial / ".metadata").write_bytes(b"half")
    assert [path.name for path in checkpoints(folder)] == ["step-00000003"]
    fit(folder, *STATEFUL, f"resume={folder}")
    assert_same(tensors(checkpoints(folder)[-1]), tensors(checkpoints(straight)[-1]))


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    fit(tmp_path, "callbacks.checkpoint.every_n_steps=2", "callbacks.checkpoint.keep_last=2")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000006"]


def test_other_corpus_is_refused(straight: Path, tmp_path: Path) -> None:
    folder = resumed_copy(straight, tmp_path / "resumed")
    with pytest.raises(AssertionError, match="checksum"):
        fit(folder, *STATEFUL, f"resume={folder}", "data.val_fraction=0.2")


@pytest.mark.parametrize(("world", "ep"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
@pytest.mark.full
def test_fully_shard_resumes_bit_identically_and_by_replicate(world: int, ep: int, tmp_path: Path) -> None:
    sharded = ["strategy=fully_shard", f"strategy.expert_parallel_size={ep}", "balance=bias"]
    whole, folder, other = tmp_path / "whole", tmp_path / "resumed", tmp_path / "replicate"
    fit(
        whole,
        *sharded,
        "callbacks.checkpoint.every_n_steps=3",
        "callbacks.checkpoint.keep_last=5",
        world=world,
    )
    resumed_copy(whole, folder)
    shutil.copytree(folder, other)
    fit(folder, *sharded, f"resume={folder}", world=world)
    assert losses(folder) == losses(whole)
    assert_same(tensors(checkpoints(folder)[-1]), tensors(checkpoints(whole)[-1]))
    # A checkpoint does not know how the tensors were cut.
    fit(other, "balance=bias", f"resume={other}", world=2)
    assert all(abs(losses(other)[step] - loss) < 2e-6 for step, loss in losses(whole).items())


def test_a_run_that_is_made_longer_follows_the_longer_schedule_from_its_first_step(tmp_path: Path) -> None:
    given = [
        *STATEFUL,
        "scheduler=cosine",
        "scheduler.warmup_steps=0",
        "callbacks.checkpoint.every_n_steps=3",
    ]
    fit(tmp_path, *given, "trainer.max_steps=3")
    fit(tmp_path, *given, "trainer.max_steps=6", f"resume={tmp_path}")
    straight = tmp_path / "straight"
    fit(straight, *given, "trainer.max_steps=6")

    def rates(folder: Path) -> dict[int, float]:
        return {r["step"]: r["train/lr"] for r in RunFolder(folder).read_metrics() if "train/lr" in r}

    assert {step: rates(tmp_path)[step] for step in (4, 5, 6)} == {
        step: rates(straight)[step] for step in (4, 5, 6)
    }
