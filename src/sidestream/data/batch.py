"""What a model reads: token sequences, their targets, and where documents begin.

Legend: B sequences, S tokens per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # a target that has no loss


@dataclass(frozen=True)
class Batch:
    """Sequences of a micro-batch, or of a rank's share of a step.

    Attributes:
        inputs: `[B, S]` int64.
        targets: `[B, S]` int64, the next token of each input, `IGNORE` where there is none.
        segments: `[B, S]` int32, number of the document within its row, -1 on padding. Attention stays within a
            document, positions restart at its first token, and padding is neither routed nor counted. None: every
            row is one document and every target counts.
    """

    inputs: Tensor
    targets: Tensor
    segments: Tensor | None = None

    @classmethod
    def of(cls, sequences: Tensor) -> Batch:
        """From rows of one document each, `[B, S + 1]` int64."""
        return cls(sequences[:, :-1], sequences[:, 1:])

    @classmethod
    def join(cls, batches: list[Batch]) -> Batch:
        """The rows of several batches that all have segments, or none of which has."""
        segments = [batch.segments for batch in batches if batch.segments is not None]
        inputs, targets = ([getattr(batch, name) for batch in batches] for name in ("inputs", "targets"))
        return cls(torch.cat(inputs), torch.cat(targets), torch.cat(segments) if segments else None)

    def __len__(self) -> int:
        return self.inputs.shape[0]

    @property
    def seq_length(self) -> int:
        return self.inputs.shape[1]

    def num_targets(self) -> Tensor:
        """Targets that have a loss, scalar int64 on the device."""
        return (self.targets != IGNORE).sum()

    def split(self, size: int) -> list[Batch]:
        """Cut into micro-batches of at most `size` sequences."""
        starts = range(0, len(self), size)
        return [self._map(lambda t, s=start: t[s : s + size]) for start in starts]  # type: ignore[misc]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """The same in memory of its own."""
        return self._map(lambda t: t.clone(memory_format=torch.contiguous_format))

    def pairs(self, other: Batch) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Name -> the tensor of `other`, and this one's."""
        names = ("inputs", "targets", "segments")
        return {name: (getattr(other, name), getattr(self, name)) for name in names}

    def _map(self, change) -> Batch:  # type: ignore[no-untyped-def]
        segments = None if self.segments is None else change(self.segments)
        return Batch(change(self.inputs), change(self.targets), segments)
