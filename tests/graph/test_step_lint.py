"""`graph.lint=true`: which places a graph could not repeat, with file, line and override; and `graph=step` refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from tests.graph.planted import LINE
from tests.train.fit import compose_run, fit

STATIC = "dispatcher.capacity_factor=4.0"
PLANTED = ["router._target_=tests.graph.planted.CuriousRouter", "trusted_targets=[tests]"]


def findings(folder: Path, *overrides: str) -> list[str]:
    """The lines of a run that is not clean."""
    with pytest.raises(AssertionError) as caught:
        fit(folder, "graph.lint=true", *overrides)
    (line, *_) = [line for line in str(caught.value).splitlines() if "LintFinished: graph.lint:" in line]
    return line.partition("cannot repeat: ")[2].split("; ")


@pytest.mark.parametrize(
    "options",
    [
        ["dispatcher=nccl_ep", "overlap=shortcut", STATIC],
        ["dispatcher=alltoall", "overlap=chunked", STATIC, "graph=step"],
        pytest.param(["dispatcher=hybrid_ep", "overlap=two_batch", STATIC], marks=pytest.mark.full),
        pytest.param(["dispatcher=allgather", "overlap=shared_expert", STATIC], marks=pytest.mark.full),
        pytest.param(["dispatcher=deep_ep", STATIC, "data.packing=documents"], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_static_step_is_clean_and_nothing_is_trained_after_it(options: list[str], tmp_path: Path) -> None:
    (result, _) = fit(tmp_path, "graph.lint=true", "trainer.max_steps=1", *options)
    assert (result["status"], result["graph"]["lint"]) == ("finished", [])
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.full
def test_an_eager_dispatcher_is_found_with_the_override_that_avoids_it(tmp_path: Path) -> None:
    found = findings(tmp_path, "dispatcher=nccl_ep")
    text = "; ".join(found)
    assert "dispatch/packed.py:" in text and "tolist (forward, 2x): host read" in text
    assert set(found[1::2]) == {"set dispatcher.capacity_factor=1.5"}


@pytest.mark.full
def test_a_loop_over_experts_is_found(tmp_path: Path) -> None:
    text = "; ".join(findings(tmp_path, "dispatcher=nccl_ep", STATIC, "fusion=loop"))
    assert "fusion/loop.py:" in text and "set fusion=grouped" in text


def test_a_planted_item_in_a_router_is_found_with_its_line(tmp_path: Path) -> None:
    text = "; ".join(findings(tmp_path, "dispatcher=nccl_ep", STATIC, *PLANTED))
    assert f"graph/planted.py:{LINE} item (forward, 2x): host read; no override: change this code" in text


@pytest.mark.full
def test_a_planted_item_stops_a_capture_with_the_same_words(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        fit(tmp_path, "dispatcher=nccl_ep", STATIC, "graph=step", *PLANTED)
    assert f"the step cannot be captured: graph/planted.py:{LINE} item (forward, 2x): host read" in str(
        caught.value
    )
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in metrics) == 2, "the step of the capture left a trace"


REFUSED = {
    "eager": ([], "dispatcher.capacity_factor"),
    "loop": ([STATIC, "fusion=loop"], "fusion=grouped"),
    "sharded": ([STATIC, "strategy=fully_shard"], "strategy=replicate"),
    "no GPU": ([STATIC, "graph.backend=cuda"], "graph.backend=auto"),
    "plain optimizer": ([STATIC, "graph.include_optimizer=true"], "optimizer.fused=true"),
    "other optimizer": (
        [STATIC, "graph.include_optimizer=true", "optimizer=sgd"],
        "graph.include_optimizer=false",
    ),
    "two forwards": (
        [STATIC, "balance=aux_loss", "balance.scope=global", "data.micro_batch_size=1"],
        "data.micro_batch_size=auto",
    ),
    "one warm-up step": ([STATIC, "graph.warmup_steps=1"], "graph.warmup_steps=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_before_any_process_starts(name: str) -> None:
    overrides, fix = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        compose_run(["dispatcher=nccl_ep", "graph=step", *overrides], world=2)
    assert f"set {fix}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dispatcher", ["local", "nccl_ep"])
def test_one_rank_can_be_captured(dispatcher: str) -> None:
    options = ["strategy.expert_parallel_size=1"] if dispatcher == "local" else [STATIC]
    compose_run([f"dispatcher={dispatcher}", "graph=step", *options], world=1)
