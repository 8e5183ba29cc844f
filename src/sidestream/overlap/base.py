"""What a schedule is: the order of work in a unit, and what it tells the rest of the system about itself."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sidestream.overlap.path import Path
from sidestream.overlap.slots import SlotSearch
from sidestream.routing.router import Routed

if TYPE_CHECKING:
    from sidestream.overlap.unit import Context, Unit


class Schedule:
    """Base of the overlap options. A schedule has no parameters; modules that it needs are `extra`.

    Args:
        enabled: False runs the same code serially: every transfer is waited for where it starts, in both passes.
            The numbers are the same, bit for bit.
        delay_wgrad: The experts' weight gradients are computed while the reverse dispatch travels.

    Attributes:
        name: The option's name, such as `chunked`.
        changes_model: It computes another function than `overlap=none`.
        function: Names the function; a checkpoint is loaded only under a schedule with the same.
        double_gating: Every token is routed twice.
        slots: Where the experts are computed, if that is measured in the first steps; else None.
    """

    name: str = "?"
    enabled: bool = True
    delay_wgrad: bool = False
    changes_model: bool = False
    function: str = "plain"
    double_gating: bool = False
    slots: SlotSearch | None = None

    def __init__(self, *, enabled: bool = True, delay_wgrad: bool = False) -> None:
        self.enabled, self.delay_wgrad = enabled, delay_wgrad

    def __call__(self, unit: Unit, h: Tensor, context: Context) -> Tensor:
        """Run the unit on the residual stream `h` `[B, S, H]`; `context` is the batch's `TokenContext`."""
        raise NotImplementedError

    def tokens_per_plan(self, num_sequences: int, seq_length: int, *, padding: int = 0) -> int:
        """Most tokens of one plan; `padding` rows fill experts up behind the tokens of a forward pass."""
        return num_sequences * seq_length + padding

    def extra(self, shape: Any) -> dict[str, nn.Module]:
        """Modules that a unit of a model of this `ModelShape` needs beside those of the plain model, by name."""
        return {}

    def reads_before(self) -> bool:
        """The routed experts read inside the dense block in front of an MoE block."""
        return False

    def path(self, unit: Unit, routed: Routed, *, measured: bool = False) -> Path:
        """The path of a decision of `unit.moe.route`; `measured`: serial, so that its parts can be timed."""
        serial = measured or not self.enabled
        return unit.moe.path(routed, serial=serial, delay_wgrad=self.delay_wgrad)


def completed(own: Any) -> Schedule:
    """Gives a user's schedule that is not derived from `Schedule` what that class says, where it says nothing."""
    for name, value in vars(Schedule).items():
        if not name.startswith("_") and not hasattr(own, name):
            setattr(own, name, MethodType(value, own) if callable(value) else value)
    return own
