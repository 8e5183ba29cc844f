"""Adapters that break one rule each, and the means to make them. `test_violations.py` says what must notice them."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sidestream.dispatch import deep_ep
from sidestream.dispatch.base import Routing
from sidestream.dispatch.deep_ep import DeepEPLibrary
from sidestream.dispatch.hybrid_ep import HybridEPLibrary
from sidestream.dispatch.nccl_ep import NcclEPLibrary, Slot
from sidestream.exchange import call
from sidestream.exchange.call import adopt
from tests.dispatch.adapters import LateLane
from tests.doubles.nccl_ep_types import LayoutInfo
from tests.doubles.rules import Stream


class Proxy:
    """Everything of `target` but what is given; a function given is called with the target's own in front."""

    def __init__(self, target: Any, **changes: Any) -> None:
        self._target, self._changes = target, changes

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._target, name)
        change = self._changes.get(name)
        if change is None:
            return own
        return lambda *args, **kwargs: change(own, *args, **kwargs)


def with_arguments(**changes: Any) -> Any:
    """For `Proxy`: call with other keyword arguments; `...` leaves one out."""

    def changed(own: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in (kwargs | changes).items() if v is not ...}
        return own(*args, **kwargs)

    return changed


# NCCL EP.


class GroupWith(NcclEPLibrary):
    """Changes fields of the group's configuration."""

    def open(self):
        self.library = Proxy(self.library, GroupConfig=with_arguments(**self.changes))
        super().open()


class TooManySms(GroupWith):
    changes = {"max_num_sms": 20}


class Traps(GroupWith):
    changes = {"overflow_policy": 0}


class EagerDrop(GroupWith):
    changes = {"overflow_policy": 2}


class EagerWithoutTopK(GroupWith):
    changes = {"num_topk": 0}


class TokensAsTheyAre(GroupWith):
    changes = {"max_dispatch_tokens_per_rank": 50}


class SmallBudget(NcclEPLibrary):
    def check(self, spec):
        self.budget = 32


class RanksDisagree(NcclEPLibrary):
    def check(self, spec):
        self.budget += 64 * dist.get_rank()


class HandleWith(NcclEPLibrary):
    """Changes a call of the handle."""

    changes: dict[str, Any] = {}

    def take_routing(self, lease):
        own = super().take_routing(lease)

        def run(outs, ins):
            kept = own(outs, ins)
            if not isinstance(lease.slot.handle, Proxy):
                lease.slot.handle = Proxy(lease.slot.handle, **self.changes)
            return kept

        return run


def forward_weights(own, inputs, outputs, *, config, stream):
    if int(config.pass_direction) == 0:
        inputs.topk_weights = inputs.tokens
    own(inputs, outputs, config=config, stream=stream)


class WeightsInForwardCombine(HandleWith):
    changes = {"combine": forward_weights}


def no_weight_gradient(own, inputs, outputs, *, config, stream):
    outputs.topk_weights = None
    own(inputs, outputs, config=config, stream=stream)


class NoWeightGradient(HandleWith):
    changes = {"combine": no_weight_gradient}


def layout_again(own, *args, **kwargs):
    own(*args, layout_info=LayoutInfo(), **kwargs)


class LayoutAtDispatch(HandleWith):
    changes = {"dispatch": layout_again}


class AlwaysForward(HandleWith):
    changes = {"dispatch": with_arguments(config=...)}


class MixedIntegers(NcclEPLibrary):
    def take_routing(self, lease):
        own = super().take_routing(lease)
        return lambda outs, ins: own([outs[0], outs[1].to(torch.int64)], ins)


class SmallOutputs(NcclEPLibrary):
    def _dispatch(self, lease, *, backward):
        own = super()._dispatch(lease, backward=backward)
        return lambda outs, ins: own([out[:-1] for out in outs], ins)


class ForgetsIds(NcclEPLibrary):
    def take_routing(self, lease):
        own = super().take_routing(lease)

        def run(outs, ins):
            kept = own(outs, [ins[0].clone()])
            lease.slot.ids = None
            return kept

        return run


class OneHandle(NcclEPLibrary):
    """All plans share a handle."""

    def plan(self, routing, *, layer=0):
        if not self._slots:
            self.only = Slot()
        self.free[:] = [self.only]
        return super().plan(routing, layer=layer)


class GroupFirst(NcclEPLibrary):
    def release(self):
        self._group.destroy()


class CommFirst(NcclEPLibrary):
    def release(self):
        for slot in self._slots:
            slot.handle.destroy()
        self._comm.destroy()


class NeverReleases(NcclEPLibrary):
    def release(self):
        pass


class TwoStreams(LateLane):
    @property
    def handle(self):
        return Stream()


class NeverWaits(LateLane):
    def join(self, event, outs):
        pass


# DeepEP.


class BufferWith(DeepEPLibrary):
    """Changes arguments of the buffer's calls."""

    changes: dict[str, Any] = {}

    def open(self):
        super().open()
        self._buffer = Proxy(self._buffer, **self.changes)


def cached_with(**changes: Any) -> Any:
    def changed(own, *args, **kwargs):
        return (with_arguments(**changes) if "handle" in kwargs else lambda own, *a, **k: own(*a, **k))(
            own, *args, **kwargs
        )

    return changed


class CachedWithoutSms(BufferWith):
    changes = {"dispatch": cached_with(num_sms=...)}


class CachedWithoutExpand(BufferWith):
    changes = {"dispatch": cached_with(do_expand=..., do_zero_padding=...)}


class CachedWithoutZeros(BufferWith):
    changes = {"dispatch": cached_with(do_zero_padding=...)}


class AutomaticSms(BufferWith):
    changes = {"dispatch": with_arguments(num_sms=0)}


class WithoutZeros(BufferWith):
    changes = {"dispatch": with_arguments(do_zero_padding=False)}


class EventBeforeAllocation(BufferWith):
    changes = {"dispatch": with_arguments(previous_event=object())}


class NobodyWaitsForTheEvent(BufferWith):
    changes = {"dispatch": with_arguments(async_with_compute_stream=True)}


class ConstructorWith(DeepEPLibrary):
    """Changes arguments of the buffer's constructor."""

    changes: dict[str, Any] = {}

    def open(self):
        self.library = Proxy(self.library, ElasticBuffer=with_arguments(**self.changes))
        super().open()


class NoMultipleReduction(ConstructorWith):
    changes = {"allow_multiple_reduction": False}


class NotExplicit(ConstructorWith):
    changes = {"explicitly_destroy": False}


class BoundsDiffer(DeepEPLibrary):
    def open(self):
        bound = 64 + dist.get_rank()
        self.library = Proxy(self.library, ElasticBuffer=with_arguments(num_max_tokens_per_rank=bound))
        super().open()


class NotDestroyed(DeepEPLibrary):
    def release(self):
        pass


class RealEnds(DeepEPLibrary):
    """Takes the ends of the real rows for the ends of the segments."""

    def dispatch(self, x, plan):
        pending = super().dispatch(x, plan)

        def then(*outs):
            align, self.align = self.align, 1
            try:
                return pending.then(*outs)
            finally:
                self.align = align

        return replace(pending, then=then)


class UncappedPlan(deep_ep.DeepEPPlan):
    def capped(self):
        super().capped()
        return self.routing


class NoCap(DeepEPLibrary):
    def plan(self, routing, *, layer=0):
        return UncappedPlan(self, routing, layer)


def short_ids(own, x, ids=None, weights=None, **kwargs):
    return own(x, None if ids is None else ids.to(torch.int32), weights, **kwargs)


class ShortIds(BufferWith):
    changes = {"dispatch": short_ids}


class ReadsEarly(DeepEPLibrary):
    """Works out offsets when the call returns, not when it has run."""

    def _dispatch(self, handle, outs, ins):
        super()._dispatch(handle, outs, ins)
        outs[2].set_(outs[2].clone())


class HalfPrecision(DeepEPLibrary):
    def check(self, spec):
        pass


# HybridEP.


class UnequalTokens(HybridEPLibrary):
    padded_tokens = property(lambda self: self.unpadded)

    def plan(self, routing, *, layer=0):
        self.unpadded = routing.expert_ids.shape[0]
        return super().plan(routing, layer=layer)

    def open(self):
        self.unpadded = 64
        super().open()


class PassesIds(HybridEPLibrary):
    def plan(self, routing, *, layer=0):
        self.routing = routing
        return super().plan(routing, layer=layer)

    def open(self):
        super().open()

        def by_ids(own, *, routing_map=None, probs=None, **kwargs):
            if routing_map is None:
                return own(**kwargs)
            return own(topk_idx=self.routing.expert_ids, topk_weights=self.routing.weights, **kwargs)

        self._buffer = Proxy(self._buffer, dispatch_with_permute=by_ids)


class HybridWith(HybridEPLibrary):
    changes: dict[str, Any] = {}

    def open(self):
        super().open()
        self._buffer = Proxy(self._buffer, **self.changes)


class RaggedBudget(HybridWith):
    changes = {"dispatch_with_permute": with_arguments(num_permuted_tokens=100)}


class CombineWithoutPadding(HybridWith):
    changes = {"combine_with_unpermute": with_arguments(pad_multiple=...)}


class CachedWithoutRows(HybridWith):
    changes = {"dispatch_with_permute": cached_with(num_permuted_tokens=...)}


class FusedOnlyThere(HybridWith):
    changes = {"dispatch_with_permute": cached_with(fuse_permute_dispatch=True)}


class BlockingWithBudget(HybridWith):
    changes = {"dispatch_with_permute": with_arguments(num_permuted_tokens=8, non_blocking=False)}


class ReadsTheFlag(HybridEPLibrary):
    def _dispatch(self, state, outs, ins):
        super()._dispatch(state, outs, ins)
        assert int(state.handle[-1]) == 0, "overflow where nothing can overflow"


class CountsOfCachedCalls(HybridEPLibrary):
    def _combine_backward(self, state, outs, ins):
        arguments = {"num_permuted_tokens": state.rows, "pad_multiple": self.align}
        rows, _, _, counts, _ = self._buffer.dispatch_with_permute(
            hidden=ins[0], handle=state.handle, **arguments
        )
        assert int(counts.sum()) == state.rows, "rows of a cached call"
        adopt(outs[0], rows)


class DenseGradients(HybridEPLibrary):
    """Lets gradients of experts without a route reach the weights, times zero."""

    def dense(self, routing):
        _, there = super().dense(routing)
        hot = (
            torch.nn.functional.one_hot(routing.expert_ids.clamp(min=0), 8)
            * (routing.expert_ids >= 0)[..., None]
        )
        weights = (hot.float() * routing.weights.nan_to_num()[..., None]).sum(1)
        return torch.nn.functional.pad(weights, (0, 0, 0, len(there) - len(weights))), there


class KeepsTheBuffer(HybridEPLibrary):
    kept: list[Any] = []

    def release(self):
        self.kept.append(self._buffer)


# What is around them.


class ForgetsInputs(call._Flight):
    """What is in flight does not keep what is read."""

    def __init__(self, outs, ins, tag, issued):
        super().__init__(outs, [], tag, issued)


def raw_weights(routing: Routing) -> torch.Tensor:
    return routing.weights
