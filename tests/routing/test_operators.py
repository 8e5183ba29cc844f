"""No router or balance reads from the device on the host, and none works harder for more experts or routes."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.graph.lint import HostReadLint
from tests.core.build_tiny import BALANCES, ROUTERS, Setup, local_batch, make_model, make_step
from tests.rank_pool import ranks


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_of(router, balance, *, num_experts, top_k, valid):
    logits = torch.randn(64, num_experts, requires_grad=True)
    bias = torch.zeros(num_experts)
    with CountOps() as counted:
        decision = ROUTERS[router](top_k=top_k)(logits, selection_bias=bias, valid=valid)
        rule = BALANCES[balance]()
        if rule.observes:
            rule.commit(bias, decision.counts, rule.observe(decision, bias))
        (decision.routing.weights.sum() + decision.probs.sum()).backward()
    return counted.ops


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("balance", ["bias", "quantile"])
@pytest.mark.parametrize("router", ROUTERS)
def test_operators_do_not_grow(router, balance, padded):
    valid = torch.arange(64) < 50 if padded else None
    few = ops_of(router, balance, num_experts=8, top_k=2, valid=valid)
    for num_experts, top_k in [(64, 2), (64, 8)]:
        assert ops_of(router, balance, num_experts=num_experts, top_k=top_k, valid=valid) == few


def reads_of_an_attempt(rank, world, setup):
    model = make_model(setup)
    step = make_step(setup, model, world)
    batch = local_batch(setup, 0, rank, world)
    with HostReadLint() as found:
        step.attempt(batch)
    step.reduction.close()
    return [f"{read.file}:{read.line} {read.kind}" for read in found.reads]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("router", "balance"),
    [
        ("sigmoid_groups", "bias"),
        ("sqrtsoftplus", "quantile"),
        ("capacity_padded", "aux_global_z"),
        ("position", "aux"),
        ("forced", "none_z"),
        ("jitter", "aux_global"),
    ],
)
@pytest.mark.sample(4)
def test_no_host_reads(router, balance, padded):
    setup = Setup(router=router, balance=balance, padded=padded, dispatcher="local", accumulation=2)
    assert ranks(1).run(reads_of_an_attempt, setup=setup) == [[]]
