"""The doubles themselves: the four calls of a step against a dense computation, and every trap they keep.

Legend: P output rows.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.doubles.deep_ep import DeepEP
from tests.doubles.hybrid_ep import HybridEP
from tests.doubles.nccl_ep import NcclEP
from tests.doubles.quads import DeepQuad, E, HybridQuad, K, NcclQuad, compare, dense, problem, through
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
)
from tests.rank_pool import ranks

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
    *found, _, offsets = through(quad, p, rank, world)
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
    quad, _ = small("nccl", rank, world, limit=128)
    ep, info = quad.ep, quad.ep.LayoutInfo()
    quad.handle.dispatch(ep.DispatchInputs(), ep.DispatchOutputs(), layout_info=info, stream=quad.stream)


def mixed_integers(rank, world):
    quad, _ = small("nccl", rank, world, limit=128)
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
    quad, p, rows, _ = ready("nccl", rank, world, limit=128)
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
    deep_too_few_rows: (Corruption, "read from 8 rows"),
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
