"""A receive budget for libraries that have none: routes that would not fit are left out before anything travels.

Every rank knows how many routes every rank has for every expert, so each works out alone where its rows would land.

Legend: T tokens, K routes per token, E experts, R ranks, L = E / R experts of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.dispatch.layout import expert_layout


def _segments(histogram_RE: Tensor, *, num_local: int, alignment: int) -> tuple[Tensor, Tensor]:
    """First slot of each expert on its rank `[R, L]`, and padded rows of each rank `[R]`."""
    total_RL = histogram_RE.sum(0).view(-1, num_local)
    padded_RL = torch.div(total_RL + (alignment - 1), alignment, rounding_mode="floor") * alignment
    ends_RL = padded_RL.cumsum(1)
    return ends_RL - padded_RL, ends_RL[:, -1]


def needed_rows(histogram_RE: Tensor, *, rank: int, num_local: int, alignment: int) -> Tensor:
    """Rows that `rank` needs, padding included, before any is dropped: int64 scalar, no host read."""
    return _segments(histogram_RE, num_local=num_local, alignment=alignment)[1][rank]


def cap_routing(
    expert_ids_TK: Tensor,
    histogram_RE: Tensor,
    *,
    rank: int,
    num_local: int,
    alignment: int,
    budget: int,
) -> Tensor:
    """`[T, K]` ids of this rank with -1 where the row would land at or past `budget`. No host read.

    Rows fill a rank in the order of (local expert, source rank, token, k): the last experts lose first, as in NCCL EP
    and HybridEP.

    Args:
        expert_ids_TK: int64 global ids, -1 for none.
        histogram_RE: int64, routes of each rank for each expert.
        rank: This rank.
        num_local: L.
        alignment: Rows per expert are padded to a multiple.
        budget: Rows of every rank's receive buffer.
    """
    num_experts, flat = histogram_RE.shape[1], expert_ids_TK.reshape(-1)
    first_RL, _ = _segments(histogram_RE, num_local=num_local, alignment=alignment)
    start_E = first_RL.reshape(-1) + histogram_RE[:rank].sum(0)
    own = expert_layout(flat, num_experts=num_experts, num_slots=flat.numel())
    nth = own.slot_of_row - (own.offsets - own.counts).index_select(0, flat.clamp(min=0))
    fits = (flat >= 0) & (start_E.index_select(0, flat.clamp(min=0)) + nth < budget)
    return torch.where(fits, flat, -1).view_as(expert_ids_TK)
