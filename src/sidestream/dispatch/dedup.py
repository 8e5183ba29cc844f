"""The contract of NCCL EP, DeepEP and HybridEP on torch.distributed.

One row travels per (token, rank), and the rows of a token are summed before they return.
"""

from __future__ import annotations

from sidestream.dispatch.packed import PackedDispatcher
from sidestream.dispatch.packing import PerRank


class DedupDispatcher(PackedDispatcher):
    """See `PackedDispatcher`; `nccl_ep`, `deep_ep` and `hybrid_ep` make one for `transport=torch`.

    The order of rows inside an expert is that of NCCL EP: source rank, then token.
    """

    def __init__(
        self,
        *,
        name: str,
        capacity_factor: float | None = None,
        alignment: int = 1,
        wire_dtype: str = "model",
        capped: bool = False,
    ) -> None:
        super().__init__(
            name=name,
            packing=PerRank(),
            capacity_factor=capacity_factor,
            alignment=alignment,
            wire_dtype=wire_dtype,
            capped=capped,
        )
