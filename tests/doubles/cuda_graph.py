"""A double of the part of `torch.cuda` that captures graphs, on a CPU, with the properties that are easy to forget.

* A capture runs nothing: memory and random numbers are at its end what they were at its beginning
  (torch notes, "CUDA semantics": kernels of a capture are recorded, not executed).
* A replay touches the device only: no counter of the host moves.
* Work on a stream that nobody waits for, and work that starts before its inputs are there, is an error
  (the stream must wait for the current one, and the current one for it).
* A capture begins with an idle device, on the stream on which the warm-up ran; two captures share a pool.
* A graph that is not reset at the end is reported (microsoft/dion#108: it hangs the exit of the process group).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sidestream.exchange.ops import add_bytes, byte_counters
from sidestream.graph.program import Program
from sidestream.graph.recording import Recording


class Stream:
    def __init__(self, device: torch.device, name: str = "side") -> None:
        self.device, self.name = device, name
        self.behind: set[str] = set()  # streams whose work so far is waited for
        self.used = False

    def wait_stream(self, other: Stream) -> None:
        self.behind.add(other.name)
        other.used = False


class _DryRecording(Recording):
    """Takes back what was written to memory that the recording did not make."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [
            t
            for value in (*args, *(kwargs or {}).values())
            for t in (value if isinstance(value, list | tuple) else [value])
        ]
        if not any(type(t).__name__ == "DTensor" for t in flat):
            for tensor in flat:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._index and storage._cdata not in self._kept:
                        self._kept[storage._cdata] = (storage, storage.clone())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def take_back(self) -> None:
        for storage, before in self._kept.values():
            storage.copy_(before)


class CUDAGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._program = cuda, None
        cuda.alive.append(self)

    def replay(self) -> None:
        assert self._program is not None, "replay of a graph that was not captured"
        assert self._cuda.current is not self._cuda.main, "replay on the stream of somebody else"
        counted = byte_counters()
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for call in self._program.calls:
                call()
        now = byte_counters()
        add_bytes({id: (a - now[id][0], b - now[id][1]) for id, (a, b) in counted.items() if id in now})
        self._cuda.log.append("replay")
        self._cuda.idle = False

    def reset(self) -> None:
        assert self._cuda.idle, "reset while a replay runs"
        self._program = None
        self._cuda.alive.remove(self)


class FakeCuda:
    """Stands for `torch.cuda`."""

    def __init__(self) -> None:
        self.main = Stream(torch.device("cpu"), "main")
        self.current, self.idle = self.main, True
        self.log: list[str] = []
        self.alive: list[CUDAGraph] = []
        self._pools = 0

    def Stream(self, device: torch.device) -> Stream:
        return Stream(device)

    def graph_pool_handle(self) -> tuple[int, int]:
        self._pools += 1
        return (0, self._pools)

    def CUDAGraph(self) -> CUDAGraph:
        return CUDAGraph(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def synchronize(self, device: Any = None) -> None:
        self.idle = True

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert self.current.name in stream.behind, "the stream runs ahead of its inputs"
        stream.behind.clear()
        before, self.current = self.current, stream
        self.idle = False
        try:
            yield
        finally:
            stream.used = True
            self.current = before

    @contextmanager
    def graph(
        self, graph: CUDAGraph, *, pool: Any, stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        assert self.idle, "a capture begins with an idle device"
        assert pool == (0, 1), "captures share a pool"
        assert capture_error_mode == "thread_local", "other threads may use the device"
        before, self.current = self.current, stream
        random, recording = torch.get_rng_state(), _DryRecording()
        try:
            with recording:
                yield
        finally:
            self.current = before
        recording.take_back()
        torch.set_rng_state(random)
        assert not recording.findings, recording.findings
        graph._program = Program(recording)
        self.log.append("capture")

    def finish(self) -> None:
        """At the end of a test."""
        assert not self.alive, "a graph outlives its run"
