"""Whole predictions: what must be true of any, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from sidestream.predict import report
from sidestream.predict.memory import memory
from sidestream.predict.picture import by_share, by_size
from sidestream.predict.step import parameters, step
from tests.predict.asking import CONF, asked, composed, predicted

QWEN = ("cluster=h100", "model=qwen3_30b_a3b", "strategy.expert_parallel_size=16")
RECIPES = sorted(path.stem for path in (CONF / "experiment" / "recipe").glob("*.yaml"))
CLUSTERS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml"))


def step_of(*overrides: str) -> float:
    one = asked(*QWEN, *overrides)
    return step(one.job, one.cluster).seconds


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("strategy.expert_parallel_size=8 cluster.fast_link_gb_per_s=900", "strategy.expert_parallel_size=8"),
        ("cluster.slow_link_gb_per_s=100", "cluster.slow_link_gb_per_s=50"),
        ("cluster.bf16_tflops=2000", "cluster.bf16_tflops=989"),
        ("cluster.memory_tb_per_s=4.8", "cluster.memory_tb_per_s=3.35"),
        ("cluster.layer_overhead_us=100", "cluster.layer_overhead_us=400"),
        ("predict.skew=1.0", "predict.skew=1.3"),
        ("dispatcher=nccl_ep", "dispatcher=alltoall"),
        ("predict.dispatch_wire=fp8", "predict.dispatch_wire=bf16"),
        ("overlap=shortcut", "overlap=none"),
        ("overlap=chunked", "overlap=none"),
        ("overlap=shortcut", "overlap.enabled=false overlap=shortcut"),
        ("model.activation_checkpointing=false", "model.activation_checkpointing=true"),
        ("dispatcher.capacity_factor=1.5 graph=step", "dispatcher.capacity_factor=1.5 graph=none"),
    ],
)
def test_what_is_faster(less: str, more: str) -> None:
    assert step_of(*less.split()) < step_of(*more.split())


def test_a_bubble_shrinks_with_micro_batches_and_virtual_stages() -> None:
    stages = ("predict.pipeline_stages=4", "strategy.expert_parallel_size=4", "cluster.num_gpus=16")

    def per_token(*overrides: str) -> float:
        one = asked("cluster=h100", *stages, *overrides)
        found = step(one.job, one.cluster)
        return found.seconds / found.tokens

    few, many = (per_token(f"data.global_batch_size={size}") for size in (16, 64))
    virtual = per_token("data.global_batch_size=16", "predict.virtual_stages=4")
    assert many < few and virtual < few


def test_state_of_a_rank_is_counted_parameter_by_parameter() -> None:
    from sidestream.measure.memory import peak_growth  # noqa: F401 - torch is there
    from tests.core.build_tiny import SHAPE

    one = asked("cluster=cpu_2core", "model=tiny", "trainer.precision=32-true", "dispatcher=alltoall")
    dense, experts = parameters(one.job)
    shape = one.job.shape
    by_hand = len(shape.moe_blocks) * shape.num_experts * 3 * shape.hidden_size * shape.expert_hidden_size
    assert experts == by_hand / 2
    needed = memory(one.job, one.cluster)
    assert needed.weights + needed.gradients + needed.optimizer == 16 * (dense + experts)
    assert SHAPE is not None


def test_sharding_saves_what_it_spreads() -> None:
    whole, spread, all_of_it = (
        memory(one.job, one.cluster)
        for one in (
            asked(*QWEN),
            asked(*QWEN, "predict.shard_optimizer=true"),
            asked(*QWEN, "strategy=fully_shard"),
        )
    )
    assert whole.optimizer > spread.optimizer and whole.weights > all_of_it.weights
    assert whole.activations == spread.activations == all_of_it.activations


def test_static_buffers_and_skew_take_memory() -> None:
    plain = asked(*QWEN)
    for overrides in (("dispatcher.capacity_factor=1.5",), ("predict.skew=1.5",)):
        more = asked(*QWEN, *overrides)
        assert memory(more.job, more.cluster).activations > memory(plain.job, plain.cluster).activations


def test_the_published_runs_that_kept_everything_fit() -> None:
    """They ran, so a prediction that says they do not fit is wrong; 5 % is what one of them is over."""
    from tests.predict.test_published import predict_residuals

    for row in predict_residuals.published("steps"):
        if row["recompute"] not in ("none", None):
            continue  # parts of a block are computed again there, which is not modelled
        options = dict(one.split("=", 1) for one in row["overrides"])
        one = asked(*row["overrides"])
        needed = memory(one.job, one.cluster)
        assert needed.total <= 1.1 * needed.available, options


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cluster_predicts(name: str) -> None:
    model = "tiny" if name.startswith("cpu") else "olmoe_1b_7b"
    found = predicted(
        f"cluster={name}", f"model={model}", "overlap=chunked", "strategy.expert_parallel_size=2"
    )
    assert 0 < found.peak_share < 1 and found.nearest
    page = report.text(found, choices={"model": model})
    assert "the model's error on the nearest published rows" in page


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_was_published(name: str) -> None:
    cfg = composed(f"experiment=recipe/{name}")
    published = cfg.predict.published
    assert published.tokens_per_second_per_gpu > 0 and len(published.source) > 20 and len(published.why) > 20
    found = predicted(f"experiment=recipe/{name}", f"cluster={_cluster_of(name)}")
    page = report.text(found, choices={})
    assert f"published: {published.tokens_per_second_per_gpu:,.0f} tokens/s per GPU; predicted " in page
    assert not cfg.trainable


def _cluster_of(name: str) -> str:
    text = (CONF / "experiment" / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    return next(line.split()[-1] for line in text.splitlines() if "override /cluster" in line)


def test_at_most_three_recipes() -> None:
    assert len(RECIPES) <= 3


def test_lines_of_the_picture_begin_where_nothing_is_gained() -> None:
    one = asked("cluster=h100", "model=olmoe_1b_7b", "strategy.expert_parallel_size=8")
    for line in by_size(one.job, one.cluster):
        assert line.at == (2.0, 4.0, 8.0, 16.0) and min(line.speedup) >= 1
    for line in by_share(one.job, one.cluster, shares=(0.1, 0.3, 0.5)):
        assert line.at == (0.1, 0.3, 0.5)
        # No schedule hides more than there is of communication, or of compute.
        for share, speedup in zip(line.at, line.speedup):
            assert 1 <= speedup <= 1 / max(share, 1 - share) + 1e-6


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = CONF.parent / "predict.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    words = (
        "cluster=gb300_nvl72",
        "model=qwen3_30b_a3b",
        "expert_parallel_size=64",
        "dispatcher=nccl_ep",
        "overlap=shortcut",
    )
    done = run(*words, f"paths.log_dir={tmp_path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in (
        "one MoE layer",
        "exposed communication",
        "tokens/s per GPU",
        "what binds",
        "memory of a rank",
    ):
        assert expected in done.stdout
    (record,) = tmp_path.rglob("prediction.json")
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["choices"]["overlap"] == "shortcut" and found["expert_parallel_size"] == 64
    assert found["metrics"]["step_ms"] > 0 and len(found["nearest_published"]) >= 4
    with Image.open(record.with_suffix(".png")) as picture:
        assert picture.size[0] > 800


def test_a_sweep_ends_with_one_table(tmp_path: Path) -> None:
    words = ("-m", "dispatcher=alltoall,nccl_ep", "expert_parallel_size=3,64", "predict.plot=false")
    done = run(*words, f"paths.log_dir={tmp_path}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) == 4 and sum("refused" in row for row in rows) == 2
    assert done.stdout.count("does not divide the world size") == 2


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    done = run("cluster=h100", "model=deepseek_v3", f"paths.log_dir={tmp_path}", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr.startswith("error: cluster.memory_gb=80: a rank would need")
        and done.stderr.count("\n") == 1
    )
