"""What a schedule sees of a unit, of its MoE layer and of a batch; the model's classes have it all.

Legend: B sequences, S tokens per sequence, T = B * S, H features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from sidestream.overlap.path import Path
from sidestream.overlap.recorder import Recorder
from sidestream.routing.router import Routed


class Context(Protocol):
    """Documents and padding of a micro-batch: handed on to what needs them."""

    @property
    def before(self) -> Context | None:
        """The context for the dense block in front, where the unit runs it."""
        ...

    def halves(self, num_sequences: int) -> tuple[Context, Context]:
        """The contexts of the first and the second half of the sequences."""
        ...


class DenseBlock(Protocol):
    """The block in front. Both return what they add to the residual stream `[B, S, H]`."""

    def attention(self, h: Tensor, context: Any) -> Tensor: ...

    def feed_forward(self, a: Tensor) -> Tensor: ...


class MoELayer(Protocol):
    """Routed and shared experts."""

    @property
    def shared_expert(self) -> Any:
        """None: there is none, and `shared` returns zeros."""
        ...

    def route(self, x: Tensor, context: Any = ..., *, avoid: Tensor | None = None) -> Routed:
        """The router's decision for `x` `[B, S, H]`; `avoid` `[T, K]`: experts that a token must not choose."""
        ...

    def path(self, routed: Routed, *, serial: bool | None = None, delay_wgrad: bool = False) -> Path:
        """The path of a decision, or of a part of one; nothing of it has started but the exchange of counts."""
        ...

    def routed_path(self, x: Tensor, context: Any = ...) -> Path:
        """Route, report and return the path."""
        ...

    def report(self, *parts: Routed) -> None:
        """Tell balancing and metrics of a decision, once; parts of one micro-batch together."""
        ...

    def shared(self, x: Tensor) -> Tensor:
        """The shared experts on `x` `[B, S, H]`: `shared_down(shared_up(x), x)`."""
        ...

    def shared_up(self, x: Tensor) -> Tensor: ...

    def shared_down(self, inner: Tensor, x: Tensor) -> Tensor: ...


class Unit(Protocol):
    """Attention and the MoE layer behind it."""

    training: bool
    recorder: Recorder

    def record(self, recorder: Recorder) -> None:
        """Let the parts of the unit report to a recorder."""
        ...

    @property
    def norm(self) -> Callable[[Tensor], Tensor]:
        """The norm in front of the MoE layer."""
        ...

    @property
    def dropout(self) -> Callable[[Tensor], Tensor]:
        """The dropout behind the MoE layer."""
        ...

    @property
    def before(self) -> DenseBlock | None:
        """The dense block in front, for a schedule that reads in it."""
        ...

    @property
    def extra(self) -> Any:
        """The modules that `Schedule.extra` made, by name."""
        ...

    @property
    def moe(self) -> MoELayer: ...

    def attention(self, h: Tensor, context: Any) -> Tensor:
        """What attention adds to the residual stream `h` `[B, S, H]`."""
        ...
