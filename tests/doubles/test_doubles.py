"""The doubles themselves: the four calls of a step against a dense computation, and every trap they keep.

Legend: T tokens, K routes per token, H features, E experts, L local experts, P output rows.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.doubles.deep_ep import DeepEP, align_up
from tests.doubles.hybrid_ep import HybridEP
from tests.doubles.nccl_ep import NcclEP
from tests.doubles.rules import (
    ContractError,
    Corruption,
    DeviceAssert,
    Hang,
    InputChanged,
    InvalidArgument,
    Stream,
    TeardownOrder,
    Trap,
    UseAfterFree,
    garbage,
)
from tests.rank_pool import ranks

E, K = 8, 2


def problem(world, tokens, hidden, dtype):
    """Data of all ranks: x, ids (some -1), weights, gradient of the output, scale of each expert."""
    g = torch.Generator().manual_seed(5)
    ids = [
        torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(n)]) if n else torch.zeros(0, K).long()
        for n in tokens
    ]
    for i in ids:
        i[::3, 1] = -1
        i[4::5] = -1
    x = [torch.randn(n, hidden, generator=g).to(dtype) for n in tokens]
    grad = [torch.randn(n, hidden, generator=g).to(dtype) for n in tokens]
    w = [torch.rand(n, K, generator=g) for n in tokens]
    return SimpleNamespace(x=x, ids=ids, w=w, grad=grad, scale=torch.arange(1.0, E + 1), world=world)


def dense(p, rank, keep=None):
    """y, grad x, grad w of `sum_k w_k scale_k x` over the kept routes."""
    ids, keep = p.ids[rank], p.ids[rank] >= 0 if keep is None else keep
    x, w = p.x[rank].float().requires_grad_(), p.w[rank].clone().requires_grad_()
    scale = torch.where(keep, p.scale[ids.clamp(min=0)], 0.0)
    y = (torch.where(keep, w, 0) * scale).sum(1, keepdim=True) * x
    y.backward(p.grad[rank].float())
    return y.detach(), x.grad, w.grad


def through(quad, p, rank, world):
    """Experts between the four calls; whatever lies past the last offset is NaN on the way back."""
    rows, row_w, offsets = quad.dispatch(p.x[rank], p.w[rank])
    n, num_local = int(offsets[-1]), E // world
    assert rows[:n].isfinite().all() and row_w[:n].isfinite().all()
    expert = torch.searchsorted(offsets, torch.arange(n), right=True)
    scale = p.scale[rank * num_local + expert].unsqueeze(1)
    factor = scale * row_w[:n].unsqueeze(1)
    out, back = garbage(*rows.shape, dtype=rows.dtype), garbage(*rows.shape, dtype=rows.dtype)
    back_w = garbage(rows.shape[0], dtype=torch.float32)
    out[:n] = (rows[:n] * factor).to(rows.dtype)
    y = quad.combine(out)
    grad_rows = quad.combine_backward(p.grad[rank])
    back[:n] = (grad_rows[:n] * factor).to(rows.dtype)
    back_w[:n] = (grad_rows[:n] * scale * rows[:n]).sum(1).float()
    grad_x, grad_w = quad.dispatch_backward(back, back_w)
    return y, grad_x, torch.where(p.ids[rank] < 0, 0, grad_w), rows, offsets


def compare(found, expected, dtype):
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.5}
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.float(), b, **tolerance)


# The four calls, as a caller must make them.


class NcclQuad:
    def __init__(self, rank, world, p, *, limit=0, alignment=4, policy="DROP", dtype=torch.float32, most=64):
        self.ep, self.stream, self.p, self.rank = NcclEP(), Stream(), p, rank
        ep, hidden = self.ep, p.x[rank].shape[1]
        self.comm = ep.interop.torch.get_nccl_comm_from_group(dist.group.WORLD)
        self.group = ep.Group.create(
            self.comm,
            ep.GroupConfig(
                algorithm=ep.Algorithm.HIGH_THROUGHPUT,
                num_experts=E,
                max_dispatch_tokens_per_rank=most,
                max_recv_tokens_per_rank=limit,
                max_token_bytes=hidden * 4,
                num_topk=K,
                overflow_policy=ep.OverflowPolicy[policy] if limit else ep.OverflowPolicy.AUTO,
            ),
        )
        self.limit, self.ids = limit, p.ids[rank]
        self.counters = torch.zeros(E // world, dtype=torch.int32)
        self.total = torch.zeros(1, dtype=torch.int32)
        info = ep.LayoutInfo(
            expert_counters=ep.Tensor(self.counters), recv_total_counter=ep.Tensor(self.total)
        )
        self.handle = self.group.create_handle(
            ep.Layout.EXPERT_MAJOR,
            ep.Tensor(self.ids),
            layout_info=info,
            config=ep.HandleConfig(dispatch_output_per_expert_alignment=alignment),
            stream=self.stream,
        )
        self.rows = limit

    def dispatch(self, x, w):
        ep = self.ep
        if not self.limit:
            self.stream.synchronize()
            self.rows = int(self.total)
        rows, row_w = x.new_empty(self.rows, x.shape[1]), torch.empty(self.rows)
        self.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(x), topk_weights=ep.Tensor(w)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows), topk_weights=ep.Tensor(row_w)),
            stream=self.stream,
        )
        assert rows.isnan().all()  # nothing has run
        self.stream.synchronize()
        return rows, row_w, self.counters.cumsum(0, dtype=torch.int32)

    def combine(self, rows, *, weights=None):
        ep, out = self.ep, torch.empty_like(self.p.x[self.rank])
        inputs = ep.CombineInputs(tokens=ep.Tensor(rows), topk_weights=weights)
        self.handle.combine(inputs, ep.CombineOutputs(tokens=ep.Tensor(out)), stream=self.stream)
        self.stream.synchronize()
        return out

    def combine_backward(self, grad):
        ep, rows = self.ep, grad.new_empty(self.rows, grad.shape[1])
        self.handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(grad)),
            ep.DispatchOutputs(tokens=ep.Tensor(rows)),
            config=ep.DispatchConfig(pass_direction=ep.PassDir.BWD),
            stream=self.stream,
        )
        self.stream.synchronize()
        return rows

    def dispatch_backward(self, rows, row_w, *, with_weights=True):
        ep, grad_x, grad_w = self.ep, torch.empty_like(self.p.x[self.rank]), torch.empty(self.ids.shape)
        self.handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(rows), topk_weights=ep.Tensor(row_w)),
            ep.CombineOutputs(
                tokens=ep.Tensor(grad_x), topk_weights=ep.Tensor(grad_w) if with_weights else None
            ),
            config=ep.CombineConfig(pass_direction=ep.PassDir.BWD),
            stream=self.stream,
        )
        self.stream.synchronize()
        return grad_x, grad_w

    def close(self):
        self.handle.destroy()
        self.group.destroy()
        self.comm.destroy()
        self.ep.check_closed()


class DeepQuad:
    def __init__(self, rank, world, p, *, sync=True, alignment=4, **options):
        self.lib, self.stream, self.alignment, self.sync = DeepEP(), Stream(), alignment, sync
        self.ids, hidden = p.ids[rank], p.x[rank].shape[1]
        arguments = {
            "num_max_tokens_per_rank": 64,
            "hidden": hidden,
            "num_topk": K,
            "explicitly_destroy": True,
        }
        self.buffer = self.lib.ElasticBuffer(dist.group.WORLD, **(arguments | options))

    def _run(self, function, *args, **kwargs):
        with self.stream.current():
            result = function(*args, **kwargs)
        self.stream.synchronize()
        return result

    def dispatch(self, x, w, **changes):
        arguments = {
            "num_experts": E,
            "num_max_tokens_per_rank": 64,
            "expert_alignment": self.alignment,
            "num_sms": 20,
            "do_cpu_sync": self.sync,
            "do_expand": True,
            "do_zero_padding": True,
        }
        rows, _, row_w, self.handle, _ = self._run(
            self.buffer.dispatch, x, self.ids, w, **(arguments | changes)
        )
        ends = [align_up(end, self.alignment) for end in self.handle.psum_num_recv_tokens_per_expert.tolist()]
        return rows, row_w, torch.tensor(ends)

    def combine(self, rows, **changes):
        return self._run(self.buffer.combine, rows, self.handle, **({"num_sms": 20} | changes))[0]

    def combine_backward(self, grad, **changes):
        arguments = {"handle": self.handle, "num_sms": 20, "do_expand": True, "do_zero_padding": True}
        return self._run(self.buffer.dispatch, grad, **(arguments | changes))[0]

    def dispatch_backward(self, rows, row_w):
        return self._run(self.buffer.combine, rows, self.handle, row_w, num_sms=20)[:2]

    def close(self):
        self.buffer.destroy()
        self.lib.check_closed()


class HybridQuad:
    def __init__(self, rank, world, p, *, limit=None, alignment=4, non_blocking=None):
        self.lib, self.stream, self.alignment, self.limit = HybridEP(), Stream(), alignment, limit
        self.non_blocking = limit is not None if non_blocking is None else non_blocking
        self.ids, hidden = p.ids[rank], p.x[rank].shape[1]
        self.buffer = self.lib.HybridEPBuffer(dist.group.WORLD, hidden, 64, E // world)

    def _run(self, function, **kwargs):
        with self.stream.current():
            result = function(**kwargs)
        self.stream.synchronize()
        return result

    def dispatch(self, x, w, **changes):
        safe = torch.where(self.ids < 0, E, self.ids)
        probs = torch.zeros(len(x), E + 1).scatter(1, safe, w)[:, :E].contiguous()
        there = torch.zeros(len(x), E + 1).scatter(1, safe, 1.0)[:, :E].bool().contiguous()
        arguments = {
            "hidden": x,
            "routing_map": there,
            "probs": probs,
            "num_permuted_tokens": self.limit,
            "pad_multiple": self.alignment,
            "non_blocking": self.non_blocking,
        }
        rows, row_w, _, self.counts, self.handle = self._run(
            self.buffer.dispatch_with_permute, **(arguments | changes)
        )
        return rows, row_w, self.counts.cumsum(0)

    def combine(self, rows, **changes):
        arguments = {"hidden": rows, "handle": self.handle, "pad_multiple": self.alignment}
        return self._run(self.buffer.combine_with_unpermute, **(arguments | changes))[0]

    def combine_backward(self, grad, **changes):
        arguments = {
            "hidden": grad,
            "handle": self.handle,
            "num_permuted_tokens": self.handle[0].rows,
            "pad_multiple": self.alignment,
            "non_blocking": self.non_blocking,
        }
        rows, probs, _, self.cached_counts, _ = self._run(
            self.buffer.dispatch_with_permute, **(arguments | changes)
        )
        assert probs is None
        return rows

    def dispatch_backward(self, rows, row_w):
        arguments = {"hidden": rows, "probs": row_w, "handle": self.handle, "pad_multiple": self.alignment}
        grad_x, dense_w = self._run(self.buffer.combine_with_unpermute, **arguments)
        padded = torch.cat([dense_w, torch.zeros(len(grad_x), 1)], 1)
        return grad_x, padded.gather(1, torch.where(self.ids < 0, E, self.ids))

    def close(self):
        self.buffer = None
        gc.collect()
        self.lib.check_closed()


QUADS = {
    "nccl_ep eager": (NcclQuad, {}, torch.float32),
    "nccl_ep static": (NcclQuad, {"limit": 128}, torch.float32),
    "nccl_ep trap, room": (NcclQuad, {"limit": 128, "policy": "TRAP", "alignment": 1}, torch.float32),
    "deep_ep eager": (DeepQuad, {}, torch.bfloat16),
    "deep_ep no sync": (DeepQuad, {"sync": False}, torch.bfloat16),
    "deep_ep deterministic": (DeepQuad, {"deterministic": True, "alignment": 1}, torch.bfloat16),
    "hybrid_ep blocking": (HybridQuad, {}, torch.bfloat16),
    "hybrid_ep non-blocking": (HybridQuad, {"limit": 128}, torch.bfloat16),
}


def tokens_for(kind, world):
    return [16] * world if kind is HybridQuad else [16, 11, 0, 5][:world]


def quad_matches(rank, world, name):
    kind, options, dtype = QUADS[name]
    hidden = 256 if kind is DeepQuad else 16
    p = problem(world, tokens_for(kind, world), hidden, dtype)
    quad = kind(rank, world, p, **options)
    *found, rows, offsets = through(quad, p, rank, world)
    compare(found, dense(p, rank), dtype)
    tail = rows[int(offsets[-1]) :]
    zero_tail = kind is NcclQuad and options.get("policy", "DROP") == "DROP"
    assert (tail == 0).all() if zero_tail else tail.isnan().all()
    quad.close()


@pytest.mark.parametrize("name", QUADS)
def test_four_calls_against_a_dense_computation(name):
    ranks(2).run(quad_matches, name=name)


@pytest.mark.full
@pytest.mark.parametrize("name", QUADS)
def test_four_calls_on_four_ranks(name):
    ranks(4).run(quad_matches, name=name)


@pytest.mark.parametrize("name", [name for name in QUADS if "hybrid" not in name])
def test_four_calls_on_one_rank(name):
    ranks(1).run(quad_matches, name=name)


# Overflow.


def overflow(rank, world, name):
    limit = {"nccl_ep": 64, "hybrid_ep": 16}[name]
    # All routes of both ranks go to experts 0..3 of rank 0; alignment 8 makes zones of 8 * n rows.
    tokens = 40 if name == "nccl_ep" else 16
    p = problem(world, [tokens] * world, 16, torch.float32 if name == "nccl_ep" else torch.bfloat16)
    for r in range(world):
        p.ids[r] = torch.tensor([[t % 2, 2 + t % 2] for t in range(tokens)])
    quad = (NcclQuad if name == "nccl_ep" else HybridQuad)(rank, world, p, limit=limit, alignment=8)
    *found, rows, offsets = through(quad, p, rank, world)
    # By hand: expert by expert, source rank by source rank, token by token; zones of multiples of 8 rows.
    keep, slot = [torch.zeros(tokens, K, dtype=torch.bool) for _ in range(world)], 0
    for expert in range(4):
        for source in range(world):
            for token, k in (p.ids[source] == expert).nonzero().tolist():
                keep[source][token, k] = slot < limit
                slot += 1
        slot = -(-slot // 8) * 8
    needed = slot if rank == 0 else 0
    assert offsets[-1] == (limit if rank == 0 else 0)
    if name == "nccl_ep":
        assert int(quad.total) == needed  # pre-drop
        # P bounds the deduplicated staging as well: tokens past it arrive as zero rows.
        lost = max(0, world * tokens - limit)
        for source, token in [(s, t) for s in range(world) for t in range(tokens)][world * tokens - lost :]:
            keep[source][token] = False
    else:
        assert int(quad.handle[-1]) == (rank == 0)
    compare(found, dense(p, rank, keep[rank]), p.x[0].dtype)
    quad.close()
    return needed


@pytest.mark.parametrize("name", ["nccl_ep", "hybrid_ep"])
def test_the_last_local_experts_lose_first(name):
    assert ranks(2).run(overflow, name=name)[0] > 64 * (name == "nccl_ep")


# Traps. Each body breaks one rule on every rank.


def small(name, rank, world, **options):
    kind = {"nccl": NcclQuad, "deep": DeepQuad, "hybrid": HybridQuad}[name]
    dtype = torch.float32 if kind is NcclQuad else torch.bfloat16
    p = problem(world, [16] * world, 256 if kind is DeepQuad else 16, dtype)
    return kind(rank, world, p, **options), p


def ready(name, rank, world, **options):
    """A quad that has dispatched, and the rows for combine."""
    quad, p = small(name, rank, world, **options)
    rows, row_w, _ = quad.dispatch(p.x[rank], p.w[rank])
    return quad, p, torch.zeros_like(rows), torch.zeros_like(row_w)


def nccl_send(quad, x, w, rows, row_w):
    """A dispatch that has not run."""
    ep = quad.ep
    quad.handle.dispatch(
        ep.DispatchInputs(tokens=ep.Tensor(x), topk_weights=ep.Tensor(w)),
        ep.DispatchOutputs(tokens=ep.Tensor(rows), topk_weights=ep.Tensor(row_w)),
        stream=quad.stream,
    )


def input_dies(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    rows, row_w = torch.empty(128, 16), torch.empty(128)
    nccl_send(quad, p.x[rank].clone(), p.w[rank], rows, row_w)  # the clone is gone at once
    quad.stream.synchronize()


def output_dies(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    rows, row_w = torch.empty(128, 16), torch.empty(128)
    nccl_send(quad, p.x[rank], p.w[rank], rows, row_w)
    del rows
    quad.stream.synchronize()


def input_changes(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    rows, row_w = torch.empty(128, 16), torch.empty(128)
    nccl_send(quad, p.x[rank], p.w[rank], rows, row_w)
    p.x[rank].zero_()
    quad.stream.synchronize()


def routing_dies(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    quad.stream.synchronize()
    quad.ids = p.ids = None
    quad.dispatch(p.x[rank], p.w[rank])


def weights_in_forward_combine(rank, world):
    quad, _, rows, row_w = ready("nccl", rank, world, limit=128)
    quad.combine(rows, weights=quad.ep.Tensor(row_w))


def backward_combine_without_weights(rank, world):
    quad, _, rows, row_w = ready("nccl", rank, world, limit=128)
    quad.dispatch_backward(rows, row_w, with_weights=False)


def layout_at_dispatch(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    ep, info = quad.ep, quad.ep.LayoutInfo()
    quad.handle.dispatch(ep.DispatchInputs(), ep.DispatchOutputs(), layout_info=info, stream=quad.stream)


def mixed_integers(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    ep, a, b = quad.ep, torch.zeros(E // world, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    info = ep.LayoutInfo(expert_counters=ep.Tensor(a), recv_total_counter=ep.Tensor(b))
    quad.handle.update(ep.Tensor(quad.ids), layout_info=info, stream=quad.stream)


def small_output(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    quad.rows = 127
    quad.dispatch(p.x[rank], p.w[rank])


def two_streams(rank, world):
    quad, p = small("nccl", rank, world, limit=128)
    quad.stream = Stream()
    quad.dispatch(p.x[rank], p.w[rank])


def trap(rank, world):
    p = problem(world, [64] * world, 16, torch.float32)
    for ids in p.ids:
        ids.copy_(torch.tensor([0, 1]))
    quad = NcclQuad(rank, world, p, limit=64, policy="TRAP")
    quad.dispatch(p.x[rank], p.w[rank])


def different_operations(rank, world):
    quad, p, rows, row_w = ready("nccl", rank, world, limit=128)
    quad.combine(rows) if rank else quad.combine_backward(p.grad[rank])


def nccl_order(*steps):
    def body(rank, world):
        quad, _ = small("nccl", rank, world, limit=128)
        quad.stream.synchronize()
        for step in steps:
            getattr(quad, step).destroy()

    return body


group_first, comm_first = nccl_order("group"), nccl_order("handle", "comm")


def nccl_left(rank, world):
    quad, _ = small("nccl", rank, world, limit=128)
    quad.ep.check_closed()


def process_group_first(rank, world):
    group = dist.new_group(list(range(world)))
    comm = NcclEP().interop.torch.get_nccl_comm_from_group(group)
    dist.destroy_process_group(group)
    comm.destroy()


NCCL_TRAPS = {
    input_dies: (UseAfterFree, "dispatch tokens"),
    output_dies: (UseAfterFree, "outputs.tokens"),
    input_changes: (InputChanged, "dispatch tokens"),
    routing_dies: (UseAfterFree, "topk_idx"),
    weights_in_forward_combine: (InvalidArgument, "FWD combine"),
    backward_combine_without_weights: (InvalidArgument, "mandatory"),
    layout_at_dispatch: (InvalidArgument, "layout_info"),
    mixed_integers: (InvalidArgument, "share one dtype"),
    small_output: (InvalidArgument, "127 rows where 128"),
    two_streams: (Corruption, "two streams"),
    trap: (Trap, "256 rows needed, 64 allocated"),
    different_operations: (ContractError, "different calls"),
    group_first: (TeardownOrder, "live handles"),
    comm_first: (TeardownOrder, "before its EP group"),
    nccl_left: (TeardownOrder, "never destroyed"),
    process_group_first: (TeardownOrder, "process group"),
}


def deep_cached_without_num_sms(rank, world):
    quad, p, *_ = ready("deep", rank, world)
    quad.combine_backward(p.grad[rank], num_sms=0)


def deep_cached_without_expand(rank, world):
    quad, p, *_ = ready("deep", rank, world)
    quad.combine_backward(p.grad[rank], do_expand=False)


def deep_no_sms(rank, world):
    quad, p = small("deep", rank, world)
    quad.dispatch(p.x[rank], p.w[rank], num_sms=0)


def deep_event(rank, world):
    quad, p = small("deep", rank, world)
    quad.dispatch(p.x[rank], p.w[rank], previous_event=SimpleNamespace())


def deep_combine_weights(rank, world):
    quad, _, rows, row_w = ready("deep", rank, world, allow_multiple_reduction=False)
    quad.dispatch_backward(rows, row_w)


def deep_fp32(rank, world):
    quad, p = small("deep", rank, world)
    quad.dispatch(p.x[rank].float(), p.w[rank])


def deep_too_few_rows(rank, world):
    quad, _, rows, _ = ready("deep", rank, world, sync=False)
    quad.combine(rows[:8])


def deep_left(rank, world):
    quad, _ = small("deep", rank, world)
    lib = quad.lib
    del quad
    gc.collect()
    lib.check_closed()


def deep_not_explicit(rank, world):
    quad, _ = small("deep", rank, world, explicitly_destroy=False)
    quad.buffer.destroy()


def deep_different_bounds(rank, world):
    small("deep", rank, world, num_max_tokens_per_rank=64 + rank)


DEEP_TRAPS = {
    deep_cached_without_num_sms: (InvalidArgument, "num_sms=0"),
    deep_cached_without_expand: (Corruption, "do_expand"),
    deep_no_sms: (ZeroDivisionError, "division"),
    deep_event: (InvalidArgument, "allocate_on_comm_stream"),
    deep_combine_weights: (DeviceAssert, "allow_multiple_reduction"),
    deep_fp32: (InvalidArgument, "bf16"),
    deep_too_few_rows: (InvalidArgument, "combine: 8 rows"),
    deep_left: (TeardownOrder, "never destroyed"),
    deep_not_explicit: (TeardownOrder, "explicitly_destroy"),
    deep_different_bounds: (ContractError, "different calls"),
}


def hybrid_unequal(rank, world):
    p = problem(world, [16, 12], 16, torch.bfloat16)
    HybridQuad(rank, world, p).dispatch(p.x[rank], p.w[rank])


def hybrid_odd(rank, world):
    p = problem(world, [15, 15], 16, torch.bfloat16)
    HybridQuad(rank, world, p).dispatch(p.x[rank], p.w[rank])


def hybrid_minus_one(rank, world):
    quad, p = small("hybrid", rank, world)
    changes = {"routing_map": None, "probs": None, "topk_idx": quad.ids, "topk_weights": p.w[rank]}
    quad.dispatch(p.x[rank], p.w[rank], **changes)


def hybrid_ragged_budget(rank, world):
    quad, p = small("hybrid", rank, world, limit=126)
    quad.dispatch(p.x[rank], p.w[rank])


def hybrid_unguarded(rank, world):
    quad, p = small("hybrid", rank, world, limit=8, non_blocking=False)
    quad.dispatch(p.x[rank], p.w[rank])


def hybrid_pad_differs(rank, world):
    quad, _, rows, _ = ready("hybrid", rank, world)
    quad.combine(rows, pad_multiple=None)


def hybrid_fuse_differs(rank, world):
    quad, p, *_ = ready("hybrid", rank, world)
    quad.combine_backward(p.grad[rank], fuse_permute_dispatch=True)


def hybrid_left(rank, world):
    quad, _ = small("hybrid", rank, world)
    quad.lib.check_closed()


HYBRID_TRAPS = {
    hybrid_unequal: (Hang, r"tokens per rank differ: \[16, 12\]"),
    hybrid_odd: (Hang, "odd number"),
    hybrid_minus_one: (Corruption, "-1 is out of bounds"),
    hybrid_ragged_budget: (InvalidArgument, "pad_multiple"),
    hybrid_unguarded: (Corruption, "rows written to a buffer of 8"),
    hybrid_pad_differs: (Corruption, "pad_multiple differs"),
    hybrid_fuse_differs: (Corruption, "fuse"),
    hybrid_left: (TeardownOrder, "buffers left"),
}
TRAPS = {body.__name__: (body, *what) for body, what in (NCCL_TRAPS | DEEP_TRAPS | HYBRID_TRAPS).items()}


def falls_into(rank, world, name):
    body, error, message = TRAPS[name]
    with pytest.raises(error, match=message):
        body(rank, world)


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name):
    ranks(2).run(falls_into, name=name)


def limits(rank, world):
    ep = NcclEP()
    comm = ep.interop.torch.get_nccl_comm_from_group(dist.group.WORLD)
    good = {
        "algorithm": ep.Algorithm.HIGH_THROUGHPUT,
        "num_experts": 8,
        "max_dispatch_tokens_per_rank": 128,
        "max_recv_tokens_per_rank": 128,
        "max_token_bytes": 64,
    }
    bad = [
        {"num_experts": 9},
        {"num_experts": 2},
        {"num_experts": 1024},
        {"max_dispatch_tokens_per_rank": 8256, "max_recv_tokens_per_rank": 8256},
        {"max_dispatch_tokens_per_rank": 100},
        {"max_recv_tokens_per_rank": 64},
        {"max_token_bytes": 72},
        {"max_recv_tokens_per_rank": 0},
        {"max_recv_tokens_per_rank": 0, "num_topk": 2, "overflow_policy": ep.OverflowPolicy.DROP},
    ]
    for change in bad:
        with pytest.raises(InvalidArgument):
            ep.Group.create(comm, ep.GroupConfig(**(good | change)))
    with pytest.raises(Hang):
        ep.Group.create(comm, ep.GroupConfig(**good, max_num_sms=17))
    with pytest.raises(ContractError, match="different calls"):
        ep.Group.create(comm, ep.GroupConfig(**(good | {"max_recv_tokens_per_rank": 128 + 64 * rank})))
    ep.Group.create(comm, ep.GroupConfig(**good)).destroy()
    comm.destroy()
    for arguments in ({"hidden": 128}, {"hidden": 256, "num_topk": 33}, {"num_max_tokens_per_rank": 0}):
        with pytest.raises(InvalidArgument):
            DeepEP().ElasticBuffer(
                dist.group.WORLD, **({"num_max_tokens_per_rank": 64, "hidden": 256} | arguments)
            )
    for hidden, experts in ((24, 4), (16, 1)):
        with pytest.raises(InvalidArgument):
            HybridEP().HybridEPBuffer(dist.group.WORLD, hidden, 64, experts)


def test_limits():
    ranks(2).run(limits)


def one_rank(rank, world):
    with pytest.raises(InvalidArgument, match="group size >= 2"):
        HybridEP().HybridEPBuffer(dist.group.WORLD, 16, 64, 8)


def test_hybrid_ep_needs_two_ranks():
    ranks(1).run(one_rank)


def uninitialised(rank, world):
    """What may not be read holds garbage: pads without zero padding, cached counts, the flag of blocking mode."""
    quad, p = small("deep", rank, world)
    rows, row_w, offsets = quad.dispatch(p.x[rank], p.w[rank], do_zero_padding=False)
    real = quad.handle.num_unaligned_recv_tokens_per_expert.sum()
    assert rows[: offsets[-1]].isnan().any(1).sum() == row_w.isnan().sum() == offsets[-1] - real > 0
    quad, p, *_ = ready("hybrid", rank, world)
    quad.combine_backward(p.grad[rank])
    assert (quad.cached_counts > 10**9).all() and int(quad.handle[-1]) not in (0, 1)
    quad, p, *_ = ready("hybrid", rank, world, limit=128)
    assert int(quad.handle[-1]) == 0 and quad.handle[7].sum() <= quad.counts.sum() <= 128


def test_what_is_uninitialised():
    ranks(2).run(uninitialised)


def late_event(rank, world):
    quad, p = small("deep", rank, world)
    with quad.stream.current():
        arguments = {"num_experts": E, "num_sms": 20, "do_expand": True, "async_with_compute_stream": True}
        rows, _, _, _, event = quad.buffer.dispatch(p.x[rank], quad.ids, p.w[rank], **arguments)
        quad.stream.synchronize()
        before = rows.isnan().all()
        event.current_stream_wait()
        quad.stream.synchronize()
    assert before and not rows.isnan().any(1).all()


def test_deep_ep_results_are_late_until_the_event_is_waited_for():
    ranks(2).run(late_event)
