"""What the schedules share: two switches, and what they tell the rest of the system about themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sidestream.overlap.path import Path

if TYPE_CHECKING:
    from sidestream.model.block import MoEUnit
    from sidestream.model.config import ModelShape
    from sidestream.model.moe import Routed


class Overlap:
    """Base of the schedules that overlap.

    Args:
        enabled: False runs the same code serially: every transfer is waited for where it starts, in both passes.
            The numbers are the same, bit for bit.
        delay_wgrad: The experts' weight gradients are computed while the reverse dispatch travels.

    Attributes:
        changes_model: It computes another function than `overlap=none`.
        function: Names the function; a checkpoint is loaded only under a schedule with the same.
    """

    name = "?"
    changes_model = False
    function = "plain"

    def __init__(self, *, enabled: bool = True, delay_wgrad: bool = False) -> None:
        self.enabled, self.delay_wgrad = enabled, delay_wgrad

    def tokens_per_plan(self, num_sequences: int, seq_length: int, *, padding: int = 0) -> int:
        """Most tokens of one plan; `padding` rows fill experts up behind the tokens of a forward pass."""
        return num_sequences * seq_length + padding

    def extra(self, shape: ModelShape) -> dict[str, nn.Module]:
        """Modules that a unit needs beside those of the plain model, by name."""
        return {}

    def reads_before(self) -> bool:
        """The routed experts read inside the dense block in front of an MoE block."""
        return False

    def path(self, unit: MoEUnit, routed: Routed, *, measured: bool = False) -> Path:
        """The path of a decision of `unit.moe.route`; `measured`: serial, so that its parts can be timed."""
        serial = measured or not self.enabled
        return unit.moe.path(routed, serial=serial, delay_wgrad=self.delay_wgrad)
