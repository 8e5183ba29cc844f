"""Blocks: a dense block, and the unit an overlap schedule works on.

Legend: B sequences, S tokens, H features.
"""

from __future__ import annotations

from torch import Tensor, nn

from sidestream.model.attention import Attention, LatentAttention
from sidestream.model.config import ModelShape
from sidestream.model.context import TokenContext
from sidestream.model.layers import RMSNorm, SwiGLU, run
from sidestream.model.moe import Ledger, MoE, MoEParts
from sidestream.overlap.base import Schedule
from sidestream.overlap.recorder import SILENT, Recorder


class _AttentionBranch(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attention = Attention(shape) if shape.mla is None else LatentAttention(shape)
        self.dropout = nn.Dropout(shape.dropout)
        self.recompute = shape.activation_checkpointing
        self.recorder, self.attention_part = SILENT, "attention"

    def attention(self, h: Tensor, context: TokenContext) -> Tensor:
        """What attention adds to the residual stream `h` `[B, S, H]`."""

        def added(h: Tensor) -> Tensor:
            return self.dropout(
                run(self.self_attention, self.attention_norm(h), context, recompute=self.recompute)
            )

        return self.recorder.part(self.attention_part, added, h)


class DenseBlock(_AttentionBranch):
    """Attention and a dense feed-forward, both on the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = SwiGLU(shape.hidden_size, shape.ffn_hidden_size)

    def forward(self, h: Tensor, context: TokenContext) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`."""
        a = h + self.attention(h, context)
        return a + self.feed_forward(a)

    def feed_forward(self, a: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream `a` `[B, S, H]`."""

        def added(a: Tensor) -> Tensor:
            return self.dropout(run(self.ffn, self.norm(a), recompute=self.recompute))

        return self.recorder.part("feed_forward", added, a)


class MoEUnit(_AttentionBranch):
    """Attention and an MoE layer; the schedule decides in which order they work.

    Attributes:
        before: The dense block in front, where the schedule's routed experts read inside it: the unit then runs
            both blocks. Belongs to the model's list of blocks, not to this module.
        extra: What the schedule adds to the model: norms, mixing gates.
    """

    def __init__(
        self,
        shape: ModelShape,
        parts: MoEParts,
        schedule: Schedule,
        *,
        layer: int,
        ledger: Ledger,
        before: DenseBlock | None = None,
    ) -> None:
        super().__init__(shape)
        self.norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.moe = MoE(shape, parts, layer=layer, ledger=ledger)
        self.schedule = schedule
        self.moe.runs_serially = lambda: not schedule.enabled
        self._before = (before,)  # in a tuple it is no submodule
        if before is not None:
            before.attention_part = "attention_before"
        self.extra = nn.ModuleDict(schedule.extra(shape))

    @property
    def before(self) -> DenseBlock | None:
        return self._before[0]

    def forward(self, h: Tensor, context: TokenContext) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`."""
        return self.recorder.unit(self.schedule(self, h, context))

    def record(self, recorder: Recorder) -> None:
        """Let the parts of this unit, and of the block that it runs, report to a recorder."""
        for module in (self, self.before, self.moe, self.moe.experts):
            if module is not None:
                module.recorder = recorder
