"""What the parts of a unit and the stages of its path report to: to nobody, unless somebody listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sidestream.dispatch.base import Received
from sidestream.routing.router import Routed


class Recorder:
    """Runs what is reported and does nothing else, which is what training has.

    One that listens is given to a unit with `unit.record`, and sees everything that the unit computes: it may time a
    part, write it down, or let something else stand in for it.
    """

    def part(self, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Work with tensors as inputs: attention, attention_before, feed_forward, shared, shared_up, shared_down."""
        return call(*inputs)

    def router(self, call: Callable[[Tensor], Routed], x: Tensor) -> Routed:
        """The router's decision for `x` `[B, S, H]`."""
        return call(x)

    def experts(self, call: Callable[[Received, Any], Tensor], received: Received, late: Any) -> Tensor:
        """The local experts on the rows that they have received; `late` is what `late_weights` has given."""
        return call(received, late)

    def late_weights(self, call: Callable[[torch.dtype], Any], dtype: torch.dtype, parameter: Tensor) -> Any:
        """The experts' weights, one of which is `parameter`, where their gradients are put off."""
        return call(dtype)

    def stage(self, name: str, call: Callable[[], None]) -> None:
        """A stage of a routed path: the start of `dispatch`, `experts`, the start of `combine`."""
        call()

    def unit(self, output: Tensor) -> Tensor:
        """What a unit returns."""
        return output


SILENT = Recorder()
