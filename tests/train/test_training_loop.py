"""Lightning and logging: one axis of optimizer steps, stopping on a signal, and what happens around a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sidestream.config.errors import ConfigError
from sidestream.lightning.checkpoint import checkpoints
from sidestream.tracking.folder import RunFolder
from tests.train.fit import assert_same_run, fit, losses, tensors


@pytest.mark.full
def test_one_axis_of_optimizer_steps(tmp_path: Path) -> None:
    """8 sequences, accumulation 4: a record per optimizer step; tokens are global and the same for every world."""
    fit(tmp_path / "two", "data.micro_batch_size=1", "trainer.max_steps=2", "trainer.val_check_interval=1")
    fit(tmp_path / "one", "data.micro_batch_size=2", "trainer.max_steps=2", world=1)
    two, one = RunFolder(tmp_path / "two").read_metrics(), RunFolder(tmp_path / "one").read_metrics()
    assert [(r["step"], "val/loss" in r) for r in two] == [(1, False), (1, True), (2, False), (2, True)]
    assert [r["progress/tokens"] for r in two if "train/loss" in r] == [128, 256]
    assert [r["progress/tokens"] for r in one if "train/loss" in r] == [128, 256]


@pytest.mark.full
def test_world_size_does_not_change_the_batches(tmp_path: Path) -> None:
    for world in (1, 2, 4):
        fit(tmp_path / str(world), world=world)
    reference = losses(tmp_path / "1")
    for world in (2, 4):
        other = losses(tmp_path / str(world))
        assert all(abs(other[step] - reference[step]) < 2e-6 for step in reference)


@pytest.mark.full
def test_validation_and_saving_do_not_change_training(tmp_path: Path) -> None:
    """Lightning sets gradients to None before a validation; ours live in flat storage and must survive it."""
    plain = ["model.dropout=0.1"]
    busy = [*plain, "trainer.val_check_interval=1", "callbacks.checkpoint.every_n_steps=1"]
    fit(tmp_path / "plain", *plain)
    fit(tmp_path / "busy", *busy)
    assert losses(tmp_path / "busy") == losses(tmp_path / "plain")
    last = [tensors(checkpoints(tmp_path / name)[-1]) for name in ("plain", "busy")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_signal_to_one_rank_stops_all_at_the_same_step(rank: int, tmp_path: Path) -> None:
    results = fit(tmp_path / "stopped", stop=(rank, 4))
    assert [result["status"] for result in results] == ["interrupted", "interrupted"]
    assert [path.name for path in checkpoints(tmp_path / "stopped")] == ["step-00000004"]
    fit(tmp_path / "whole", "callbacks.checkpoint.every_n_steps=4", "callbacks.checkpoint.keep_last=5")
    stopped, whole = (tensors(checkpoints(tmp_path / name)[0]) for name in ("stopped", "whole"))
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)


def test_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    fit(tmp_path / "stopped", stop=(1, 4))
    fit(tmp_path / "stopped", f"resume={tmp_path / 'stopped'}")
    fit(tmp_path / "whole")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize(("rank", "batch"), [(0, 0), (1, 3)])
def test_a_request_leaves_a_validation_at_a_batch_and_saves_first(
    rank: int, batch: int, tmp_path: Path
) -> None:
    """A scheduled validation of a step that has no checkpoint."""
    options = ["trainer.val_check_interval=3", "trainer.limit_val_batches=5"]
    results = fit(tmp_path / "stopped", *options, stop_validation=(rank, batch))
    assert [result["status"] for result in results] == ["interrupted", "interrupted"]
    assert [path.name for path in checkpoints(tmp_path / "stopped")] == ["step-00000003"]
    assert not any("val/loss" in r for r in RunFolder(tmp_path / "stopped").read_metrics())
    fit(tmp_path / "stopped", *options, f"resume={tmp_path / 'stopped'}")
    fit(tmp_path / "whole", *options)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    # Not the mean over the batches that were left.
    assert validations(tmp_path / "stopped").items() <= validations(tmp_path / "whole").items()


def validations(folder: Path) -> dict[int, float]:
    return {r["step"]: r["val/loss"] for r in RunFolder(folder).read_metrics() if "val/loss" in r}


def test_a_request_in_the_last_validation_leaves_it_too(tmp_path: Path) -> None:
    results = fit(tmp_path, "trainer.max_steps=2", stop_validation=(1, 1))
    assert [result["status"] for result in results] == ["interrupted", "interrupted"]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]


@pytest.mark.full
def test_no_validation_when_a_run_stops_at_a_step_that_has_one(tmp_path: Path) -> None:
    fit(tmp_path, "trainer.val_check_interval=3", stop=(0, 3))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]
    assert not any("val/loss" in r for r in RunFolder(tmp_path).read_metrics())


@pytest.mark.full
def test_final_validation_also_when_the_interval_does_not_divide(tmp_path: Path) -> None:
    results = fit(tmp_path, "trainer.max_steps=5", "trainer.val_check_interval=3")
    validated = [r["step"] for r in RunFolder(tmp_path).read_metrics() if "val/loss" in r]
    assert validated == [3, 5]
    assert results[0]["metrics"]["val_loss"] == results[1]["metrics"]["val_loss"]


def test_result_of_a_run(tmp_path: Path) -> None:
    fit(tmp_path)
    result = RunFolder(tmp_path).read_result()
    assert result is not None
    assert result["status"] == "finished"
    assert result["error"] is None
    assert (result["world_size"], result["expert_parallel_size"], result["transport"]) == (2, 2, "torch")
    metrics = result["metrics"]
    assert metrics["tokens"] == 6 * 8 * 16
    assert 0 < metrics["val_loss"] < 6
    assert metrics["baselines"]["trigram"] < metrics["baselines"]["bigram"]
    # Half of the rows leave their rank, twice forward and twice backward, and their weights once each way.
    assert metrics["bytes_on_wire"] > 0
    assert {"env.json", "metrics.jsonl", "result.json", "checkpoints"} <= {p.name for p in tmp_path.iterdir()}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_trains_and_resumes(precision: str, tmp_path: Path) -> None:
    options = [f"trainer.precision={precision}", "balance=bias"]
    fit(tmp_path / "whole", *options)
    fit(tmp_path / "part", *options, stop=(0, 3))
    fit(tmp_path / "part", *options, f"resume={tmp_path / 'part'}")
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    state = tensors(checkpoints(tmp_path / "part")[-1])
    for name in ("gate", "selection_bias"):  # fp32 in every precision
        assert state[f"state_dict.model.blocks.1.moe.{name}"].dtype == torch.float32
    weights = state["state_dict.model.blocks.1.moe.experts.w_down"].dtype
    assert weights == (torch.float32 if precision == "bf16-mixed" else torch.bfloat16)


def test_own_dispatcher_from_outside_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-cd my_conf dispatcher=mine`: a package and a YAML, nothing registered anywhere."""
    package, options = tmp_path / "my_pkg", tmp_path / "my_conf" / "dispatcher"
    package.mkdir()
    options.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "from sidestream.dispatch.alltoall import AllToAllDispatcher\n"
        "class Mine(AllToAllDispatcher):\n"
        "    name = 'mine'\n"
        "    def __init__(self, *, greeting):\n"
        "        super().__init__()\n"
        "        assert greeting == 'hello'\n"
    )
    (options / "mine.yaml").write_text("_target_: my_pkg.Mine\ngreeting: hello\n")
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [f"hydra.searchpath=[file://{tmp_path / 'my_conf'}]", "dispatcher=mine"]
    with pytest.raises(ConfigError, match="trusted_targets"):
        fit(tmp_path / "refused", *overrides)
    results = fit(tmp_path / "run", *overrides, "trusted_targets=[my_pkg]", path=str(tmp_path))
    assert results[0]["status"] == "finished"


def test_loss_that_is_not_finite_ends_the_run_before_commit(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the [\w -]+ is (nan|inf).*optimizer\.lr"):
        fit(tmp_path, "optimizer.lr=1e12", "trainer.gradient_clip_val=null")


@pytest.mark.full
@pytest.mark.parametrize(("dispatcher", "fusion"), [("local", "grouped"), ("alltoall", "loop")])
def test_every_choice_trains(dispatcher: str, fusion: str, tmp_path: Path) -> None:
    world = 1 if dispatcher == "local" else 2
    (first, *_) = fit(tmp_path, f"dispatcher={dispatcher}", f"fusion={fusion}", world=world)
    assert first["status"] == "finished"


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [["model=tiny_dense"], ["scheduler=cosine"], ["scheduler=constant"], ["optimizer=sgd"]]
)
def test_other_options_train(options: list[str], tmp_path: Path) -> None:
    assert fit(tmp_path, *options)[0]["status"] == "finished"
