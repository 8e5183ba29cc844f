"""One rank of a measurement: `python -m sidestream.measure.worker --folder <folder>`, started by `ranks.py`."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

from sidestream import matplotlibrc
from sidestream.launch import phase
from sidestream.launch.allocator import keep_freed_memory
from sidestream.launch.processes import die_with_parent
from sidestream.launch.worker import RankEnv, available_cores, say_phase
from sidestream.tracking.folder import write_json_atomic


def pin(env: RankEnv) -> bool:
    """Give this rank a core of its own. Returns False where the system or the number of cores does not allow it."""
    cores = available_cores()
    if not hasattr(os, "sched_setaffinity") or len(cores) < env.local_world_size:
        return False
    os.sched_setaffinity(0, {cores[env.local_rank]})
    return True


def main() -> int:
    die_with_parent(signal.SIGKILL)
    matplotlibrc.ignore()
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    plain = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    env = RankEnv.from_environ()
    timeout = plain.pop("timeout_s", 300)
    say_phase(env)
    phase.set_timeout(timeout)
    pinned = pin(env)
    kept = plain.pop("malloc") == "keep" and keep_freed_memory()
    # Peers talk a lot while they are imported.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

    import torch

    from sidestream.parallel.world import join_world, leave_world

    module = importlib.import_module(plain.pop("module"))
    torch.set_num_threads(1)
    phase.enter(phase.MEETING)
    join_world(env, torch.device("cpu"), timeout=timedelta(seconds=timeout))
    phase.enter(phase.MEASURING)
    try:
        records = module.run_plain(plain, say=print if env.rank == 0 else lambda _: None)
    except (ValueError, NotImplementedError) as error:
        (folder / f"error{env.rank}").write_text(str(error), encoding="utf-8")
        return 1
    phase.enter(phase.LEAVING)
    leave_world()
    if env.rank == 0:
        write_json_atomic(
            folder / "records.json", {"records": records, "pinned": pinned, "memory_kept": kept}
        )
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without waiting for the threads of a group whose other ranks may have failed.
    os._exit(code) if code else sys.exit(0)
