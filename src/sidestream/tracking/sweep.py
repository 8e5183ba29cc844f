"""A sweep's jobs and what is left of them in its folder: `sweep.csv`, one row per job."""

import csv
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidestream.launch import arguments
from sidestream.tracking.folder import write_text_atomic
from sidestream.tracking.spreadsheet import as_csv
from sidestream.tracking.untrusted import Unreadable, printable, read_bytes, read_text, read_yaml

TABLE = "sweep.csv"
OF_A_JOB = ("number", "state", "reason", "seconds", "folder")  # the first columns; those of the keys follow
OF_METRICS = ("val_loss", "train_loss", "tokens", "tokens_per_second", "step_ms", "peak_memory_bytes")
RECIPES = ("experiment", "arm")  # groups whose options set keys of other groups
OF_RESULT = ("transport", "link", "world_size", "seed")

_STOPPED = {
    code: request for request in (signal.SIGINT, signal.SIGTERM) for code in (128 + request, -request)
}


@dataclass
class Job:
    """One job of a sweep and how it ended.

    Attributes:
        folder: Absolute.
        overrides: All of them, as typed on the job's command line; without `hydra.` ones.
        label: The overrides that tell it from the other jobs.
        code: Exit code; None before it has ended.
        seconds: How long its last start ran.
        result: The content of result.json, {} without one.
        refused: Why its config cannot run, one line; empty if it can.
        from_checkpoint: It goes on from the checkpoint in its folder.
        log_start: Bytes that earlier starts left in its stdout.log.
    """

    number: int
    folder: Path
    overrides: list[str]
    label: str = ""
    code: int | None = None
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    running: bool = False
    from_checkpoint: bool = False
    log_start: int = 0

    @property
    def val_loss(self) -> float | None:
        return self.result.get("metrics", {}).get("val_loss")

    @property
    def state(self) -> str:
        """`done`, `skipped`, `FAILED`, `interrupted`, `running` or `not started`."""
        if self.refused:
            return "skipped"
        if self.code is None:
            return "running" if self.running else "not started"
        if self.code == 0:
            return "done"
        return "interrupted" if self.code in _STOPPED else "FAILED"

    @property
    def reason(self) -> str:
        """Why it was skipped, failed or stopped, in one line; empty otherwise."""
        if self.state == "skipped":
            return self.refused
        if self.state == "interrupted":
            assert self.code is not None
            return f"stopped by {_STOPPED[self.code].name}"
        if self.state != "FAILED":
            return ""
        log = self.folder / "stdout.log"
        try:
            text = read_bytes(log)[self.log_start :].decode(errors="replace")
        except Unreadable:
            text = ""
        errors = [line for line in text.split("\n") if line.startswith("error: ")]
        found = printable(errors[-1].removeprefix("error: ")) if errors else ""
        return found or f"exit code {self.code}; see {os.path.relpath(log)}"

    def line(self) -> str:
        """Returns the job's line of the console and of the table printed at the end."""
        start = f"#{self.number:<3} {self.state:11}"
        label = printable(self.label, limit=1000)  # of a sweep that runs again: from its folder
        if self.refused:
            return f"{start} {label}: {printable(self.refused, limit=2000)}"
        loss = "" if self.val_loss is None else f"val_loss {self.val_loss:.4f}"
        return f"{start} {loss:16} {self.seconds:7.1f} s  {label}"


def differing(jobs: Sequence[Job]) -> list[str]:
    """Returns the keys that not all jobs set to the same value, in the order of the command line."""
    values: dict[str, list[str]] = {}
    for job in jobs:
        for part in job.overrides:
            values.setdefault(arguments.key_of(part), []).append(arguments.value_of(part))
    return [key for key, found in values.items() if len(found) != len(jobs) or len(set(found)) > 1]


SAVED = "multirun.yaml"  # Hydra writes it beside the jobs


def group_of(folder: Path, name: str) -> str | None:
    """Returns what runs of a sweep are grouped by elsewhere: name, date and time; None for a run of its own.

    Args:
        folder: The sweep's, which may be a time below a date.
        name: Value of the key `name`.
    """
    folder = folder.resolve()
    if not (folder / SAVED).exists():
        return None
    date = folder.parent.name if re.fullmatch(r"\d{4}-\d\d-\d\d", folder.parent.name) else ""
    return "-".join(part for part in (name, date, folder.name) if part)[:128]


def typed(folder: Path) -> list[str]:
    """Returns the overrides that a sweep was started with, as they were typed, [] where they cannot be read."""
    try:
        found = read_yaml(folder / SAVED, inside=folder)["hydra"]["overrides"]["task"]
    except (Unreadable, KeyError, TypeError):
        return []
    return [part for part in found if isinstance(part, str)] if isinstance(found, list) else []


def rows(folder: Path, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Returns the table: per job, column -> value, None where there is none. All rows have the same columns.

    A column of result.json that has the name of a key (`seed`, `link`) is left out: the key's column says it.
    """
    keys = differing(jobs)
    table = []
    for job in jobs:
        metrics = job.result.get("metrics", {})
        own = {arguments.key_of(part): arguments.value_of(part) for part in job.overrides}
        columns: dict[str, Any] = {
            "number": job.number,
            "state": job.state,
            "reason": job.reason,
            "seconds": round(job.seconds, 1) or None,
            "folder": os.path.relpath(job.folder, folder),
            **{key: own.get(key) for key in keys},
        }
        for name in OF_METRICS:
            columns.setdefault(name, metrics.get(name))
        for name in OF_RESULT:
            columns.setdefault(name, job.result.get(name))
        table.append(columns)
    return table


def write_table(folder: Path, jobs: Sequence[Job]) -> None:
    """Writes `sweep.csv` so that readers see the old table or the new one.

    Args:
        folder: The sweep's; it is made if it does not exist.
        jobs: All of the sweep, at least one, in the order of their numbers.
    """
    table = rows(folder, jobs)
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / TABLE, as_csv(table))


def read_table(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of `sweep.csv` as text, [] if there is none that can be read."""
    try:
        text = read_text(folder / TABLE, inside=folder)
        return list(csv.DictReader(io.StringIO(text, newline="")))
    except (Unreadable, csv.Error):
        return []


def after_sweep(folder: Path, jobs: Sequence[Job]) -> None:
    """Called once after the last job of a sweep, also of one that was stopped or in which jobs failed.

    Writes the table, the report of scripts/compare.py if two runs or more finished, and a table in wandb if jobs were
    logged there. What goes wrong in the last two is said and is no reason for a finished sweep to fail.

    Args:
        folder: The sweep's.
        jobs: All of the sweep, those included that were skipped or never started.
    """
    write_table(folder, jobs)
    trained = [job for job in jobs if job.code == 0 and (job.folder / "metrics.jsonl").exists()]
    for what, make in (("report", _report), ("wandb table", _wandb_table)):
        try:
            make(folder, jobs, trained)
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(f"no {what}: {printable(first)}", file=sys.stderr, flush=True)


def _report(folder: Path, jobs: Sequence[Job], trained: Sequence[Job]) -> None:
    """compare.html and its companions, of what the sweep varies."""
    from sidestream.compare.arms import compare
    from sidestream.compare.outputs import write
    from sidestream.compare.runs import read_folders

    if len(trained) < 2:
        return
    runs, left_out = read_folders([folder])
    comparison = compare(runs, left_out=left_out)
    page = next(path for path in write(comparison, folder) if path.suffix == ".html")
    print(f"report: {os.path.relpath(page)}", flush=True)


def _wandb_table(folder: Path, jobs: Sequence[Job], trained: Sequence[Job]) -> None:
    if any((job.folder / "wandb_id").exists() for job in trained):
        from sidestream.tracking.wandb_sweep import log_table

        failed = any(job.state not in ("done", "skipped") for job in jobs)
        log_table(folder, rows(folder, jobs), config=_resolved(trained[0]), exit_code=int(failed))


def _resolved(job: Job) -> dict[str, Any]:
    return read_yaml(job.folder / ".hydra" / "resolved.yaml", inside=job.folder)
