"""Which library `fusion.library=auto` stands for, and the objects behind the names."""

from __future__ import annotations

from sidestream.dispatch.base import DispatchSpec
from sidestream.fusion.mega.base import FusedLibrary


def library_for(name: str, spec: DispatchSpec, *, num_ranks: int) -> FusedLibrary:
    """An unwired library.

    Args:
        name: Of `fusion.library`.
        spec: As for `wire`.
        num_ranks: That share the experts.

    Raises:
        ValueError: It cannot run on this device.
    """
    on_cpu = spec.device.type == "cpu"
    if name == "auto":
        name = "windows"
    if name == "windows":
        if not on_cpu:
            raise ValueError(
                f"fusion.library=windows: it reads the memory of CPUs, and the ranks are on {spec.device.type}; "
                f"set fusion.library=auto"
            )
        from sidestream.fusion.mega.windows import WindowsLibrary

        return WindowsLibrary()
    raise ValueError(f"fusion.library={name}: expected auto or windows; set fusion.library=auto")
