"""Time that passes only where a test lets it: no test asks how fast, or how busy, the machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch


class VirtualClock:
    """Stands in for the module `time`. A sleep returns at once and moves the clock on.

    Args:
        tick: Seconds that each reading takes: how long work lasts that does not sleep.
    """

    def __init__(self, *, tick: float = 0.0) -> None:
        self.now, self.tick = 1000.0, tick

    def monotonic(self) -> float:
        self.now += self.tick
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


@contextmanager
def virtual_time(*modules: ModuleType, tick: float = 0.0) -> Iterator[VirtualClock]:
    """While it is open these modules, which `import time`, read one virtual clock."""
    clock = VirtualClock(tick=tick)
    with ExitStack() as patched:
        for module in modules:
            patched.enter_context(patch.object(module, "time", clock))
        yield clock
