"""What the MoE layers report while a step is attempted.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Ledger:
    """Reports of the layers of one attempt. Cleared when an attempt begins; nothing in it lasts.

    Tensors add up over the micro-batches of an attempt. Lists have one entry per layer and are taken after every
    micro-batch, because they carry its graph.

    Attributes:
        counts: `[L, E]` int64, routes of this rank's tokens, before any is dropped.
        dropped: `[L]` int64, of these, routes dropped for lack of expert capacity.
        observed: `[L, E + 1]` fp64, what balances observed; no rows unless one does.
        dealt: `[L]` int64, tokens to which experts were dealt out, of this rank and of those before it.
        aux: Auxiliary losses, each summed over the local sequences.
        z: Router z-losses, each summed over the local valid tokens.
        probs: `[E]` fp32 each, probabilities summed over the local tokens, for a loss over the global batch.
    """

    counts: Tensor
    aux: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dropped = self.counts.new_zeros(self.counts.shape[0])
        self.observed = self.counts.new_zeros((0, self.counts.shape[1] + 1), dtype=torch.float64)
        self.dealt = torch.zeros_like(self.dropped)

    def make_room_to_observe(self) -> None:
        """Called by layers whose balance observes, before the first attempt."""
        self.observed = self.counts.new_zeros(
            (self.counts.shape[0], self.observed.shape[1]), dtype=torch.float64
        )

    def begin_attempt(self, *, first: Tensor | int = 0) -> None:
        """Clear.

        Args:
            first: Valid tokens of the global batch in front of this rank's, scalar int64.
        """
        for total in self.totals().values():
            total.zero_()
        self.begin_deal(first)
        for reports in (self.aux, self.z, self.probs):
            reports.clear()

    def begin_deal(self, first: Tensor | int) -> None:
        """Number the tokens of every layer from `first` on."""
        self.dealt.copy_(first) if isinstance(first, Tensor) else self.dealt.fill_(first)

    def deal(self, layer: int, *, num_tokens: int, valid: Tensor | None) -> Tensor:
        """The number of the first of these tokens, scalar int64; the next call goes on behind them.

        So a forced choice is even over whatever is routed in parts: halves, micro-batches, the tokens of all ranks.
        """
        first = self.dealt[layer].clone()
        self.dealt[layer] += num_tokens if valid is None else valid.sum()
        return first

    def totals(self) -> dict[str, Tensor]:
        """What `TrainingStep.check` adds up over the ranks, by name; sizes are the same in every attempt."""
        return {"counts": self.counts, "dropped": self.dropped, "observed": self.observed}

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What layers report inside is forgotten at the end, but for what the caller copied."""
        lasting = [*self.totals().values(), self.dealt]
        kept = [total.clone() for total in lasting]
        yield
        for total, before in zip(lasting, kept):
            total.copy_(before)

    def take_aux(self) -> Tensor:
        """Return and clear the sum of the losses since the last call (one micro-batch)."""
        total = torch.stack(self.aux).sum() if self.aux else self.counts.new_zeros((), dtype=torch.float32)
        self.aux.clear()
        return total

    def take_z(self) -> Tensor | None:
        """The same for the z-losses; None if there are none."""
        total = torch.stack(self.z).sum() if self.z else None
        self.z.clear()
        return total

    def take_probs(self) -> Tensor | None:
        """Return and clear the layers' probabilities `[L, E]`; None if there are none."""
        stacked = torch.stack(self.probs) if self.probs else None
        self.probs.clear()
        return stacked
