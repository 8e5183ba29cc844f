"""What every balance promises.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sidestream.conformance.routers import make_valid
from sidestream.conformance.suite import Property
from sidestream.conformance.values import not_finite, observed_problem, scalar_problem
from sidestream.routing.router import Decision, SigmoidRouter, SoftmaxRouter

TOKENS, EXPERTS, TOP_K, LENGTH = 48, 8, 2, 12
# Its sum over 384 experts, and that divided by 384, are no numbers of fp32.
_MANY, _MANY_EXPERTS = 1_966_081, 384
_STEPS = 400


def _decisions() -> Iterator[tuple[str, Decision, Tensor]]:
    """Decisions of a skewed gate, with and without padding; the last has padding alone."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, EXPERTS, generator=draw) + torch.linspace(1, -1, EXPERTS)
    nothing = torch.zeros(TOKENS, dtype=torch.bool)
    for name, valid in (("all tokens", None), ("padding", make_valid()), ("padding alone", nothing)):
        leaf = logits.clone().requires_grad_()
        yield name, SoftmaxRouter(top_k=TOP_K)(leaf, valid=valid), leaf


def _attributes(balance: Any) -> str | None:
    for name in ("coefficient", "z_loss_coefficient"):
        value = getattr(balance, name, None)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return f"{name} is {value!r}, expected a number"
    for name in ("uses_bias", "needs_global_counts", "observes"):
        if not isinstance(getattr(balance, name, None), bool):
            return f"{name} is {getattr(balance, name, None)!r}, expected true or false"
    return None


def _loss(balance: Any) -> str | None:
    for name, decision, leaf in _decisions():
        loss = balance.loss(decision, seq_length=LENGTH)
        if loss is None:
            continue
        problem = scalar_problem("its loss", loss)
        if problem is None and loss.requires_grad:
            loss.backward()
            assert leaf.grad is not None
            problem = not_finite("the gradient of its loss", leaf.grad)
        elif problem is None and balance.coefficient and name == "all tokens":
            problem = "its loss carries no gradient"
        if problem is not None:
            return f"with {name}: {problem}"
    return None


def _shares(balance: Any) -> str | None:
    """Shares of two micro-batches add up to the loss of both."""
    _, decision, _ = next(_decisions())
    counts, tokens = decision.counts.unsqueeze(0), torch.tensor(float(TOKENS), dtype=torch.float64)
    halves = [half.sum(0, keepdim=True) for half in (*decision.probs.chunk(2), decision.probs)]
    *parts, whole = (
        balance.global_loss(half, counts, num_tokens=tokens, top_k=TOP_K).detach() for half in halves
    )
    problem = scalar_problem("its global loss", whole)
    if problem is None and abs(sum(map(float, parts)) - float(whole)) > 1e-4 * abs(float(whole)):
        problem = (
            f"shares of {float(parts[0]):.5g} and {float(parts[1]):.5g} are not the whole {float(whole):.5g}"
        )
    return problem


def _observes(balance: Any) -> str | None:
    for name, decision, _ in _decisions():
        problem = observed_problem(balance.observe(decision, torch.zeros(EXPERTS)), experts=EXPERTS)
        if problem is not None:
            return f"with {name}: {problem}"
    return None


def _observed(balance: Any, decision: Decision, bias: Tensor) -> Tensor | None:
    return balance.observe(decision, bias) if balance.observes else None


def _commit(balance: Any) -> str | None:
    for name, decision, _ in _decisions():
        bias, counts = torch.zeros(EXPERTS), decision.counts.clone()
        address, observed = bias.data_ptr(), _observed(balance, decision, bias)
        returned = balance.commit(bias, counts, observed)
        if returned is not None:
            return f"commit returns a {type(returned).__name__}: it changes the bias in place, and returns nothing"
        if bias.dtype != torch.float32 or bias.shape != (EXPERTS,) or bias.data_ptr() != address:
            return "commit replaces the bias: it must change it in place"
        if not torch.equal(counts, decision.counts):
            return "commit changes the counts that it is given"
        if (problem := not_finite("the bias after commit", bias)) is not None:
            return f"with {name}: {problem}"
    return None


def _exact(balance: Any) -> str | None:
    bias = torch.zeros(_MANY_EXPERTS)
    balance.commit(bias, torch.full((_MANY_EXPERTS,), _MANY), None)
    largest = float(bias.abs().max())
    return (
        None
        if largest == 0
        else f"{_MANY} routes for each of {_MANY_EXPERTS} experts move the bias by {largest:g}"
    )


def _evens(balance: Any) -> str | None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(256, EXPERTS, generator=draw) + torch.linspace(1, -1, EXPERTS)
    bias, router = torch.zeros(EXPERTS), SigmoidRouter(top_k=TOP_K)
    loads: list[int] = []
    for _ in range(_STEPS):
        decision = router(logits, selection_bias=bias)
        loads.append(int(decision.counts.max()))
        balance.commit(bias, decision.counts, _observed(balance, decision, bias))
    if loads[-1] < loads[0]:
        return None
    return f"the busiest expert has {loads[0]} routes at first, and {loads[-1]} after {_STEPS} commits"


BALANCE = [
    Property("attributes", _attributes),
    Property(
        "its loss is a finite scalar of fp32, also with padding", _loss, lambda b: not b.needs_global_counts
    ),
    Property("shares of its global loss add up", _shares, lambda b: b.needs_global_counts),
    Property("what it observes", _observes, lambda b: b.observes),
    Property("commit changes the bias in place, and nothing else", _commit),
    Property("even counts move no bias, however large", _exact, lambda b: b.uses_bias and not b.observes),
    Property("a skewed load becomes more even", _evens, lambda b: b.uses_bias),
]
