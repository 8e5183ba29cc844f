"""What a part may return. Each function gives the first thing that is wrong, in one clause, or None.

They read values on the host: for a first step and for tests.

Legend: T tokens, K routes per token, E experts, L local experts, S expert-major slots, H features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sidestream.dispatch.base import Received, Routing
from sidestream.routing.router import Decision, count_routes

_SUM = 1e-3  # of a token's probabilities, from 1


def tensor_problem(
    name: str, value: Any, *, shape: tuple[int, ...] | None, dtype: torch.dtype | None
) -> str | None:
    """What is wrong with a tensor, if anything; None leaves shape or type open."""
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__}, expected a tensor"
    if dtype is not None and value.dtype != dtype:
        return f"{name} is {_short(value.dtype)}, expected {_short(dtype)}"
    if shape is not None and tuple(value.shape) != shape:
        return f"{name} has shape {list(value.shape)}, expected {list(shape)}"
    return None


def not_finite(name: str, value: Tensor) -> str | None:
    """The first value that is not a finite number."""
    wrong = (~value.detach().isfinite()).nonzero()
    return None if not len(wrong) else f"{name} is not finite at {wrong[0].tolist()}"


def decision_problem(decision: Any, *, logits: Tensor, top_k: int, valid: Tensor | None) -> str | None:
    """What is wrong with what a router returned, if anything.

    Args:
        decision: For these tokens.
        logits: `[T, E]`.
        top_k: K.
        valid: `[T]` bool, False on padding.
    """
    if not isinstance(decision, Decision):
        return f"it returns a {type(decision).__name__}, expected a Decision"
    if not isinstance(decision.routing, Routing):
        return f"routing is a {type(decision.routing).__name__}, expected a Routing"
    return (
        _shapes_problem(decision, tokens=logits.shape[0], experts=logits.shape[1], top_k=top_k)
        or _ids_problem(decision, experts=logits.shape[1], tokens=logits.shape[0], valid=valid)
        or _counts_problem(decision, experts=logits.shape[1], tokens=logits.shape[0])
        or _numbers_problem(decision, logits=logits, valid=valid)
    )


def _shapes_problem(decision: Decision, *, tokens: int, experts: int, top_k: int) -> str | None:
    ids, weights = decision.routing.expert_ids, decision.routing.weights
    problem = tensor_problem("expert_ids", ids, shape=None, dtype=torch.int64)
    if problem is None and (ids.dim() != 2 or ids.shape[1] != top_k or ids.shape[0] < tokens):
        problem = f"expert_ids has shape {list(ids.shape)}, expected {[tokens, top_k]}"
    problem = problem or tensor_problem("weights", weights, shape=tuple(ids.shape), dtype=torch.float32)
    of_all = {
        "probs": (decision.probs, (tokens, experts), torch.float32),
        "counts": (decision.counts, (experts,), torch.int64),
        "chosen": (decision.chosen, (tokens, top_k), torch.int64),
        "ranking": (decision.ranking, (tokens, experts), torch.float32),
        "dropped": (decision.dropped, (), torch.int64),
        "valid": (decision.valid, (tokens,), torch.bool),
    }
    for name, (value, shape, dtype) in of_all.items():
        if problem is None and (value is not None or name in ("probs", "counts")):
            problem = tensor_problem(name, value, shape=shape, dtype=dtype)
    return problem


def _ids_problem(decision: Decision, *, experts: int, tokens: int, valid: Tensor | None) -> str | None:
    routing = decision.routing
    for name, ids in (("expert_ids", routing.expert_ids), ("chosen", decision.ids)):
        outside = ((ids < -1) | (ids >= experts)).nonzero()
        if len(outside):
            token, k = outside[0].tolist()
            return f"{name} has expert {int(ids[token, k])} for token {token}, expected -1 to {experts - 1}"
        ordered = ids[:tokens].sort(dim=1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
        if len(twice):
            token, k = twice[0].tolist()
            return f"{name} has expert {int(ordered[token, k])} twice for token {token}"
    if valid is not None and bool((decision.ids[~valid] >= 0).any()):
        token = int((~valid & (decision.ids >= 0).any(dim=1)).nonzero()[0])
        return f"expert_ids has an expert for token {token}, which is padding: expected -1"
    if routing.complete and bool((routing.expert_ids < 0).any()):
        return "routing.complete is true, but expert_ids has -1"
    return None


def _counts_problem(decision: Decision, *, experts: int, tokens: int) -> str | None:
    found = count_routes(decision.ids[:tokens].unsqueeze(0), experts).squeeze(0)
    wrong = (found != decision.counts).nonzero()
    if len(wrong):
        expert = int(wrong[0])
        said, right = int(decision.counts[expert]), int(found[expert])
        return f"counts has {said} routes for expert {expert}, and the ids have {right}"
    if decision.dropped is None:
        return None
    lost = int((decision.ids >= 0).sum() - (decision.routing.expert_ids[:tokens] >= 0).sum())
    said = int(decision.dropped)
    return None if lost == said else f"dropped is {said}, and {lost} of the chosen routes are missing"


def _numbers_problem(decision: Decision, *, logits: Tensor, valid: Tensor | None) -> str | None:
    """What is wrong with the numbers of tokens with finite logits, if anything. Others are not the router's fault."""
    tokens = logits.shape[0]
    usable = logits.detach().isfinite().all(dim=1)
    there = decision.routing.expert_ids[:tokens] >= 0
    weights, probs = decision.routing.weights.detach()[:tokens], decision.probs.detach()
    problem = not_finite("weights", torch.where(there & usable.unsqueeze(1), weights, 0.0))
    problem = problem or not_finite("probs", torch.where(usable.unsqueeze(1), probs, 0.0))
    if problem is not None:
        return problem
    real = usable if valid is None else usable & valid
    wrong = ((probs.sum(dim=1) - 1).abs() > _SUM) & real
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        return f"probs of token {token} add up to {float(probs[token].sum()):.4g}, expected 1"
    if valid is not None and bool(probs[~valid].any()):
        return "probs is not zero on padding"
    return None


def scalar_problem(name: str, value: Any) -> str | None:
    """What is wrong with a loss, if anything: it is a finite scalar of fp32."""
    return tensor_problem(name, value, shape=(), dtype=torch.float32) or not_finite(name, value)


def observed_problem(value: Any, *, experts: int) -> str | None:
    """What is wrong with what a balance observed, if anything."""
    problem = tensor_problem("what observe returns", value, shape=(experts + 1,), dtype=torch.float64)
    return problem or not_finite("what observe returns", value)


def received_problem(
    received: Any, *, hidden: int, num_local: int, alignment: int, dtype: torch.dtype
) -> str | None:
    """What is wrong with what a dispatcher hands to the experts, if anything."""
    if not isinstance(received, Received):
        return f"dispatch gives a {type(received).__name__}, expected Received"
    rows, weights, offsets = received.rows, received.row_weights, received.offsets
    problem = tensor_problem("rows", rows, shape=None, dtype=dtype)
    if problem is None and (rows.dim() != 2 or rows.shape[1] != hidden):
        problem = f"rows has shape {list(rows.shape)}, expected [S, {hidden}]"
    problem = (
        problem
        or tensor_problem("row_weights", weights, shape=(rows.shape[0],), dtype=torch.float32)
        or tensor_problem("offsets", offsets, shape=(num_local,), dtype=torch.int32)
    )
    if problem is not None:
        return problem
    ends = offsets.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > rows.shape[0]:
        return f"offsets are {ends[:4]}..., expected ends of segments that ascend to at most {rows.shape[0]}"
    if any(end % alignment for end in ends):
        return f"offsets are {ends[:4]}..., expected multiples of the alignment {alignment}"
    if received.host_offsets is not None and list(received.host_offsets) != ends:
        return "host_offsets differ from offsets"
    if received.exact and ends[-1] != rows.shape[0]:
        return f"exact is true, but there are {rows.shape[0]} rows behind {ends[-1]} real ones"
    return None


def output_problem(name: str, value: Any, *, like: Tensor, rows: int | None = None) -> str | None:
    """What is wrong with something that should have the shape and type of `like`, and finite rows where `like` has.

    Args:
        rows: So many; None: all.
    """
    problem = tensor_problem(name, value, shape=tuple(like.shape), dtype=like.dtype)
    if problem is not None or not bool(like.detach()[:rows].isfinite().all()):
        return problem
    return not_finite(name, value[:rows])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
