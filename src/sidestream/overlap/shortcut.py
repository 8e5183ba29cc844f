"""`overlap=shortcut`: routed experts read an earlier representation, so their rows travel during attention (ScMoE).

ScMoE, arXiv 2404.05019, for a dense block l and an MoE block l + 1:

    pos1   the routed experts read what the dense block returned      hides attention + shared expert
    pos2   ... what its attention returned                            + the dense block's feed-forward
    pos3   ... what it was given                                      + its attention

    out = h + SE(h) + sum over the chosen experts of G(tap) E(tap)    h: after the MoE block's attention
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sidestream.overlap.base import Schedule
from sidestream.overlap.fork import fork
from sidestream.overlap.path import Path
from sidestream.overlap.slots import SlotSearch
from sidestream.routing.router import Routed

if TYPE_CHECKING:
    from sidestream.overlap.unit import Context, Unit

Tap = Literal["auto", "pos1", "pos2", "pos3"]
Mix = Literal["add", "cg1", "cg2"]
Step = tuple[str, Callable[[Tensor], Tensor]]


class ShortcutOverlap(Schedule):
    """See the module and `Schedule`.

    Args:
        tap: Where the routed experts read. `auto`: pos2. Without a dense block in front it is pos1; training refuses
            to be asked for another one there.
        mix: `add`: shared + routed. `cg1`: sigmoid(w x) * shared + routed. `cg2`: both weighted by a softmax of two
            scores. x is what the shared expert reads; the paper does not say which of the two inputs it means.
        tap_norm: A norm of its own on what gate and routed experts read (Megatron-Core's
            `shortcut_pre_mlp_layernorm`); without it they read the residual stream as it is, as in the equations.
        post_norm: A norm on the sum of shared and routed (Megatron-Core's `moe_shortcut_post_norm`).
        double_gating: DGMoE (appendix A.2): the experts are used twice, by the tap and by the current
            representation, which never takes the expert that the tap took; no shared expert.
        slot: After how many of the steps beside the path the experts are computed. `auto`: the best one, from times
            measured in the first steps.
    """

    name = "shortcut"
    changes_model = True
    slots: SlotSearch

    def __init__(
        self,
        *,
        tap: Tap = "auto",
        mix: Mix = "add",
        tap_norm: bool = True,
        post_norm: bool = False,
        double_gating: bool = False,
        slot: int | Literal["auto"] = "auto",
        enabled: bool = True,
        delay_wgrad: bool = False,
    ) -> None:
        super().__init__(enabled=enabled, delay_wgrad=delay_wgrad)
        self.tap, self.mix, self.tap_norm, self.post_norm = tap, mix, tap_norm, post_norm
        self.double_gating = double_gating
        self.slots = SlotSearch(fixed=None if slot == "auto" else slot, enabled=enabled)
        norms = f"{' tap_norm' if tap_norm else ''}{' post_norm' if post_norm else ''}"
        self.function = f"shortcut {tap} {mix}{norms}{' double_gating' if double_gating else ''}"

    def extra(self, shape: Any) -> dict[str, nn.Module]:
        modules: dict[str, nn.Module] = {}
        if self.tap_norm:
            modules["tap_norm"] = _Norm(shape.hidden_size, eps=shape.norm_eps)
        if self.post_norm:
            modules["post_norm"] = _Norm(shape.hidden_size, eps=shape.norm_eps)
        if self.mix != "add" and not self.double_gating:
            modules["mix"] = nn.Linear(shape.hidden_size, {"cg1": 1, "cg2": 2}[self.mix], bias=False)
        return modules

    def reads_before(self) -> bool:
        return self.tap != "pos1"

    def __call__(self, unit: Unit, h: Tensor, context: Context) -> Tensor:
        tap = "pos1" if unit.before is None else "pos2" if self.tap == "auto" else self.tap
        x, steps = self._steps(unit, h, context, tap)
        x, read = fork(x, 2)
        read, shared = unit.extra["tap_norm"](read) if self.tap_norm else read, _Shared(unit)
        if not self.double_gating:
            steps.append(("shared", shared))
        slot, clock = self.slots.begin(tap, [name for name, _ in steps], training=unit.training)
        routed = unit.moe.route(read, context)
        with nullcontext() if clock is None else clock.listens(unit):
            path = self.path(unit, routed, measured=clock is not None)
            path.start("dispatch")
            for place, (_, step) in enumerate(steps):
                if place == slot:
                    _experts(path)
                x = step(x)
            if slot == len(steps):
                _experts(path)
        if self.double_gating:
            return self._second_gate(unit, x, context, routed, path)
        unit.moe.report(routed)
        return x + unit.dropout(self._mixed(unit, shared, path.finish("combine").view_as(x)))

    def _steps(self, unit: Unit, h: Tensor, context: Context, tap: str) -> tuple[Tensor, list[Step]]:
        """The residual stream at the tap, and the steps on it until the shared expert."""
        steps: list[Step] = [("attention", lambda x: x + unit.attention(x, context))]
        if tap == "pos1":
            return h, steps
        before, inside = unit.before, context.before
        assert before is not None and inside is not None, f"{tap} needs a dense block in front"
        steps.insert(0, ("feed_forward", lambda x: x + before.feed_forward(x)))
        if tap == "pos2":
            return h + before.attention(h, inside), steps
        steps.insert(0, ("attention_before", lambda x: x + before.attention(x, inside)))
        return h, steps

    def _mixed(self, unit: Unit, shared: _Shared, routed: Tensor) -> Tensor:
        if self.mix == "add":
            both = shared.output + routed
        else:
            scores = unit.extra["mix"](shared.input).float()
            if self.mix == "cg1":
                both = torch.sigmoid(scores).to(routed.dtype) * shared.output + routed
            else:
                of_shared, of_routed = scores.softmax(dim=-1).to(routed.dtype).chunk(2, dim=-1)
                both = of_shared * shared.output + of_routed * routed
        return unit.extra["post_norm"](both) if self.post_norm else both

    def _second_gate(self, unit: Unit, x: Tensor, context: Context, first: Routed, path: Path) -> Tensor:
        """DGMoE: the current representation goes to an expert that the tap did not take. Half of this is exposed."""
        x, current = fork(x, 2)
        second = unit.moe.route(unit.norm(current), context, avoid=first.decision.ids)
        unit.moe.report(first)
        unit.moe.report(second)
        current_path = self.path(unit, second)
        current_path.start("dispatch")
        early = path.finish("combine")
        current_path.finish("dispatch")
        current_path.run("experts")
        current_path.start("combine")
        both = (early + current_path.finish("combine")).view_as(x)
        return x + unit.dropout(unit.extra["post_norm"](both) if self.post_norm else both)


class _Norm(nn.RMSNorm):
    """Like the model's norms, which this layer must not import: statistics are fp32 whatever the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class _Shared:
    """The shared expert as a step beside the path: leaves the residual stream as it is and keeps what it adds."""

    input: Tensor
    output: Tensor

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, x: Tensor) -> Tensor:
        x, current = fork(x, 2)
        current, self.input = fork(self._unit.norm(current), 2)
        self.output = self._unit.moe.shared(current)
        if self._unit.moe.shared_expert is None:
            # Nothing else reads the norm, and `fully_shard` waits for a gradient of every parameter.
            self.output = self.output + 0.0 * current
        return x


def _experts(path: Path) -> None:
    path.finish("dispatch")
    path.run("experts")
    path.start("combine")
