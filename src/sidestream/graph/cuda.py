"""`backend=cuda`: the attempt as a `torch.cuda.CUDAGraph`.

Warm-up, capture and everything that makes the autograd state of parameters happen on one stream of its own: a gradient
accumulates on the stream on which its parameter was first used, and a capture must not reach another one. Sources:
torch's notes on CUDA graphs; Megatron-Core `full_cuda_graph.py`; pytorch#180090.

Not run on a GPU so far. `tests/graph/test_cuda_graph.py` runs it against a double of the CUDA calls it makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sidestream.exchange.ops import add_bytes, byte_counters


class CudaGraph:
    """One captured function.

    Args:
        graph: Captured.
        sent: Bytes that a replay sends: the counters of channels live on the host, and a replay does not touch it.
    """

    def __init__(
        self, graph: Any, *, stream: Any, cuda: Any, sent: dict[int, tuple[int, int]], seconds: float
    ) -> None:
        self._graph, self._stream, self._cuda, self._sent = graph, stream, cuda, sent
        self.seconds = seconds

    @property
    def nbytes(self) -> int:
        return 0  # the allocator's pool has it

    def replay(self) -> None:
        with _on(self._cuda, self._stream):
            self._graph.replay()
        add_bytes(self._sent)

    def close(self) -> None:
        """Wait for the last replay and free the graph: one that is alive at the end of a process group hangs it."""
        if self._graph is not None:
            self._cuda.synchronize()
            self._graph.reset()
            self._graph = None


class CudaBackend:
    """Captures on one stream, from one memory pool.

    Args:
        device: The GPU.
        cuda: `torch.cuda`, or a double of it.
    """

    name = "cuda"
    runs = False

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)
        self._pool = cuda.graph_pool_handle()

    def place(self) -> AbstractContextManager[Any]:
        return _on(self._cuda, self._stream)

    def warm_up(self, fn: Callable[[], None], *, last: bool) -> None:
        with self.place():
            fn()

    def capture(self, fn: Callable[[], None], seen: Any) -> CudaGraph:
        begin, counted = time.perf_counter(), byte_counters()
        self._cuda.synchronize()
        graph = self._cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog and a data loader, may use the GPU meanwhile.
        where = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        # Weights cast inside the capture must not be found in autocast's cache outside, nor the other way round.
        torch.clear_autocast_cache()
        with self._cuda.graph(graph, **where):
            fn()
        torch.clear_autocast_cache()
        now = byte_counters()
        sent = {id: (now[id][0] - a, now[id][1] - b) for id, (a, b) in counted.items() if id in now}
        seconds = time.perf_counter() - begin
        return CudaGraph(graph, stream=self._stream, cuda=self._cuda, sent=sent, seconds=seconds)

    def close(self) -> None:
        self._pool = None


@contextmanager
def _on(cuda: Any, stream: Any) -> Iterator[None]:
    """Run on `stream`, behind the current one, and let that wait for it."""
    current = cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with cuda.stream(stream):
        yield
    current.wait_stream(stream)
