"""`strategy=replicate`: our own bucketed all-reduce. Dense parameters over `dp`, experts over `edp`.

Gradients are views of flat storage at fixed addresses, so a recorded step replays into the same memory. Buckets are
reduced while backward still runs, from gradient hooks, in one fixed order on every rank, SUM with factor 1: the loss
was already divided by the global token count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sidestream.exchange.ops import Channel, new_ticket, sum_, wait_
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.assemble import shard_experts
from sidestream.parallel.mesh import Parallel
from sidestream.parallel.reduction import is_expert


@dataclass(eq=False)
class _Bucket:
    channel: Channel
    flat: Tensor
    params: list[nn.Parameter]
    grads: list[Tensor]
    waiting: int = 0
    ticket: int | None = None
    ready: bool = field(default=False)


def _chunks(params: list[nn.Parameter], limit_bytes: float) -> Iterable[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    size = 0.0
    for p in params:
        numel = (p.to_local() if isinstance(p, DTensor) else p).numel()
        nbytes = numel * p.element_size()
        if chunk and (size + nbytes > limit_bytes or p.dtype != chunk[0].dtype):
            yield chunk
            chunk, size = [], 0.0
        chunk.append(p)
        size += nbytes
    if chunk:
        yield chunk


class Replicate:
    """Owns the gradients of a model and reduces them (`parallel/reduction.py` for the protocol).

    Args:
        bucket_mb: Bucket size in MiB.
    """

    name = "replicate"
    holds_replicas = True

    def __init__(self, *, bucket_mb: float) -> None:
        self._limit = bucket_mb * 2**20
        self.buckets: list[_Bucket] = []
        self._channels: list[Channel] = []
        self._order: list[_Bucket] = []
        self._hooks: list[Any] = []
        self._armed = False
        self._next = 0

    def shard(self, model: MoETransformer, parallel: Parallel) -> None:
        shard_experts(model, parallel)

    def attach(self, model: nn.Module, parallel: Parallel) -> None:
        # Backward reaches the last parameters first.
        params = [p for p in model.parameters() if p.requires_grad][::-1]
        for group, members in (
            (parallel.dp_group, [p for p in params if not is_expert(p)]),
            (parallel.edp_group, [p for p in params if is_expert(p)]),
        ):
            # A group of one rank has nothing to add.
            channel = Channel(group if dist.get_world_size(group) > 1 else None)
            self._channels.append(channel)
            self.buckets += [self._make_bucket(channel, chunk) for chunk in _chunks(members, self._limit)]
        position = {id(p): index for index, p in enumerate(params)}
        self._order = sorted(self.buckets, key=lambda b: max(position[id(p)] for p in b.params))
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook_for(bucket))
            for bucket in self.buckets
            for p in bucket.params
        ]

    @staticmethod
    def _make_bucket(channel: Channel, params: list[nn.Parameter]) -> _Bucket:
        locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in params]
        flat = torch.zeros(sum(p.numel() for p in locals_), dtype=params[0].dtype, device=locals_[0].device)
        grads: list[Tensor] = []
        for p, view in zip(params, flat.split([p.numel() for p in locals_])):
            if isinstance(p, DTensor):
                shard = view.view(p.to_local().shape)
                grads.append(DTensor.from_local(shard, p.device_mesh, p.placements, run_check=False))
            else:
                grads.append(view.view(p.shape))
        return _Bucket(channel, flat, params, grads)

    def _hook_for(self, bucket: _Bucket) -> Any:
        def hook(_: Tensor) -> None:
            if self._armed:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    bucket.ready = True
                    self._launch_ready()

        return hook

    def _launch_ready(self) -> None:
        """Launch in the fixed order; a bucket that is ready early waits for those before it."""
        while self._next < len(self._order) and self._order[self._next].ready:
            bucket = self._order[self._next]
            if bucket.channel.group is not None:
                bucket.ticket = new_ticket()
                sum_(bucket.flat, bucket.channel.id, bucket.ticket, "gradients")
            self._next += 1

    def zero(self) -> None:
        self.reattach()
        for bucket in self.buckets:
            bucket.flat.zero_()

    def reattach(self) -> None:
        """Gradients outside the flat storage would not be reduced: replicas would drift apart without a word."""
        for bucket in self.buckets:
            for p, grad in zip(bucket.params, bucket.grads):
                p.grad = grad

    @contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        """Backward inside this context reduces. On exit every gradient is the sum over its ranks."""
        self._armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.waiting, bucket.ready, bucket.ticket = len(bucket.params), False, None
        yield
        for bucket in self._order:  # parameters that got no gradient keep their zeros; nobody is left out
            bucket.ready = True
        self._launch_ready()
        for bucket in self.buckets:
            if bucket.ticket is not None:
                wait_(bucket.flat, bucket.channel.id, bucket.ticket)
                bucket.ticket = None
        self._armed = False

    def shard_group(self, parallel: Parallel, *, expert: bool) -> dist.ProcessGroup | None:
        return parallel.ep_group if expert and parallel.ep_size > 1 else None

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for channel in self._channels:
            if not channel.pending:  # after an error in backward there may be; that one is to be seen
                channel.close()
        self._channels.clear()
