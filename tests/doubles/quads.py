"""The four calls of a step on each double, as a caller must make them, and a dense computation to compare with.

Legend: T tokens, K routes per token, H features, E experts, L local experts, P output rows.
"""

import gc
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.doubles.deep_ep import DeepEP, align_up
from tests.doubles.hybrid_ep import HybridEP
from tests.doubles.nccl_ep import NcclEP
from tests.doubles.rules import Stream, garbage

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
