"""A pool of ranks: real processes on gloo, one pool per world size, reused by all tests.

    def body(rank, world, factor): ...           # a module-level function
    results = ranks(2).run(body, factor=3)       # list, one per rank

A rank that raises fails the test with its traceback; a hang is a failure after the time limit. Either way the pool
is discarded, because its ranks no longer agree on what comes next.
"""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEFAULT_LIMIT_S = 120.0
# What ranks import is imported once, in the process that they are forked from: torch and Lightning take seconds.
PRELOADED = ["torch.distributed.checkpoint", "sidestream.run", "tests.rank_pool"]


def _serve(rank: int, world: int, store: str, connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    connection.send(("ready", None))
    while True:
        job = connection.recv()
        if job is None:
            break
        function, kwargs = job
        try:
            torch.manual_seed(1234)
            connection.send(("ok", function(rank, world, **kwargs)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """W ranks that wait for work.

    `fresh=True` starts each from nothing, for what reads the environment when it is imported.
    """

    def __init__(self, world: int, *, fresh: bool = False) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn" if fresh else "forkserver")
        if not fresh:
            context.set_forkserver_preload(PRELOADED)
        self._pipes, self._processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(
                target=_serve, args=(rank, world, store, theirs, dict(os.environ)), daemon=True
            )
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        try:
            self._collect(DEFAULT_LIMIT_S)
        except BaseException:
            self.discard()
            raise

    def run(
        self, function: Callable[..., Any], *, limit_s: float = DEFAULT_LIMIT_S, **kwargs: Any
    ) -> list[Any]:
        """Call `function(rank, world, **kwargs)` on every rank; return the results in rank order."""
        try:
            for pipe in self._pipes:
                pipe.send((function, kwargs))
            return self._collect(limit_s)
        except BaseException:
            # Also when pytest's own time limit interrupts: the answers still to come belong to no later job.
            self.discard()
            raise

    def _collect(self, limit_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + limit_s
        waiting = dict(zip(self._pipes, range(self.world)))
        while waiting:
            # After the first error the others get a moment to report, then they are stuck in a collective.
            remaining = min(deadline, time.monotonic() + 2.0 if errors else deadline) - time.monotonic()
            ready = wait(list(waiting), timeout=max(0.0, remaining))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "error", "the process died"
                if kind == "error":
                    errors.append(f"rank {rank}:\n{value}")
                results[rank] = value
        if errors or waiting:
            if waiting:
                after = "2 s after the error" if errors else f"{limit_s:.0f} s"
                errors.append(f"ranks {sorted(waiting.values())} did not finish within {after}")
            raise AssertionError("\n".join(errors))
        return [results[rank] for rank in range(self.world)]

    def discard(self) -> None:
        """End the processes; by id, only ours."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if _pools.get(self.world) is self:
            del _pools[self.world]
        self._folder.cleanup()


_pools: dict[int, RankPool] = {}


def ranks(world: int) -> RankPool:
    """The pool of this world size, started on first use."""
    if world not in _pools:
        _pools[world] = RankPool(world)
    return _pools[world]


@atexit.register
def discard_all() -> None:
    """End all ranks; new ones are there in a moment."""
    for pool in list(_pools.values()):
        pool.discard()
