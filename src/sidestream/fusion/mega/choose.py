"""Which library `fusion.library=auto` stands for, and the objects behind the names."""

from __future__ import annotations

from sidestream.dispatch.base import DispatchSpec
from sidestream.fusion.mega.base import FusedLibrary


def library_for(name: str, spec: DispatchSpec) -> FusedLibrary:
    """An unwired library. `auto` is `windows` on CPUs and `triton` on GPUs; `mok` wants to be named.

    Args:
        name: A value of `fusion.library`.
        spec: What `wire` will be given.

    Raises:
        ValueError: It cannot run on this device, or there is no such library.
    """
    on_cpu = spec.device.type == "cpu"
    if name == "auto":
        name = "windows" if on_cpu else "triton"
    if name == "windows":
        if not on_cpu:
            raise ValueError(
                f"fusion.library=windows: it reads the memory of CPUs, and the ranks are on {spec.device.type}; "
                f"set fusion.library=auto"
            )
        from sidestream.fusion.mega.windows import WindowsLibrary

        return WindowsLibrary()
    if name == "triton":
        from sidestream.fusion.mega.triton_library import TritonLibrary

        return TritonLibrary()
    if name == "mok":
        from sidestream.fusion.mega.mok import MoKLibrary

        return MoKLibrary()
    raise ValueError(f"fusion.library={name}: expected auto, windows, triton or mok; set fusion.library=auto")
