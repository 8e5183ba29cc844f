"""What `predict.py` does with a composed config: predict, print, write."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.launch import arguments
from sidestream.predict.picture import draw
from sidestream.predict.predict import Prediction, predict
from sidestream.predict.report import record, same_figures, text
from sidestream.report.table import Column, Table
from sidestream.tracking.folder import write_json_atomic

SHORT = "expert_parallel_size="
GROUPS = ("cluster", "model", "dispatcher", "overlap", "fusion", "graph", "strategy", "link")
_jobs: list[dict[str, Any]] = []  # of a sweep: one row each


def rewrite() -> None:
    """Lets users leave out `strategy.` in front of `expert_parallel_size`."""
    sys.argv[1:] = [f"strategy.{part}" if part.startswith(SHORT) else part for part in sys.argv[1:]]


def start(cfg: DictConfig) -> None:
    """Predict one config. What cannot be laid out, or does not fit, ends with one line and exit code 2.

    In a sweep a job that is refused has its reason below the table, and the others go on.
    """
    hydra = HydraConfig.get()
    choices = {name: hydra.runtime.choices[name] for name in GROUPS if hydra.runtime.choices.get(name)}
    sweeps = hydra.mode == RunMode.MULTIRUN
    if not sweeps:
        arguments.refuse_study(hydra, sys.argv[1:])
    label = " ".join(hydra.overrides.task)
    try:
        found = predict(_without_hydra(cfg), cluster=choices.get("cluster", ""), model=choices["model"])
    except ConfigError as error:
        if not sweeps:
            # Hydra would print the overrides and a hint in front of an exception.
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
        _jobs.append({"job": label, "refused": str(error)})
        return
    folder = Path(hydra.runtime.output_dir)
    command = shlex.join([*cli.typed(), *sys.argv[1:]])
    write_json_atomic(folder / "prediction.json", record(found, command=command, choices=choices))
    if cfg.predict.plot:
        draw(found.asked, folder / "prediction.png", title=_title(found, choices))
    if sweeps:
        _jobs.append({"job": label, "found": found, "alike": same_figures(choices)})
        return
    print(text(found, choices=choices))
    print(os.path.relpath(folder / "prediction.json"), end="")
    print(f" {os.path.relpath(folder / 'prediction.png')}" if cfg.predict.plot else "", flush=True)


def _without_hydra(cfg: DictConfig) -> DictConfig:
    cfg = cfg.copy()
    with read_write(cfg), open_dict(cfg):
        cfg.pop("hydra", None)
    return cfg


def _title(found: Prediction, choices: dict[str, str]) -> str:
    return (
        f"{choices['model']} on {choices['cluster']}, {found.step.gpus} GPUs, dispatcher={choices['dispatcher']}, "
        f"{found.asked.job.tokens} tokens a rank"
    )


class TableOfSweep(Callback):
    """Prints one row per job when a sweep has ended."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not _jobs:
            return
        print(sweep_table(_jobs))
        for job in _jobs:
            if "refused" in job:
                print(f"refused: {job['job']}: {job['refused']}")
        print(os.path.relpath(config.hydra.sweep.dir), flush=True)


def sweep_table(jobs: list[dict[str, Any]]) -> str:
    """The jobs that were predicted, side by side, and under them which dispatchers have the same figures."""
    columns = (
        Column("job", code=True),
        "step, ms",
        "tokens/s per GPU",
        "TFLOP/s per GPU",
        "exposed",
        "memory, GB",
        "what binds",
    )
    rows = []
    for job in jobs:
        if "refused" in job:
            rows.append((job["job"], "refused", *("" for _ in columns[2:])))
            continue
        found: Prediction = job["found"]
        step = found.step
        rows.append(
            (
                job["job"],
                f"{1e3 * step.seconds:.1f}",
                f"{step.tokens_per_second_per_gpu:.0f}",
                f"{step.flops_per_gpu / 1e12:.0f}",
                f"{(step.exposed + step.reduction) / step.seconds:.1%}",
                f"{found.memory.total / 1e9:.0f}",
                found.binds,
            )
        )
    alike = dict.fromkeys(job["alike"] for job in jobs if job.get("alike"))
    return "\n".join([Table(columns, rows).markdown(), *alike])
