"""Adapters that break one rule of their library each. The check that passes for the adapter must fail for them.

The rules are those of the doubles; `BROKEN` names one violation per rule. `tests/doubles/test_doubles.py` shows that
the doubles keep the rules, this file that the adapters' tests would notice if an adapter did not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sidestream.dispatch import nccl_ep
from sidestream.exchange import call
from tests.dispatch.adapters import Setup, run
from tests.dispatch.broken import (
    AlwaysForward,
    AutomaticSms,
    BlockingWithBudget,
    BoundsDiffer,
    BufferWith,
    CachedWithoutExpand,
    CachedWithoutRows,
    CachedWithoutSms,
    CachedWithoutZeros,
    CombineWithoutPadding,
    CommFirst,
    CountsOfCachedCalls,
    DenseGradients,
    EagerDrop,
    EagerWithoutTopK,
    EventBeforeAllocation,
    ForgetsIds,
    ForgetsInputs,
    FusedOnlyThere,
    GroupFirst,
    HalfPrecision,
    HandleWith,
    HybridWith,
    KeepsTheBuffer,
    LayoutAtDispatch,
    MixedIntegers,
    NeverReleases,
    NeverWaits,
    NobodyWaitsForTheEvent,
    NoCap,
    NoMultipleReduction,
    NotDestroyed,
    NotExplicit,
    NoWeightGradient,
    OneHandle,
    PassesIds,
    RaggedBudget,
    RanksDisagree,
    ReadsEarly,
    ReadsTheFlag,
    RealEnds,
    ShortIds,
    SmallBudget,
    SmallOutputs,
    TokensAsTheyAre,
    TooManySms,
    Traps,
    TwoStreams,
    UnequalTokens,
    WeightsInForwardCombine,
    WithoutZeros,
    cached_with,
    raw_weights,
    with_arguments,
)
from tests.dispatch.test_adapters import crowd, in_flight
from tests.doubles.rules import (
    Corruption,
    DeviceAssert,
    Disagreement,
    Hang,
    InvalidArgument,
    TeardownOrder,
    Trap,
    UseAfterFree,
)
from tests.rank_pool import ranks


@dataclass
class Broken:
    """A violation, what its check must raise, and where it shows."""

    setup: Setup
    error: type[BaseException]
    message: str
    body: Callable[..., Any] = run
    patch: tuple[Any, str, Any] | None = None


def nccl(kind=None, factor=2.0, **changes):
    return Setup("nccl_ep", factor, kind=kind, **changes)


def deep(kind=None, factor=None, **changes):
    return Setup("deep_ep", factor, kind=kind, **changes)


def hybrid(kind=None, factor=None, **changes):
    return Setup("hybrid_ep", factor, kind=kind, **changes)


FULL = {"tokens": (32, 32), "ids": crowd(32)}  # 128 rows for rank 0
BROKEN = {
    # NCCL EP
    "inputs die": Broken(nccl(), UseAfterFree, "the tensor died", patch=(call, "_Flight", ForgetsInputs)),
    "ids die": Broken(nccl(ForgetsIds), UseAfterFree, "topk_idx"),
    "more than 16 SMs": Broken(nccl(TooManySms), Hang, "16"),
    "trap": Broken(nccl(Traps, 0.5, **FULL), Trap, "128 rows needed, 64 allocated"),
    "eager drop": Broken(nccl(EagerDrop, None), InvalidArgument, "eager has no DROP"),
    "eager without num_topk": Broken(nccl(EagerWithoutTopK, None), InvalidArgument, "num_topk is mandatory"),
    "tokens not rounded": Broken(nccl(TokensAsTheyAre), InvalidArgument, "% 64"),
    "budget below the tokens": Broken(nccl(SmallBudget), InvalidArgument, "P >= max tokens"),
    "ranks disagree on the budget": Broken(nccl(RanksDisagree), Disagreement, "different calls"),
    "weights in forward combine": Broken(
        nccl(WeightsInForwardCombine), InvalidArgument, "FWD combine rejects"
    ),
    "no weight gradient": Broken(nccl(NoWeightGradient), InvalidArgument, "mandatory"),
    "layout at dispatch": Broken(nccl(LayoutAtDispatch), InvalidArgument, "layout_info"),
    "backward as forward": Broken(
        nccl(AlwaysForward), InvalidArgument, "topk_weights: an ep.Tensor is mandatory"
    ),
    "mixed integers": Broken(nccl(MixedIntegers), InvalidArgument, "share one dtype"),
    "outputs below the budget": Broken(nccl(SmallOutputs), InvalidArgument, "255 rows where 256"),
    "one handle for all": Broken(nccl(OneHandle, layers=3), AssertionError, "output: ", body=in_flight),
    "weights of missing routes": Broken(
        nccl(), AssertionError, "weights: ", patch=(nccl_ep, "known_weights", raw_weights)
    ),
    "group before handles": Broken(nccl(GroupFirst), TeardownOrder, "live handles"),
    "communicator before group": Broken(nccl(CommFirst), TeardownOrder, "before its EP group"),
    "nothing released": Broken(nccl(NeverReleases), TeardownOrder, "never destroyed"),
    "two streams": Broken(nccl(lane=TwoStreams), Corruption, "two streams"),
    "nccl_ep read before the wait": Broken(nccl(lane=NeverWaits), AssertionError, "output: "),
    # DeepEP
    "cached without num_sms": Broken(deep(CachedWithoutSms), InvalidArgument, "cached dispatch: num_sms=0"),
    "cached without do_expand": Broken(deep(CachedWithoutExpand), Corruption, "do_expand as in the handle"),
    "cached without zero padding": Broken(deep(CachedWithoutZeros), AssertionError, "scales: "),
    "automatic SMs": Broken(deep(AutomaticSms), ZeroDivisionError, "by zero"),
    "without zero padding": Broken(deep(WithoutZeros), AssertionError, "scales: "),
    "event without allocation": Broken(
        deep(EventBeforeAllocation), InvalidArgument, "allocate_on_comm_stream"
    ),
    "event never waited for": Broken(deep(NobodyWaitsForTheEvent), AssertionError, "differs"),
    "no multiple reduction": Broken(deep(NoMultipleReduction), DeviceAssert, "allow_multiple_reduction"),
    "not explicitly destroyed": Broken(deep(NotExplicit), TeardownOrder, "explicitly_destroy"),
    "bounds differ": Broken(deep(BoundsDiffer), Disagreement, "different calls"),
    "not destroyed": Broken(deep(NotDestroyed), TeardownOrder, "never destroyed"),
    "no cap": Broken(deep(NoCap, 0.5, **FULL), Corruption, "slot 127 read from 64 rows"),
    "ends of real rows": Broken(deep(RealEnds), AssertionError, "not aligned"),
    "short ids": Broken(deep(ShortIds), InvalidArgument, "topk_idx_t"),
    "offsets too early": Broken(deep(ReadsEarly, 2.0), AssertionError, "output: "),
    "half precision": Broken(deep(HalfPrecision, dtype=torch.float16), InvalidArgument, "x: bf16"),
    "deep_ep read before the wait": Broken(deep(factor=2.0, lane=NeverWaits), AssertionError, "output: "),
    # HybridEP
    "unequal tokens": Broken(hybrid(UnequalTokens), Hang, r"tokens per rank differ: \[16, 11\]"),
    "ids of -1": Broken(hybrid(PassesIds, tokens=(64, 64)), Corruption, "-1 is out of bounds"),
    "ragged budget": Broken(hybrid(RaggedBudget, 2.0), InvalidArgument, "multiple of pad_multiple"),
    "combine without padding": Broken(hybrid(CombineWithoutPadding), Corruption, "pad_multiple differs"),
    "cached without rows": Broken(
        hybrid(CachedWithoutRows), InvalidArgument, "num_permuted_tokens as in forward"
    ),
    "fused in one call": Broken(hybrid(FusedOnlyThere), Corruption, "fuse flags"),
    "blocking with a budget": Broken(hybrid(BlockingWithBudget), Corruption, "rows written to a buffer of 8"),
    "flag of blocking mode": Broken(
        hybrid(ReadsTheFlag), AssertionError, "overflow where nothing can overflow"
    ),
    "counts of cached calls": Broken(hybrid(CountsOfCachedCalls), AssertionError, "rows of a cached call"),
    "dense gradients": Broken(hybrid(DenseGradients), AssertionError, "weights: "),
    "buffer kept": Broken(hybrid(KeepsTheBuffer), TeardownOrder, "buffers left"),
    "hybrid_ep read before the wait": Broken(hybrid(factor=2.0, lane=NeverWaits), AssertionError, "offsets"),
}


def breaks(rank, world, name):
    broken = BROKEN[name]
    with pytest.MonkeyPatch.context() as patch:
        if broken.patch is not None:
            patch.setattr(*broken.patch)
        with pytest.raises(broken.error, match=broken.message):
            broken.body(rank, world, setup=broken.setup)


@pytest.mark.parametrize("name", BROKEN)
def test_violation_is_noticed(name):
    ranks(2).run(breaks, name=name, limit_s=120)


def harmless(rank, world):
    class Hybrid(HybridWith):
        changes = {"dispatch_with_permute": cached_with(), "combine_with_unpermute": with_arguments()}

    class Deep(BufferWith):
        changes = {"dispatch": cached_with(), "combine": with_arguments()}

    class Nccl(HandleWith):
        changes = {"dispatch": with_arguments(), "combine": with_arguments()}

    for setup in (hybrid(Hybrid), deep(Deep), nccl(Nccl)):
        run(rank, world, setup)


def test_the_means_alone_break_nothing():
    ranks(2).run(harmless)
