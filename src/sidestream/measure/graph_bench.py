"""What a step graph gains and costs, on one rank: whole training steps with and without it, in alternating order.

    eager   prepare, run, check, commit
    graph   the same, `run` from a recording

Both train the same model in turn. Memory is how far the process grows during one attempt; for the graph, what the
recording owns is added. Recapture is what a capture costs beyond a replay once everything is warm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sidestream import build
from sidestream.config.schema import register
from sidestream.data.batch import Batch
from sidestream.graph.base import StepRunner
from sidestream.graph.none import NoGraph
from sidestream.graph.step import MIN_WARMUP, StepGraph
from sidestream.measure.peak_memory import peak_on
from sidestream.parallel.mesh import build_parallel
from sidestream.parallel.overflow import BudgetKeeper
from sidestream.parallel.step import TrainingStep
from sidestream.profiling.rounds import time_rounds
from sidestream.report.statistics import summarize

VOCAB_SIZE = 256


@dataclass(frozen=True)
class Job:
    """What to measure, in plain values.

    Attributes:
        conf: Folder of the config.
        cases: Overrides of train.py, one list per line of the result.
        rounds: Rounds that count.
        warmup: Rounds before them.
    """

    conf: str
    cases: list[list[str]]
    rounds: int
    warmup: int


class Trained:
    """A model that trains on this rank, and how its attempts are run."""

    def __init__(self, cfg: Any, device: torch.device) -> None:
        world = dist.get_world_size()
        experts = world if cfg.model.num_experts % world == 0 else 1
        parallel = build_parallel(
            expert_parallel_size=experts, device_type=device.type, timeout=timedelta(seconds=120)
        )
        sequences = cfg.data.global_batch_size // world
        micro = cfg.data.micro_batch_size
        micro = sequences if micro == "auto" else micro
        make = build.model_builder(cfg, vocab_size=VOCAB_SIZE, device=device, num_sequences=micro)
        self.cfg, self.device, self.model = cfg, device, make(parallel)
        reduction = build.reduction(cfg)
        reduction.shard(self.model, parallel)
        self.optimizer = build.optimizer_builder(cfg)(self.model)
        self.graph = StepGraph(warmup_steps=MIN_WARMUP)
        self.graphs: dict[str, StepRunner] = {"eager": NoGraph(), "graph": self.graph}
        for graph in self.graphs.values():
            graph.open(device, dist.barrier)
        with self.graph.place():
            reduction.attach(self.model, parallel)
        parts = self.model.parts
        mean_rows = max(1, parts.tokens_per_plan * parts.router.top_k)
        self.budget = BudgetKeeper(parts.dispatcher, parallel, device=device, mean_rows=mean_rows)
        self.step = TrainingStep(
            self.model,
            parallel=parallel,
            reduction=reduction,
            global_batch_size=cfg.data.global_batch_size,
            micro_batch_size=micro,
            autocast=build.PRECISIONS[cfg.trainer.precision][1] is not None,
            budget=self.budget,
        )
        self._sequences, self._draw = sequences, 0
        self.max_norm = cfg.trainer.gradient_clip_val

    def batch(self) -> Batch:
        """Random tokens of this rank, others in every call."""
        self._draw += 1
        generator = torch.Generator().manual_seed(self._draw * dist.get_world_size() + dist.get_rank())
        size = (self._sequences, self.cfg.data.seq_length + 1)
        tokens = torch.randint(0, VOCAB_SIZE, size, generator=generator)
        return Batch.of(tokens).to(self.device)

    def attempt(self, kind: str) -> None:
        """One attempt on tokens of its own."""
        graph = self.graphs[kind]
        batch = graph.bind(self.batch())
        self.step.prepare(batch)
        graph.run(
            lambda: self.step.run(batch),
            key=self.model.parts.dispatcher.budget,
            ready=True,
            rehearsal=lambda: self.step.rehearsal(batch),
        )

    def train(self, kind: str) -> float:
        """One step, with the repeated attempts of an overflow; returns its loss."""
        while True:
            self.attempt(kind)
            report = self.step.check()
            if self.budget.resolve(overflowed=report.overflowed, dropped=report.lost):
                break
        self.step.commit(report, optimizer_step=self.optimizer.step, max_norm=self.max_norm)
        return report.loss

    def close(self) -> None:
        for graph in self.graphs.values():
            graph.close()
        self.step.close()
        self.model.parts.dispatcher.close()


def run_plain(job: dict[str, Any], *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure every case. Collective."""
    plain = Job(**job)
    register()
    return [measure(case, plain, torch.device("cpu"), say=say) for case in plain.cases]


def measure(
    case: list[str], job: Job, device: torch.device, *, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure one configuration. Collective."""
    cfg = composed(job.conf, case)
    trained = Trained(cfg, device)
    kinds = list(trained.graphs)
    for kind in kinds:
        for _ in range(MIN_WARMUP + 1):  # the graph's third attempt captures
            trained.train(kind)
    memory = _memory(trained)

    def step(number: int, _: int) -> tuple[float, ...]:
        dist.barrier()
        begin = time.perf_counter()
        trained.train(kinds[number])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin,)

    seconds = time_rounds(len(kinds), step, parts=1, rounds=job.rounds, warmup=job.warmup, seed=0)[:, :, 0]
    tokens = cfg.data.global_batch_size * cfg.data.seq_length
    counts = trained.graph.counts()
    record: dict[str, Any] = {
        "case": case,
        "world_size": dist.get_world_size(),
        "tokens_per_step": tokens,
        **figures((1e3 * seconds).tolist(), kinds=kinds, tokens=tokens),
        "peak_memory_bytes": memory,
        "graph_bytes": counts.nbytes,
        "captures": counts.captures,
        "capture_seconds": counts.capture_seconds,
        "recapture_seconds": _recapture(trained),
    }
    trained.close()
    say(f"{' '.join(case) or 'tiny'}: {record['speedup']['median']:.3f} x the tokens/s of eager")
    return record


def figures(rounds_ms: Sequence[Sequence[float]], *, kinds: Sequence[str], tokens: int) -> dict[str, Any]:
    """The part of the record that follows from the times.

    Args:
        rounds_ms: Per round the milliseconds of a step, in the order of `kinds`: the first is compared with.
        tokens: Of a step.
    """
    step_ms = {kind: [times[number] for times in rounds_ms] for number, kind in enumerate(kinds)}
    speedup = summarize([first / other for first, other, *_ in rounds_ms])
    return {
        "step_ms": step_ms,
        "tokens_per_second": {kind: 1e3 * tokens / statistics.median(ms) for kind, ms in step_ms.items()},
        "speedup": {name: speedup[name] for name in ("median", "q1", "q3")},
    }


def composed(conf: str, overrides: list[str]) -> Any:
    """The config of train.py with these overrides."""
    with initialize_config_dir(version_base="1.3", config_dir=conf):
        cfg = compose("train", overrides)
    OmegaConf.resolve(cfg)
    return cfg


def _memory(trained: Trained) -> dict[str, int | None]:
    """Bytes that an attempt needs beside parameters, gradients and inputs."""
    eager = peak_on(trained.device, lambda: trained.attempt("eager"))
    beside = peak_on(trained.device, lambda: trained.attempt("graph"))
    return {"eager": eager, "graph": None if beside is None else trained.graph.counts().nbytes + beside}


def _recapture(trained: Trained) -> float:
    """Seconds of a capture that follows another one."""
    trained.graph.restart()
    for _ in range(MIN_WARMUP):
        trained.attempt("graph")
    begin = time.perf_counter()
    trained.attempt("graph")
    captured = time.perf_counter() - begin
    begin = time.perf_counter()
    trained.attempt("graph")
    return captured - (time.perf_counter() - begin)
