"""Runs of a wandb group through the public API, in the form of run folders. Untested without a server.

What `logger=wandb` sends is the config, choices, identity and the records of metrics.jsonl. result.json is not sent:
facts that are only in it stay null, and the comparison says which of them nobody checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidestream.compare.errors import CompareError
from sidestream.compare.runs import LeftOut, Run, as_typed, flatten
from sidestream.tracking import names
from sidestream.tracking.wandb_mode import check_folder

# Beside the config in what the logger sends, see `sidestream.run`.
_IDENTITY = (
    "world_size",
    "expert_parallel_size",
    "expert_data_parallel_size",
    "commit",
    "torch",
    "gpu",
    "overrides",
    "data_checksum",
    "choices",
)
_METRICS = {
    "train_loss": names.TRAIN_LOSS,
    "val_loss": names.VAL_LOSS,
    "mfu": names.MFU,
    "peak_memory_bytes": names.PEAK_MEMORY,
}
_OVERLAP = {
    "compute_ms": names.OVERLAP_COMPUTE_MS,
    "comm_ms": names.OVERLAP_COMM_MS,
    "serial_ms": names.OVERLAP_SERIAL_MS,
    "overlapped_ms": names.OVERLAP_OVERLAPPED_MS,
    "e_hide": names.OVERLAP_E_HIDE,
    "e_comm": names.OVERLAP_E_COMM,
    "bound": names.OVERLAP_BOUND,
}


def read(project: str, group: str, *, api: Any = None) -> tuple[list[Run], list[LeftOut]]:
    """Reads the runs of a group, in the order in which they began.

    Args:
        project: `entity/project`.
        api: A `wandb.Api`; None makes one, with the user's key.

    Raises:
        CompareError: wandb is not installed, does not answer, or has no run in the group.
    """
    if api is None:
        try:
            import wandb
        except ModuleNotFoundError:
            raise CompareError(
                f"wandb={project}: wandb is not installed; expected it; run pip install 'wandb>=0.31,<0.32'"
            ) from None
        check_folder()
        api = wandb.Api()
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for run, rows in _fetch(api, project, group):
        name = f"{run.name} ({run.id})"
        if run.state != "finished":
            left_out.append(LeftOut(name=name, reason=f"status {run.state} in wandb"))
        else:
            runs.append(_run(name, run.config, rows))
    if not runs and not left_out:
        raise CompareError(
            f"group={group}: no run of {project} is in it; expected the name of a sweep folder; pass --group GROUP"
        )
    return runs, left_out


def _fetch(api: Any, project: str, group: str) -> list[tuple[Any, list[dict[str, Any]]]]:
    """Every run of the group with its history; all that asks the server."""
    try:
        return [
            (run, [dict(row) for row in run.scan_history()] if run.state == "finished" else [])
            for run in api.runs(project, filters={"group": group}, order="+created_at")
        ]
    except Exception as error:  # wandb's, its HTTP library's, and ValueError for a project that is not there
        told = (str(error) or type(error).__name__).splitlines()[0]
        raise CompareError(
            f"wandb={project}: {told}; expected entity/project that your key can read; pass --wandb ENTITY/PROJECT"
        ) from None


def _run(name: str, sent: Mapping[str, Any], rows: list[dict[str, Any]]) -> Run:
    config: Mapping[str, Any] = {key: value for key, value in sent.items() if not key.startswith("_")}
    identity = {key: config.get(key) for key in _IDENTITY}
    records = sorted(_records(rows), key=lambda record: record[names.STEP])
    choices = identity["choices"] or {}
    torch, gpu = identity["torch"], identity["gpu"]
    result: dict[str, Any] = {
        "status": "finished",
        "choices": choices,
        "device": "cuda" if gpu else "cpu",
        **{key: identity[key] for key in ("world_size", "expert_parallel_size", "commit", "data_checksum")},
        "link": choices.get("link"),
        "seed": config.get("seed"),
        "precision": (config.get("trainer") or {}).get("precision"),
        "versions": {"torch": torch},
        "metrics": {
            **{key: _last(records, metric) for key, metric in _METRICS.items()},
            "tokens": _last(records, names.TOKENS),
        },
        "overlap": {key: _last(records, metric) for key, metric in _OVERLAP.items()},
    }
    return Run(
        name=name,
        config=flatten({key: value for key, value in config.items() if key not in _IDENTITY}),
        choices=choices,
        result=result,
        metrics=records,
        env={"gpu": gpu},
        sweep="wandb",
        overrides=as_typed(identity["overrides"]),
    )


def _records(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The history as records of metrics.jsonl; rows without tokens, such as pictures, are not among them."""
    return [
        {**row, names.STEP: row.get("trainer/global_step", row.get("_step", 0))}
        for row in rows
        if row.get(names.TOKENS) is not None
    ]


def _last(records: list[dict[str, Any]], metric: str) -> Any:
    return next((r[metric] for r in reversed(records) if r.get(metric) is not None), None)
