"""scripts/check_gpu.py on a machine without a GPU: what it skips, what it finds, and that its checks can fail."""

import json
from pathlib import Path

import pytest
import torch

from sidestream.config.compatibility import check
from sidestream.fusion.grouped import GroupedExperts
from tests.docs.pages import script
from tests.rank_pool import ranks

check_gpu = script("scripts/check_gpu.py")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


@no_gpu
def test_without_a_gpu_it_says_what_it_skips_and_why(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert check_gpu.main(["--json", str(tmp_path / "checks.json")]) == 0
    rows = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert {row["name"]: row["state"] for row in rows} == {
        "torch build": "ok",
        "devices": "skipped",
        "bf16": "ok",
        "grouped gemm": "ok",
        "nccl exchange": "skipped",
        "training": "skipped",
        "step graphs": "skipped",
        "fused": "skipped",
        "step lint": "skipped",
        "graph speed": "skipped",
    }
    printed = capsys.readouterr().out
    assert all(row["name"] in printed for row in rows)
    assert [row["detail"] for row in rows if row["state"] == "skipped"] == [
        "needs 1 CUDA device, torch sees 0",
        "needs 2 CUDA devices, torch sees 0",
        *["needs 1 CUDA device, torch sees 0"] * 5,
    ]


def test_it_lists_its_checks_without_running_them(capsys: pytest.CaptureFixture):
    def explodes() -> str:
        """Would explode."""
        raise AssertionError

    assert check_gpu.main(["--list"], checks=[explodes]) == 0
    assert capsys.readouterr().out.split() == ["explodes", "Would", "explode."]


def on_the_cpu(rank: int, world: int, *, name: str, broken: bool = False) -> str:
    """A check of step graphs as the only rank, on a CPU, where the graph is a tape."""
    module = script("scripts/check_gpu.py")
    module.register()
    module.MEDIUM, module.SCHEDULES = [], {"shortcut": module.SCHEDULES["shortcut"]}
    if broken:
        original = module.Trained.train

        def train(self, kind: str) -> float:
            return original(self, kind) + (kind == "graph")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.Trained, "train", train)
            return getattr(module, name)(torch.device("cpu"))
    return getattr(module, name)(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("graphs_agree", "4 steps equal bit for bit on cpu in 32-true: shortcut"),
        ("fused_agrees", "with a graph equal bit for bit: shortcut"),
        ("lint_is_clean", "reads nothing on the host"),
        pytest.param("speed_with_a_graph", " x; capture ", marks=pytest.mark.full),
    ],
)
@pytest.mark.sample(1)
def test_the_checks_of_step_graphs_run_on_a_tape(name: str, expected: str):
    (told,) = ranks(1).run(on_the_cpu, name=name)
    assert expected in told


def test_a_graph_that_trains_otherwise_is_found():
    with pytest.raises(AssertionError, match=r"overlap=shortcut: with a graph"):
        ranks(1).run(on_the_cpu, name="graphs_agree", broken=True)


def test_a_failure_does_not_stop_the_other_checks_and_is_the_exit_code(capsys: pytest.CaptureFixture):
    def broken() -> str:
        raise RuntimeError("a traceback\n\nthe cause")

    def fine() -> str:
        return "found"

    outcomes = check_gpu.run_checks([broken, fine])
    assert [(row.state, row.detail) for row in outcomes] == [
        ("failed", "RuntimeError: the cause"),
        ("ok", "found"),
    ]
    assert check_gpu.main([], checks=[broken, fine]) == 1


@no_gpu
@pytest.mark.parametrize("where", ["output", "gradient", "nan"])
def test_wrong_experts_are_found(where: str, monkeypatch: pytest.MonkeyPatch):
    class Wrong(GroupedExperts):
        def __call__(self, received, w_gate_up, w_down):
            out = super().__call__(received, w_gate_up, w_down)
            if where == "gradient":
                return 1.1 * out - 0.1 * out.detach()
            return out * (1.1 if where == "output" else float("nan"))

    monkeypatch.setattr(check_gpu, "GroupedExperts", Wrong)
    (row,) = check_gpu.run_checks([check_gpu.grouped_gemm])
    assert row.state == "failed"
    assert "from the loop" in row.detail


@no_gpu
def test_a_gpu_that_torch_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(check_gpu, "count_gpus", lambda: 2)
    (row,) = check_gpu.run_checks([check_gpu.torch_build])
    assert row.state == "failed"
    assert row.detail.startswith("RuntimeError: 2 GPUs here, but torch ")


def exchange_on_cpu(rank: int, world: int) -> None:
    script("scripts/check_gpu.py").exchange(rank, torch.device("cpu"))


def test_the_exchange_of_two_ranks_works_on_gloo():
    """What the NCCL check does on two GPUs."""
    ranks(2).run(exchange_on_cpu)


@pytest.mark.parametrize("overrides", [["trainer.precision=32-true"], ["trainer.precision=bf16-mixed"]])
def test_the_micro_run_is_legal(overrides: list[str], compose):
    check(compose(*check_gpu.MICRO, "trainer.devices=1", *overrides), device_count=0)
