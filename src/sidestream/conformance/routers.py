"""What every router promises.

Legend: T tokens, K routes per token, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.conformance.suite import Property
from sidestream.conformance.values import decision_problem
from sidestream.routing.router import Decision

TOKENS = 48
_LARGE = 1e4


def experts_for(router: Any) -> int:
    """E: room for top_k, and a multiple of the groups."""
    groups = getattr(router, "num_groups", None) or 1
    return -(-max(8, 2 * router.top_k) // groups) * groups


def make_logits(router: Any, *, tokens: int = TOKENS) -> Tensor:
    """`[T, E]` fp32, a leaf."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(tokens, experts_for(router), generator=draw).requires_grad_()


def make_valid(tokens: int = TOKENS) -> Tensor:
    """`[T]` bool: every fifth token is padding, and so is the end."""
    place = torch.arange(tokens)
    return (place % 5 != 4) & (place < tokens - 7)


def _judge(router: Any, logits: Tensor, *, valid: Tensor | None = None, **options: Any) -> str | None:
    decision = router(logits, valid=valid, **options)
    return decision_problem(decision, logits=logits, top_k=router.top_k, valid=valid)


def _plain(router: Any) -> str | None:
    return _judge(router, make_logits(router))


def _padded(router: Any) -> str | None:
    nothing = torch.zeros(TOKENS, dtype=torch.bool)
    return _judge(router, make_logits(router), valid=make_valid()) or _judge(
        router, make_logits(router), valid=nothing
    )


def _few(router: Any) -> str | None:
    return _judge(router, make_logits(router, tokens=1)) or _judge(router, make_logits(router, tokens=0))


def _hard(router: Any) -> str | None:
    logits = make_logits(router).detach()
    return _judge(router, torch.zeros_like(logits)) or _judge(router, _LARGE * logits.sign())


def _not_finite(router: Any) -> str | None:
    logits = make_logits(router).detach()
    logits[3], logits[5, 0], logits[7, 1] = torch.nan, torch.inf, -torch.inf
    return _judge(router, logits)


def _pure(router: Any) -> str | None:
    logits = make_logits(router)
    before = logits.detach().clone()
    one, other = router(logits, valid=None), router(logits, valid=None)
    if not torch.equal(before, logits):
        return "it changes the logits that it is given"
    same = torch.equal(one.routing.expert_ids, other.routing.expert_ids)
    same = same and torch.equal(one.routing.weights, other.routing.weights)
    return None if same else "two calls with the same logits differ"


def _trains(router: Any) -> str | None:
    logits = make_logits(router)
    weights = router(logits, valid=None).routing.weights
    if not weights.requires_grad:
        return "the weights carry no gradient: the gate would not be trained"
    draw = torch.Generator().manual_seed(1)
    (weights * torch.randn(weights.shape, generator=draw)).sum().backward()
    grad = logits.grad
    if grad is None or not bool(grad.isfinite().all()):
        return "the gradient of the logits is not finite"
    return None if float(grad.abs().max()) > 0 else "the gradient of the logits is zero everywhere"


def _learns_balance(router: Any) -> str | None:
    logits = make_logits(router)
    probs = router(logits, valid=None).probs
    if not probs.requires_grad:
        return "probs carries no gradient: an auxiliary loss would teach nothing"
    probs[:, 0].sum().backward()
    grad = logits.grad
    alive = grad is not None and bool(grad.isfinite().all()) and float(grad.abs().max()) > 0
    return None if alive else "the gradient of probs does not reach the logits"


def _biased(router: Any) -> str | None:
    logits = make_logits(router).detach()
    bias = torch.zeros(logits.shape[1])
    plain: Decision = router(logits, selection_bias=bias, valid=None)
    shifted: Decision = router(logits, selection_bias=bias + 1, valid=None)
    if not torch.equal(plain.ids, shifted.ids):
        return "a bias that is the same for all experts changes the choice"
    if not torch.equal(plain.routing.weights, shifted.routing.weights):
        return "the bias is in the weights: it may move the choice only"
    return _judge(router, logits, selection_bias=torch.linspace(-3, 3, logits.shape[1]))


ROUTER = [
    Property("what it returns: shapes, types, ranges, no expert twice, counts that add up", _plain),
    Property("padding gets no route, also where all is padding", _padded),
    Property("one token, and none", _few),
    Property("equal and very large logits", _hard),
    Property("logits that are not finite leave ids in range, and other tokens alone", _not_finite),
    Property("the same logits give the same bits, and are left as they are", _pure),
    Property("weights train the gate", _trains),
    Property("probs train the gate", _learns_balance),
    Property("a selection bias moves the choice, not the weights", _biased),
]
