"""Is a serial run serial? What is computed while rows travel, from the operators that really ran.

with SerialLog() as log:
    ...forward and backward, with `schedule.enabled` off...
log.problem()                     "mm is computed while dispatch travels", or None
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_STARTS = ("sidestream::start_", "sidestream::call_")
_WAITS = ("sidestream::wait_", "sidestream::wait_call_")
_BACKWARD = ".backward"


def carries_rows(tag: str) -> bool:
    """Transfers of counts, ids and weights are tagged `<name>.<what>`; they are small, and may start early."""
    return "." not in tag.removesuffix(_BACKWARD)


class SerialLog(TorchDispatchMode):
    """Takes note of matrix products and attention that run between a start and its wait, in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self._flying: dict[int, str] = {}
        self._hidden: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in _STARTS:
            *_, ticket, tag = args
            if carries_rows(tag):
                self._flying[ticket] = tag
        elif name in _WAITS:
            self._flying.pop(args[-1], None)
        elif self._flying and _is_work(name):
            self._hidden += [(name.removeprefix("aten::"), tag) for tag in self._flying.values()]
        return func(*args, **(kwargs or {}))

    def problem(self) -> str | None:
        """The first thing that a transfer hid."""
        if not self._hidden:
            return None
        work, tag = self._hidden[0]
        return f"with enabled=false it still overlaps: {work} is computed while {tag} travels"


def _is_work(name: str) -> bool:
    return name.endswith("mm") or "attention" in name
