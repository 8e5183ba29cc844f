"""`backend=cuda` against a double of the CUDA calls it makes. Not run on a GPU: `scripts/check_gpu.py` does that."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidestream.graph.cuda import CudaBackend
from sidestream.graph.step import StepGraph
from tests.doubles.cuda_graph import FakeCuda
from tests.graph.test_taped_steps import STATIC, Run, assert_equal, trained
from tests.rank_pool import ranks

CPU = torch.device("cpu")


class OnDouble(StepGraph):
    """A step graph whose backend calls the double."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.cuda = FakeCuda()

    def open(self, device: torch.device, barrier: Any) -> None:
        super().open(device, barrier)
        self._backend = CudaBackend(device, cuda=self.cuda)


def on_double(rank: int, world: int, *, steps: int) -> dict[str, Any]:
    graph = OnDouble(backend="auto")
    run = Run(rank, world, STATIC, graph=graph)
    sent = []
    for index in range(steps):
        before = run.model.parts.dispatcher.bytes_sent()
        run.train(index)
        sent.append(run.model.parts.dispatcher.bytes_sent() - before)
    log = list(graph.cuda.log)
    found = run.close() | {"log": log, "sent": sent}
    graph.cuda.finish()
    return found


def test_a_captured_run_is_the_eager_one_and_counts_what_it_sends() -> None:
    eager = ranks(2).run(trained, setup=STATIC, taped=False, steps=5)
    for one, other in zip(eager, ranks(2).run(on_double, steps=5)):
        assert_equal(one, other)
        assert other["log"] == ["capture", "replay", "replay", "replay"]
        # Bytes of the captured step, whatever the routing was: on a GPU all pairs exchange fixed sizes.
        assert other["sent"][2] == other["sent"][3] == other["sent"][4] > 0


def updates(rank: int, world: int) -> dict[str, Any]:
    graph = OnDouble(backend="auto", include_optimizer=True)
    run = Run(rank, world, STATIC, graph=graph)
    stepped = run.optimizer.step
    run.optimizer.step = lambda: graph.update(stepped)  # type: ignore[method-assign,assignment]
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
    for index in range(5):
        run.train(index)
    log = list(graph.cuda.log)
    found = run.close() | {"log": log}
    graph.cuda.finish()
    return found


def test_a_captured_update_is_replayed_in_the_step_of_its_capture() -> None:
    """A capture executes nothing; without a replay that step would have no update."""
    eager = ranks(2).run(trained, setup=STATIC, taped=False, steps=5)
    for one, other in zip(eager, ranks(2).run(updates)):
        assert_equal(one, other)
        assert other["log"][:4] == ["capture", "replay", "capture", "replay"]


def test_the_backend_must_be_that_of_the_device() -> None:
    with pytest.raises(ValueError, match=r"set graph\.backend=auto"):
        StepGraph(backend="cuda").open(CPU, lambda: None)
