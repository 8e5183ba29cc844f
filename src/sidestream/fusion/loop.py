"""`fusion=loop`: one GEMM per expert. Slow and obviously right: the reference for the others."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Received
from sidestream.fusion.base import gated_activation


class LoopExperts:
    """Runs the experts one after another. Reads the segment sizes on the host if the dispatcher has not."""

    name = "loop"

    def __init__(self, *, alignment: int | Literal["auto"] = "auto") -> None:
        self.alignment: int | Literal["auto"] = alignment

    def __call__(self, received: Received, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        ends = received.host_offsets
        if ends is None:
            ends = received.offsets.tolist()
        begins, outputs = [0, *ends[:-1]], []
        # unbind, not indexing: the backward of w[e] fills a whole stacked gradient for every expert.
        for begin, end, gate_up, down in zip(begins, ends, w_gate_up.unbind(0), w_down.unbind(0)):
            rows, weights = received.rows[begin:end], received.row_weights[begin:end]
            outputs.append(gated_activation(rows @ gate_up, weights) @ down)
        return F.pad(torch.cat(outputs), (0, 0, 0, received.rows.shape[0] - ends[-1]))
