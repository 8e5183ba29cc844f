"""Writes run folders as train.py leaves them, without training: small, and with losses that are known."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml

from sidestream.tracking import names
from sidestream.tracking.result import Metrics, Overflow, OverlapResult, RunResult

CONFIG: dict[str, Any] = {
    "name": "train",
    "seed": 1,
    "model": {"num_layers": 4, "hidden_size": 64},
    "dispatcher": {"_target_": "sidestream.dispatch.alltoall.AllToAllDispatcher", "capacity_factor": None},
    "overlap": {"_target_": "sidestream.overlap.none.NoOverlap", "enabled": True},
    "fusion": {"_target_": "sidestream.fusion.grouped.GroupedExperts"},
    "graph": {"_target_": "sidestream.graph.none.NoGraph"},
    "link": {"_target_": "sidestream.exchange.link.NativeLink"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.003},
    "data": {"cache_dir": "/a", "seq_length": 32},
    "trainer": {"devices": 2, "log_every_n_steps": 5},
    "callbacks": {"progress": {"enabled": True}},
    "logger": {},
    "paths": {"log_dir": "logs"},
}
CHOICES = {
    "model": "tiny",
    "dispatcher": "alltoall",
    "overlap": "none",
    "fusion": "grouped",
    "graph": "none",
    "link": "native",
    "optimizer": "adamw",
}
STEPS = (5, 10, 15, 20)
TOKENS_PER_STEP = 100


def losses(seed: int, shift: float = 0.0) -> dict[int, float]:
    """Tokens -> validation loss; a seed moves it by 0.01."""
    return {TOKENS_PER_STEP * step: 5.0 - 0.1 * step + 0.01 * seed + shift for step in STEPS}


def write_run(
    folder: Path,
    *,
    seed: int = 1,
    choices: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    result: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    val: dict[int, float] | None = None,
    step_ms: float = 10.0,
    status: str = "finished",
    load: bool = False,
    picture: str | None = None,
) -> Path:
    """Writes one run.

    Args:
        choices: over `CHOICES`; sets the config's `_target_` of the group too.
        config: dotted key -> value, over `CONFIG`.
        result: key or `part.key` -> value, over a finished result.json.
        val: tokens -> validation loss, default `losses(seed)`.
        picture: name of an overlap picture to write.
    """
    settings = copy.deepcopy(CONFIG)
    for group, option in (choices or {}).items():
        settings.setdefault(group, {})["_target_"] = f"sidestream.{group}.{option}"
    for key, value in {"seed": seed, **(config or {})}.items():
        _put(settings, key, value)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "resolved.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    finished = _result(seed, {**CHOICES, **(choices or {})}, status)
    for key, value in (result or {}).items():
        _put(finished, key, value)
    (folder / "result.json").write_text(json.dumps(finished), encoding="utf-8")
    described = {"cpu": "Some CPU", "previous": [], **(env or {})}
    (folder / "env.json").write_text(json.dumps(described), encoding="utf-8")
    records = _records(losses(seed) if val is None else val, step_ms)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
    )
    if load:
        record = {"step": 20, "steps": 20, "counts": [[1, 2, 3, 2], [2, 2, 2, 2]]}
        (folder / "expert_load.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    if picture is not None:
        drawn = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="10"><rect width="9" height="9"/></svg>'
        (folder / picture).write_text(drawn, encoding="utf-8")
    return folder


def write_sweep(folder: Path, *, overlaps: tuple[str, ...] = ("none", "chunked"), seeds=(1, 2, 3)) -> Path:
    """Writes a run for each schedule and seed; the loss of the n-th schedule is n * (0.05 + 0.01 * seed) lower."""
    job = 0
    for place, overlap in enumerate(overlaps):
        for seed in seeds:
            write_run(
                folder / f"{job}-overlap-{overlap}_seed-{seed}",
                seed=seed,
                choices={"overlap": overlap},
                val=losses(seed, -place * (0.05 + 0.01 * seed)),
                step_ms=10.0 - place,
                load=True,
                result={"changes_model": overlap == "shortcut"},
            )
            job += 1
    return folder


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parts, last = key.split(".")
    for part in parts:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _result(seed: int, choices: dict[str, str], status: str) -> dict[str, Any]:
    return RunResult(
        status=status,  # type: ignore[arg-type]
        choices=choices,
        device="cpu",
        world_size=2,
        expert_parallel_size=2,
        transport="torch",
        link=choices["link"],
        seed=seed,
        precision="32-true",
        data_checksum="abc",
        changes_model=False,
        metrics=Metrics(
            tokens=TOKENS_PER_STEP * STEPS[-1],
            tokens_per_second=1.0,
            step_ms=1.0,
            mfu=0.25,
            peak_memory_bytes=2**20,
            bytes_on_wire=5_000_000,
        ),
        overflow=Overflow(events=1, replays=2, dropped=3),
        overlap=OverlapResult(
            compute_ms=6.0, comm_ms=4.0, serial_ms=10.0, overlapped_ms=8.0, e_hide=0.5, bound=0.8
        ),
        versions={"torch": "2.13.0"},
        commit="0123456789abcdef",
        error=None if status == "finished" else "ValueError: it broke",
    ).as_dict()


def _records(val: dict[int, float], step_ms: float) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step in STEPS:
        tokens = TOKENS_PER_STEP * step
        # The first record is of the warm-up, and slow; the others spread by 1 ms.
        spread = {5: 90.0, 10: -1.0, 15: 0.0, 20: 1.0}[step]
        records.append(
            {
                names.STEP: step,
                names.TOKENS: tokens,
                names.TRAIN_LOSS: val.get(tokens, 5.0) - 0.5,
                names.STEP_MS: step_ms + spread,
                names.TOKENS_PER_SECOND: 1e5 / (step_ms + spread),
            }
        )
        if tokens in val:
            records.append({names.STEP: step, names.TOKENS: tokens, names.VAL_LOSS: val[tokens]})
    return records
