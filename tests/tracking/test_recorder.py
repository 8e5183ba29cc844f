from types import SimpleNamespace

import pytest
import torch

from sidestream.lightning import recorder as module
from sidestream.lightning.recorder import Recorder, RunSizes
from sidestream.parallel.step import StepReport
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.machine import Peak


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.now)
    return now


def make(tmp_path, *, every=4, max_steps=20, flops=1e9):
    progress = SimpleNamespace(show=lambda *a: None, show_validation=lambda *a: None)
    sizes = RunSizes(
        tokens_per_step=100, flops_per_token=1e6, expert_parallel_size=2, max_steps=max_steps, every=every
    )
    return Recorder(
        rank=0,
        folder=RunFolder(tmp_path),
        loggers=[],
        progress=progress,
        sizes=sizes,
        peak=Peak(flops, "stated"),
        memory=lambda: (10, 20),
    )


def report(recorder, *, other_rank=0.0, other_peak=1e9):
    own = recorder.own()
    per_rank = {name: [value, value] for name, value in own.items()}
    per_rank["seconds"][1] = other_rank
    per_rank["peak_flops"][1] = other_peak
    counts = torch.tensor([[3, 1, 2, 2]])
    return StepReport(loss=1.0, aux=0.0, counts=counts, stop=False, bytes_on_wire=8, per_rank=per_rank)


def run(recorder, clock, seconds, **options):
    for step, duration in enumerate(seconds, start=1):
        recorder.start_step()
        clock.now += duration
        recorder.end_step(step, report(recorder, **options), torch.tensor(1.0), lr=0.1)
        clock.now += 1000.0  # a validation or a checkpoint
        recorder.validation(step, 2.0)


def test_speed_is_without_the_first_steps_validation_and_checkpoints(tmp_path, clock):
    recorder = make(tmp_path)
    run(recorder, clock, [50.0] * 5 + [1.0, 1.0, 1.0, 5.0])
    summary = recorder.summary()
    assert summary.tokens_per_second == pytest.approx(4 * 100 / 8)
    assert summary.step_ms == pytest.approx(1000)  # the median: one slow step does not matter
    assert summary.mfu == pytest.approx(1e6 * 50 / 2e9)
    assert summary.peak_tflops == pytest.approx(1e-3)


def test_the_time_of_the_slowest_rank_is_that_of_the_step_before(tmp_path, clock):
    recorder = make(tmp_path)
    run(recorder, clock, [1.0] * 8, other_rank=3.0)
    first, second = [r for r in RunFolder(tmp_path).read_metrics() if "train/loss" in r]
    assert first["perf/step_ms"] == second["perf/step_ms"] == 1000
    assert first["perf/step_ms_slowest"] == second["perf/step_ms_slowest"] == 3000


@pytest.mark.parametrize(("known", "share"), [(True, 0.25), (False, None)])
def test_the_share_of_time_that_ranks_waited_for_a_core(tmp_path, clock, monkeypatch, known, share):
    """A second of work takes a third more where another program has the core: it is not the run's own speed."""
    monkeypatch.setattr(
        module, "waiting_reader", lambda: lambda: 0.25 * clock.now if known else None
    )  # a quarter of the time
    recorder = make(tmp_path)
    run(recorder, clock, [1.0] * 8, other_rank=2.0)
    assert recorder.summary().waited_share == (None if share is None else pytest.approx(share))


def test_no_mfu_where_the_peak_of_a_device_is_unknown(tmp_path, clock):
    recorder = make(tmp_path)
    run(recorder, clock, [1.0] * 4, other_peak=0.0)
    assert (recorder.summary().mfu, recorder.summary().peak_tflops) == (None, None)
    assert RunFolder(tmp_path).read_metrics()[3]["perf/mfu"] is None


def test_expert_load_is_summed_between_records_and_ends_with_the_run(tmp_path, clock):
    recorder = make(tmp_path, max_steps=10)
    run(recorder, clock, [1.0] * 10)
    loads = RunFolder(tmp_path).read_expert_load()
    assert [(r["step"], r["steps"]) for r in loads] == [(4, 4), (8, 4), (10, 2)]
    assert loads[0]["counts"] == [[12, 4, 8, 8]]


def test_bytes_go_on_with_those_of_earlier_starts(tmp_path, clock):
    recorder = make(tmp_path)
    recorder.begin(step=3, share=lambda value: value, bytes_on_wire=100)
    assert recorder.summary().bytes_on_wire == recorder.bytes_on_wire == 100
    recorder.start_step()
    clock.now += 1.0
    recorder.end_step(4, report(recorder), torch.tensor(1.0), lr=0.1)
    assert recorder.summary().bytes_on_wire == recorder.bytes_on_wire == 108
