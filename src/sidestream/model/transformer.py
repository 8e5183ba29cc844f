"""`MoETransformer`: tokens in, loss out.

Legend: B sequences, S tokens, H features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sidestream.data.batch import IGNORE, Batch
from sidestream.model.block import DenseBlock, MoEUnit
from sidestream.model.config import ModelShape
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.layers import Embedding, RMSNorm
from sidestream.model.ledger import Ledger
from sidestream.model.moe import MoE, MoEParts
from sidestream.overlap.base import Schedule, completed


@dataclass(frozen=True)
class LossSums:
    """Sums over the local tokens or sequences; whoever owns the global batch divides, once.

    Attributes:
        nll: Scalar fp32, negative log-likelihood summed over tokens, nats.
        aux: Scalar fp32, auxiliary losses of all layers summed over sequences, without the coefficient.
        z: Scalar fp32, router z-losses of all layers summed over valid tokens, without the coefficient; None without.
        probs: `[MoE layers, E]` fp32, router probabilities summed over tokens, for a loss over the global batch.
    """

    nll: Tensor
    aux: Tensor
    z: Tensor | None = None
    probs: Tensor | None = None


class MoETransformer(nn.Module):
    """Decoder-only transformer whose MoE blocks run under an overlap schedule."""

    def __init__(self, shape: ModelShape, parts: MoEParts, schedule: Schedule) -> None:
        super().__init__()
        self.shape, self.parts, self.schedule = shape, parts, completed(schedule)
        moe_blocks = shape.moe_blocks
        self.ledger = Ledger(torch.zeros(len(moe_blocks), shape.num_experts, dtype=torch.int64))
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList()
        for i in range(shape.num_layers):
            if i not in moe_blocks:
                self.blocks.append(DenseBlock(shape))
                continue
            last = self.blocks[-1] if self.blocks else None
            before = last if schedule.reads_before() and isinstance(last, DenseBlock) else None
            layer = moe_blocks.index(i)
            unit = MoEUnit(shape, parts, schedule, layer=layer, ledger=self.ledger, before=before)
            self.blocks.append(unit)
        self.final_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        # A tied head is the embedding's weight: one parameter, one name.
        self.head = (
            None if shape.tie_embeddings else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        )

    def forward(self, tokens: Tensor, context: TokenContext = PLAIN) -> Tensor:
        """`[B, S]` int64 -> logits `[B, S, V]`."""
        if not self.training:  # in training an attempt begins the deal
            self.ledger.begin_deal(0)
        h = self.dropout(self.embedding(tokens))
        contexts = self._contexts(context, seq_length=tokens.shape[1], device=tokens.device)
        for block, block_context in self.units(contexts):
            h = block(h, block_context)
        h = self.final_norm(h)
        return F.linear(h, self.embedding.weight) if self.head is None else self.head(h)

    def units(self, contexts: Sequence[TokenContext]) -> Iterator[tuple[DenseBlock | MoEUnit, TokenContext]]:
        """What runs one after another: blocks, but for those that a unit behind them runs."""
        for i, block in enumerate(self.blocks):
            if self.runs_in_parts(block):
                continue
            context = contexts[i]
            if isinstance(block, MoEUnit) and block.before is not None:
                context = replace(context, before=contexts[i - 1])
            yield block, context  # type: ignore[misc]

    def runs_in_parts(self, block: nn.Module) -> bool:
        """True for a dense block that the unit behind it runs, see `MoEUnit.before`."""
        return any(isinstance(unit, MoEUnit) and unit.before is block for unit in self.blocks)

    def _contexts(
        self, context: TokenContext, *, seq_length: int, device: torch.device
    ) -> list[TokenContext]:
        """What each block attends to; all windowed blocks share one mask."""
        shape = self.shape
        if shape.sliding_window is None:
            return [context] * shape.num_layers
        windowed = context.within(shape.sliding_window, seq_length=seq_length, device=device)
        return [windowed if i in shape.windowed_blocks else context for i in range(shape.num_layers)]

    def loss_sums(self, batch: Batch) -> LossSums:
        """Sum the next-token loss over the targets of `batch`."""
        logits = self(batch.inputs, TokenContext.of(batch.segments))
        nll = F.cross_entropy(
            logits.flatten(0, 1).float(), batch.targets.reshape(-1), ignore_index=IGNORE, reduction="sum"
        )
        ledger = self.ledger
        return LossSums(nll, ledger.take_aux(), ledger.take_z(), ledger.take_probs())

    def moe_layers(self) -> list[MoE]:
        """The MoE layers in order; index = row of the ledger."""
        return [block.moe for block in self.blocks if isinstance(block, MoEUnit)]
