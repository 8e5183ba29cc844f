"""From logits to scores, in fp32. Scores rank the experts of a token; the chosen ones become its weights.

Legend: T tokens, E experts (or the K chosen ones), H features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this softplus leaves the normal range of fp32 and the gradient of its root becomes 0 * inf.
_LOWEST_LOGIT = -80.0


def softmax(logits: Tensor) -> Tensor:
    """`[T, E]` fp32 -> `[T, E]`, rows sum to 1 (Shazeer et al. 2017)."""
    return torch.softmax(logits, dim=-1)


def sigmoid(logits: Tensor) -> Tensor:
    """`[T, E]` fp32 -> `[T, E]`, each expert on its own (DeepSeek-V3, arXiv 2412.19437)."""
    return torch.sigmoid(logits)


def sqrt_softplus(logits: Tensor) -> Tensor:
    """`[T, E]` fp32 -> `[T, E]`, `sqrt(log(1 + exp(logit)))`, each expert on its own (as in Megatron-Core)."""
    return torch.sqrt(F.softplus(logits.clamp(min=_LOWEST_LOGIT)))


def share(scores: Tensor) -> Tensor:
    """Scores divided by their sum over the last axis. Never NaN where all scores underflow to zero."""
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def jitter(x: Tensor, eps: float) -> Tensor:
    """Multiply `x` `[T, H]` by independent `U(1 - eps, 1 + eps)` (Fedus et al. 2021), drawn from this rank's generator.

    The generator is part of a checkpoint, so a resumed run draws what the whole run would have drawn.
    """
    return x * torch.empty_like(x).uniform_(1.0 - eps, 1.0 + eps)


def z_loss(logits: Tensor, valid: Tensor | None) -> Tensor:
    """`logsumexp(logits)^2` summed over the valid tokens (Zoph et al. 2022): `[T, E]` -> scalar fp32."""
    squares = torch.logsumexp(logits, dim=-1).square()
    if valid is not None:  # by selection: padding may hold anything
        squares = torch.where(valid, squares, 0.0)
    return squares.sum()
