"""What a block must know about the tokens of a batch beside their hidden states.

Legend: B sequences, S tokens per sequence, T = B * S.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenContext:
    """Documents and padding of one micro-batch, shared by all blocks. All None for rows of one document each.

    Attributes:
        mask: `[B or 1, 1, S, S]` bool, True where a token may attend: earlier, and of the same document.
        positions: `[B, S]` int64, position within the document.
        valid: `[T]` bool, False on padding.
        before: The context for the block in front, where one unit runs both; else None.
    """

    mask: Tensor | None = None
    positions: Tensor | None = None
    valid: Tensor | None = None
    before: TokenContext | None = None

    def halves(self, num_sequences: int) -> tuple[TokenContext, TokenContext]:
        """The contexts of the first and the second half of the sequences; the first half is the larger one."""

        def half(part: int) -> TokenContext:
            def cut(x: Tensor | None) -> Tensor | None:
                return None if x is None else x.tensor_split(2)[part]

            mask = self.mask if self.mask is None or len(self.mask) == 1 < num_sequences else cut(self.mask)
            valid = None
            if self.valid is not None:
                valid = self.valid.view(num_sequences, -1).tensor_split(2)[part].reshape(-1)
            return TokenContext(mask, cut(self.positions), valid)

        return half(0), half(1)

    @classmethod
    def of(cls, segments: Tensor | None) -> TokenContext:
        """Returns the context of a batch from `Batch.segments` `[B, S]`, the number of each token's document."""
        if segments is None:
            return PLAIN
        index = torch.arange(segments.shape[1], device=segments.device)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        first = torch.where(begins, index, 0).cummax(dim=1).values
        same = segments.unsqueeze(2) == segments.unsqueeze(1)
        causal = index.unsqueeze(1) >= index
        # A padded token attends to padding before it: a row without anything to attend to would be NaN.
        return cls((same & causal).unsqueeze(1), index - first, (segments >= 0).reshape(-1))

    def within(self, window: int, *, seq_length: int, device: torch.device) -> TokenContext:
        """Returns the same context, but that a token attends to the `window` last tokens only, itself among them."""
        if window >= seq_length:
            return self
        index = torch.arange(seq_length, device=device)
        back = index.unsqueeze(1) - index
        inside = ((back >= 0) & (back < window))[None, None]
        return replace(self, mask=inside if self.mask is None else self.mask & inside)


PLAIN = TokenContext()
