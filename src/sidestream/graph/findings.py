"""`Finding`: something in a step that a recorded graph could not repeat, where it is, and the override without it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "lightning"}
_TOOLS = ("sidestream.graph.",)

WHY = {
    "host read": "the host waits for a value of the device",
    "synchronising call": "the host waits for the device",
    "data-dependent shape": "the size of a result depends on values",
    "undeclared input": "memory that was another in the step before; a replay would read the old one",
    "host constant": "a value of the host is copied in, once",
    "never written": "memory is read that nobody wrote",
    "moving memory": "a tensor changes its memory",
    "unjoined exchange": "an exchange, or a side stream, is not waited for within the step",
    "collective": "a collective outside `exchange/`, which cannot be waited for in a replay",
}

# Where a finding is -> the override that avoids it. The first part of the path that fits.
_OVERRIDES = (
    ("sidestream/dispatch/local.py", "dispatcher=alltoall dispatcher.capacity_factor=1.5"),
    ("sidestream/dispatch/", "dispatcher.capacity_factor=1.5"),
    ("sidestream/exchange/", "dispatcher.capacity_factor=1.5"),
    ("sidestream/fusion/", "fusion=grouped"),
    ("sidestream/overlap/slots.py", "overlap.slot=1"),
    ("sidestream/overlap/", "overlap=none"),
    ("sidestream/parallel/fully_shard.py", "strategy=replicate"),
    ("sidestream/routing/balance.py", "balance=bias"),
    ("sidestream/routing/capacity.py", "router.expert_capacity_factor=null"),
    ("sidestream/routing/", "router=softmax"),
    ("sidestream/data/", "data.packing=concat"),
)


@dataclass(frozen=True)
class Finding:
    """One occurrence.

    Attributes:
        kind: A key of `WHY`.
        what: Method or operator.
        file: Path of the nearest source file on the stack that belongs to no library.
        line: Line in it, from 1; 0 if there is none.
        function: Qualified name of the function there.
        phase: "forward" or "backward".
    """

    kind: str
    what: str
    file: str
    line: int
    function: str
    phase: str

    @classmethod
    def here(cls, kind: str, what: str) -> Finding:
        """At the place that is being run."""
        file, line, function = place()
        return cls(kind, what, file, line, function, "backward" if in_backward() else "forward")

    @property
    def fix(self) -> str:
        """An override, or what to do in code that no override leaves out."""
        path = Path(self.file).as_posix()
        for part, override in _OVERRIDES:
            if part in path:
                return f"set {override}"
        return "no override: change this code"


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def place() -> tuple[str, int, str]:
    """File, line and function of the nearest frame outside the libraries and the graph's own tools."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if not f"{module}.".startswith(_TOOLS) and module.partition(".")[0] not in _LIBRARIES:
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back
    return "<autograd>", 0, "<autograd>"


def legend(found: Iterable[str]) -> list[str]:
    """What the kinds in lines of `lines` mean, one line each."""
    told = list(found)
    return [f"{kind}: {why}" for kind, why in WHY.items() if any(f": {kind}; " in line for line in told)]


def lines(findings: Iterable[Finding]) -> list[str]:
    """One line per place, kind and phase, in the order of first occurrence.

    For example `dispatch/packed.py:176 tolist (forward, 2x): host read; set dispatcher.capacity_factor=1.5`.
    """
    places: Counter[tuple[str, int, str, str, str, str]] = Counter()
    for f in findings:
        places[(f.file, f.line, f.what, f.phase, f.kind, f.fix)] += 1
    return [
        f"{'/'.join(Path(file).parts[-2:])}:{line} {what} ({phase}, {count}x): {kind}; {fix}"
        for (file, line, what, phase, kind, fix), count in places.items()
    ]
