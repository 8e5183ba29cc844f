"""The part that `nccl_ep`, `deep_ep` and `hybrid_ep` share: which transport runs, decided once for all ranks.

`library` calls the library; `torch` keeps the same contract on torch.distributed; `auto` takes the library where it
imports and the device is CUDA.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Pending, Received, Routing
from sidestream.dispatch.dedup import DedupDispatcher
from sidestream.exchange.link import Link

log = logging.getLogger(__name__)

Transport = Literal["auto", "library", "torch"]
WireDtype = Literal["model", "mxfp8"]


def importable(module: str) -> bool:
    """True if `module` (`package.sub`) can be found, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def agree_on_library(wanted: Transport, *, module: str, device_type: str, group: dist.ProcessGroup) -> bool:
    """Rank 0 of the group decides; every rank must be able to follow. Collective.

    Raises:
        RuntimeError: On every rank, if the decision is "library" and a rank cannot import it.
    """
    here = importable(module)
    votes: list[bool] = [False] * dist.get_world_size(group)
    dist.all_gather_object(votes, here, group=group)
    use = wanted == "library" or (wanted == "auto" and device_type == "cuda" and votes[0])
    if use and not all(votes):
        missing = [rank for rank, has_it in enumerate(votes) if not has_it]
        raise RuntimeError(
            f"dispatcher.transport={wanted}: ranks {missing} of the expert-parallel group cannot import {module}; "
            f"install it there, or set dispatcher.transport=torch"
        )
    return use


class LibrarySwitch:
    """A dispatcher that is one of two: its library, or the same contract on torch.distributed.

    Subclasses set `name`, `module`, make the adapter, and say with `capped` that the library has no budget of its own.

    Args:
        transport: `auto`, `library` or `torch`.
        capacity_factor: None: exact sizes, one host read per layer and forward. A number: a receive buffer of
            `capacity_factor x max tokens per rank x top_k` rows per rank, fixed shapes, no host read.
        alignment: Rows per expert are padded to a multiple of this, a power of two.
        on_overflow: `replay`, `drop` or `error`; the strategy acts on it.
        wire_dtype: `model`: rows travel as they are. `mxfp8`: e4m3 with one power-of-two scale per 32 values, in
            dispatch forward and combine backward.
    """

    name = "?"
    module = "?"
    capped = False

    def __init__(
        self,
        *,
        transport: Transport = "auto",
        capacity_factor: float | None = None,
        alignment: int = 1,
        on_overflow: Literal["replay", "drop", "error"] = "replay",
        wire_dtype: WireDtype = "model",
    ) -> None:
        self.wanted, self.capacity_factor, self.alignment = transport, capacity_factor, alignment
        self.on_overflow, self.wire_dtype = on_overflow, wire_dtype
        self._chosen: Any = None

    def make_library(self) -> Any:
        """The adapter. Called only where the library imports."""
        raise NotImplementedError

    def make_torch(self) -> Any:
        """The same contract on torch.distributed."""
        return DedupDispatcher(
            name=self.name,
            capacity_factor=self.capacity_factor,
            alignment=self.alignment,
            wire_dtype=self.wire_dtype,
            capped=self.capped,
        )

    @property
    def chosen(self) -> Any:
        """The transport that runs."""
        assert self._chosen is not None, "wire() first"
        return self._chosen

    @property
    def transport(self) -> str | None:
        return None if self._chosen is None else self._chosen.transport

    @property
    def budget(self) -> int | None:
        return None if self._chosen is None else self._chosen.budget

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        # On one rank nothing travels: the library is used only where it was asked for by name.
        alone = group is None or dist.get_world_size(group) == 1
        wanted: Transport = "torch" if alone and self.wanted == "auto" else self.wanted
        use = group is not None and agree_on_library(
            wanted, module=self.module, device_type=spec.device.type, group=group
        )
        chosen = self.make_library() if use else self.make_torch()
        chosen.wire(group=group, spec=spec, link=link)
        self._chosen = chosen
        if group is not None and dist.get_rank(group) == 0:
            log.info("dispatcher=%s: transport %s", self.name, chosen.transport)

    def plan(self, routing: Routing, *, layer: int = 0) -> Any:
        return self.chosen.plan(routing, layer=layer)

    def dispatch(self, x: Tensor, plan: Any) -> Pending[Received]:
        return self.chosen.dispatch(x, plan)

    def combine(self, rows: Tensor, plan: Any) -> Pending[Tensor]:
        return self.chosen.combine(rows, plan)

    def needed(self) -> Tensor | None:
        return self.chosen.needed()

    def dropped(self) -> Tensor | None:
        return self.chosen.dropped()

    def reset_needed(self) -> None:
        self.chosen.reset_needed()

    def resize(self, budget: int) -> None:
        self.chosen.resize(budget)

    def bytes_sent(self) -> int:
        return 0 if self._chosen is None else self._chosen.bytes_sent()

    def metadata_bytes_sent(self) -> int:
        return 0 if self._chosen is None else self._chosen.metadata_bytes_sent()

    def close(self) -> None:
        if self._chosen is not None:
            self._chosen.close()
        self._chosen = None
