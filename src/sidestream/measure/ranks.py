"""Starts the ranks of a measurement on this machine and waits for them. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sidestream.config.layout import Layout
from sidestream.launch import phase
from sidestream.launch.processes import PARENT, kill_group
from sidestream.launch.scratch import scratch
from sidestream.launch.silence import Silence
from sidestream.launch.supervisor import import_path, rank_environment
from sidestream.tracking.folder import write_json_atomic

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_POLL_SECONDS = 0.1
_SECONDS_AFTER_FAILURE = 3.0


class Failed(Exception):
    """A rank ended badly; the message is for the user."""


def run_ranks(
    job: dict[str, Any], *, world_size: int, module: str = "sidestream.measure.layer"
) -> dict[str, Any]:
    """Run `sidestream.measure.worker` on every rank, one thread each.

    Args:
        job: The module's `Job` in plain types, and `malloc`.
        module: Its `run_plain(job, say=...)` returns the records.

    Returns:
        `records`, `pinned`, `memory_kept`.

    Raises:
        Failed: A rank did not end with 0.
    """
    layout = Layout(world_size, world_size, world_size, 1, 1, 1, "cpu")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        write_json_atomic(folder / "job.json", {**job, "module": module})
        processes = []
        for rank in range(world_size):
            log = stack.enter_context((folder / f"log{rank}").open("wb"))
            environment = {
                **os.environ,
                **rank_environment(layout, rank=rank, store=folder / "store"),
                **dict.fromkeys(THREADS, "1"),
                "PYTHONPATH": import_path(),
                "TRANSFORMERS_VERBOSITY": "error",
                PARENT: str(os.getpid()),
            }
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sidestream.measure.worker", "--folder", str(folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(kill_group, process)
            processes.append(process)
        if given_up := _wait(processes, folder):
            raise Failed(given_up)
        codes = [process.poll() for process in processes]
        if any(codes):
            raise Failed(_explain(folder, codes))
        return json.loads((folder / "records.json").read_text(encoding="utf-8"))


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> str:
    """Return when all have ended, a moment after the first has failed, or when the others have been silent too long.

    Returns:
        Which rank was given up, and where it was; empty if none was.
    """
    deadline, first_end = float("inf"), None

    def running() -> list[int]:
        return [rank for rank, process in enumerate(processes) if process.poll() is None]

    silence = Silence(
        lambda: {rank: phase.read(folder, rank) for rank in running()},
        lambda: {rank: processes[rank].pid for rank in running()},
    )
    while left := running():
        now = time.monotonic()
        codes = [process.returncode for process in processes]
        if any(codes):
            deadline = min(deadline, now + _SECONDS_AFTER_FAILURE)
        elif 0 in codes:
            first_end = first_end or now
        silence.look()
        if now > deadline:
            return ""
        if deadline == float("inf") and silence.too_long(first_end=first_end):
            rank = (silence.culprits() or left)[0]
            how = "stopped by a signal" if rank in silence.stopped else "no sign of life"
            return f"rank {rank}: {how} for {silence.seconds:.0f} s, in: {phase.read(folder, rank)}; ended"
        time.sleep(_POLL_SECONDS)
    return ""


def _explain(folder: Path, codes: list[int | None]) -> str:
    told = sorted(folder.glob("error*"))
    if told:
        return told[0].read_text(encoding="utf-8")
    rank = next(rank for rank, code in enumerate(codes) if code)
    tail = (folder / f"log{rank}").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return "\n".join([f"rank {rank} ended with {codes[rank]}", *tail])
