"""Arms of the dispatch benchmark: a dispatcher, or the transfers under it without the rest, as four timed parts.

    dispatch            [T, H] and a routing -> expert-major rows [S, H], as a grouped GEMM takes them
    combine             rows [S, H] -> [T, H]
    combine_backward    gradient of [T, H] -> gradient of the rows
    dispatch_backward   gradients of rows and row weights -> gradients of [T, H] and of the routing weights

and the four in one go. Counts, the host's reads, permutation, padding and sums are all inside, wherever an arm does
them.

Legend: T tokens, K routes per token, H features, S expert-major slots, N rows that travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from sidestream.build import make
from sidestream.conformance import rows
from sidestream.dispatch.base import DispatchSpec, Received, Routing
from sidestream.exchange.link import NativeLink
from sidestream.exchange.ops import Channel
from sidestream.exchange.transfer import Transfer
from sidestream.fusion.base import resolve_alignment
from sidestream.measure.arms import compose_options
from sidestream.measure.dispatch_routing import Draw
from sidestream.measure.shapes import LayerShape

PARTS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
FLOORS = ("exchange", "bare")


@dataclass(frozen=True)
class Given(rows.Given):
    """What an arm works on in one round, on the device."""

    @classmethod
    def of(cls, draw: Draw, x: Tensor, output_gradient: Tensor) -> Given:
        device = x.device
        routing = Routing(draw.ids.to(device), draw.weights.to(device), complete=draw.complete)
        return cls(x, output_gradient, routing)


class DispatchArm(Protocol):
    """One arm. The parts are called in their order after `prepare`, or `cycle` alone.

    Attributes:
        kind: `dispatcher`, `exchange` or `bare`.
        transport: What moves the bytes.
    """

    name: str
    kind: str
    transport: str | None

    def prepare(self, given: Given) -> None:
        """Take in a round; not timed. Collective."""
        ...

    def dispatch(self) -> None: ...
    def combine(self) -> None: ...
    def combine_backward(self) -> None: ...
    def dispatch_backward(self) -> None: ...
    def cycle(self) -> None: ...

    def clear(self) -> None:
        """Let go of the round."""
        ...

    def close(self) -> None:
        """Collective."""
        ...


def compose_dispatch(conf: Path, shape: LayerShape, arm: str) -> DictConfig:
    """The config of an arm `<dispatcher>[,<override>...]`.

    Raises:
        ValueError: The name does not read like this.
    """
    dispatcher, *overrides = arm.split(",")
    if not dispatcher or "=" in dispatcher or not all("=" in part for part in overrides):
        raise ValueError(
            f"arm={arm}: expected <dispatcher>[,<override>...], such as nccl_ep,dispatcher.capacity_factor=1.25"
        )
    return compose_options(conf, shape, f"dispatcher={dispatcher}", *overrides)


class DispatcherArm:
    """A dispatcher of conf/, wired over all ranks. Collective.

    Args:
        name: `<dispatcher>[,<override>...]`.
        device: Where the rows live.
        shape: Sizes; every rank has up to T tokens.
        extra: Overrides that come after those of the name.

    Raises:
        ValueError: The name is no arm, or the dispatcher cannot run on these ranks.
    """

    kind = "dispatcher"

    def __init__(
        self,
        name: str,
        shape: LayerShape,
        *,
        conf: Path,
        dtype: torch.dtype,
        device: torch.device,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.name, self.shape, self.device = name, shape, device
        self.cfg = compose_dispatch(conf, shape, ",".join([name, *extra]))
        alignment = resolve_alignment(self.cfg.fusion.alignment, dtype=dtype, device_type=device.type)
        self.alignment = math.lcm(alignment, self.cfg.dispatcher.get("alignment", 1))
        self.dispatcher = make(self.cfg, "dispatcher")
        spec = DispatchSpec(
            num_experts=shape.num_experts,
            hidden_size=shape.hidden_size,
            alignment=alignment,
            max_tokens=shape.tokens,
            top_k=shape.top_k,
            dtype=dtype,
            device=device,
        )
        try:
            self.dispatcher.wire(group=dist.group.WORLD, spec=spec, link=NativeLink())
        except (RuntimeError, NotImplementedError) as error:  # a library that is not there, on every rank
            raise ValueError(f"arm={name}: {error or 'this transport does not exist yet'}") from error
        self.transport: str | None = self.dispatcher.transport
        self._given: Given | None = None

    @property
    def budget(self) -> int | None:
        """Rows of the receive buffer; None: as many as there are."""
        return self.dispatcher.budget

    @property
    def channel(self) -> Channel | None:
        """Where rows travel; None where nothing does."""
        return getattr(getattr(self.dispatcher, "chosen", self.dispatcher), "channel", None)

    def prepare(self, given: Given) -> None:
        self._given = given
        self.x = given.x.detach().requires_grad_()
        self.weights = given.routing.weights.detach().requires_grad_()
        self.routing = Routing(given.routing.expert_ids, self.weights, given.routing.complete)

    def dispatch(self) -> None:
        self.plan = self.dispatcher.plan(self.routing)
        self.received: Received = self.dispatcher.dispatch(self.x, self.plan).wait()

    def combine(self) -> None:
        self.rows = self.received.rows.detach().requires_grad_()
        self.output = self.dispatcher.combine(self.rows, self.plan).wait()

    def combine_backward(self) -> None:
        assert self._given is not None
        (self.rows_gradient,) = torch.autograd.grad(self.output, self.rows, self._given.output_gradient)

    def dispatch_backward(self) -> None:
        received = self.received
        # Any gradient of the weights will do, as long as it travels.
        gradients = [self.rows_gradient, received.row_weights.detach()]
        torch.autograd.grad([received.rows, received.row_weights], [self.x, self.weights], gradients)

    def cycle(self) -> None:
        assert self._given is not None
        plan = self.dispatcher.plan(self.routing)
        received = self.dispatcher.dispatch(self.x, plan).wait()
        output = self.dispatcher.combine(received.rows, plan).wait()
        gradients = [self._given.output_gradient, received.row_weights.detach()]
        torch.autograd.grad([output, received.row_weights], [self.x, self.weights], gradients)

    def clear(self) -> None:
        for name in (
            "_given",
            "x",
            "weights",
            "routing",
            "plan",
            "received",
            "rows",
            "output",
            "rows_gradient",
        ):
            setattr(self, name, None)

    def close(self) -> None:
        self.dispatcher.close()


@dataclass(frozen=True)
class _Rows:
    """What travels in dispatch, on the host: rows for and from each rank, and rows of the buffers."""

    send: Tensor
    recv: Tensor
    num_sent: int
    num_received: int


class _Floor:
    """The transfers of rows under a dispatcher, without counts, weights, permutation and sums. Collective.

    Args:
        kind: `exchange` or `bare`.
        of: The dispatcher's arm. A library does not say what it sends: its floor is what its contract on
            torch.distributed sends, with exact sizes.
    """

    def __init__(self, kind: str, of: DispatcherArm, *, conf: Path, dtype: torch.dtype) -> None:
        cfg = of.cfg.dispatcher
        if cfg.get("wire_dtype", "model") != "model":
            raise ValueError(f"floors={of.name}: its rows are coded; expected dispatcher.wire_dtype=model")
        if dist.get_world_size() == 1:
            raise ValueError(f"floors={of.name}: nothing travels on one rank")
        extra: tuple[str, ...] = ("dispatcher.transport=torch",) if "transport" in cfg else ()
        if of.transport != "torch":
            extra += ("dispatcher.capacity_factor=null",)
        self.kind, self.name = kind, f"{kind} of {of.name}"
        self._like = DispatcherArm(of.name, of.shape, conf=conf, dtype=dtype, device=of.device, extra=extra)
        self.transport = self._like.transport
        channel = self._like.channel
        assert channel is not None
        self.channel = channel

    def prepare(self, given: Given) -> None:
        self._like.prepare(given)
        sizes: Any = self._like.dispatcher.plan(self._like.routing).sizes
        self._like.clear()
        self.sizes = _Rows(sizes.send, sizes.recv, sizes.num_sent, sizes.num_received)
        hidden = given.x.shape[1]
        self.x = torch.ones((sizes.num_sent, hidden), dtype=given.x.dtype, device=given.x.device)
        self.gradient = torch.ones_like(self.x)
        self.x.requires_grad_(self.kind == "exchange")

    def close(self) -> None:
        self._like.close()


class ExchangeFloor(_Floor):
    """Two differentiable transfers, as every dispatcher on torch.distributed uses them."""

    def __init__(self, of: DispatcherArm, *, conf: Path, dtype: torch.dtype) -> None:
        super().__init__("exchange", of, conf=conf, dtype=dtype)

    def _there(self) -> Tensor:
        s = self.sizes
        transfer = Transfer(self.channel, s.send, s.recv, "dispatch")
        return transfer.finish(transfer.start(self.x, num_received=s.num_received))

    def _back(self, rows: Tensor) -> Tensor:
        s = self.sizes
        transfer = Transfer(self.channel, s.recv, s.send, "combine")
        return transfer.finish(transfer.start(rows, num_received=s.num_sent))

    def dispatch(self) -> None:
        self.rows = self._there()

    def combine(self) -> None:
        self.leaf = self.rows.detach().requires_grad_()
        self.output = self._back(self.leaf)

    def combine_backward(self) -> None:
        (self.rows_gradient,) = torch.autograd.grad(self.output, self.leaf, self.gradient)

    def dispatch_backward(self) -> None:
        torch.autograd.grad(self.rows, self.x, self.rows_gradient)

    def cycle(self) -> None:
        torch.autograd.grad(self._back(self._there()), self.x, self.gradient)

    def clear(self) -> None:
        for name in ("x", "gradient", "rows", "leaf", "output", "rows_gradient"):
            setattr(self, name, None)


class BareFloor(_Floor):
    """`dist.all_to_all_single` with the same bytes, called directly; the output is a fresh tensor there too."""

    def __init__(self, of: DispatcherArm, *, conf: Path, dtype: torch.dtype) -> None:
        super().__init__("bare", of, conf=conf, dtype=dtype)

    def prepare(self, given: Given) -> None:
        super().prepare(given)
        self._send, self._recv = self.sizes.send.tolist(), self.sizes.recv.tolist()

    def _all_to_all(self, rows: Tensor, send: list[int], recv: list[int], num_received: int) -> Tensor:
        out = rows.new_empty((num_received, rows.shape[1]))
        dist.all_to_all_single(out[: sum(recv)], rows[: sum(send)], recv, send, group=self.channel.group)
        return out

    def _there(self, x: Tensor) -> Tensor:
        return self._all_to_all(x, self._send, self._recv, self.sizes.num_received)

    def _back(self, rows: Tensor) -> Tensor:
        return self._all_to_all(rows, self._recv, self._send, self.sizes.num_sent)

    def dispatch(self) -> None:
        self.rows = self._there(self.x)

    def combine(self) -> None:
        self._back(self.rows)

    def combine_backward(self) -> None:
        self.rows_gradient = self._there(self.gradient)

    def dispatch_backward(self) -> None:
        self._back(self.rows_gradient)

    def cycle(self) -> None:
        self._back(self._there(self.x))
        self._back(self._there(self.gradient))

    def clear(self) -> None:
        for name in ("x", "gradient", "rows", "rows_gradient"):
            setattr(self, name, None)
