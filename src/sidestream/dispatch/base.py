"""What a dispatcher is: the protocol, and the values that pass through it.

Legend of shape suffixes: T local tokens, K routes per token, H features, E experts in total, L local experts,
S expert-major slots (rows plus padding), R rows that travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.exchange.link import Link

T_co = TypeVar("T_co", covariant=True)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Routing:
    """The router's decision for the local tokens.

    Attributes:
        expert_ids: `[T, K]` int64, global expert ids; -1 means "no route", its weight is never read.
        weights: `[T, K]` fp32.
        complete: Promise that no id is -1, which saves the passes that deal with missing routes.
    """

    expert_ids: Tensor
    weights: Tensor
    complete: bool = False

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]


@dataclass(frozen=True)
class DispatchSpec:
    """What a dispatcher may rely on, given once by `wire`. Equal on all ranks.

    Attributes:
        num_experts: Experts in total over the expert-parallel group.
        hidden_size: Width of a row.
        alignment: Every expert's segment of rows is padded to a multiple of this many rows. What the experts ask
            for; a dispatcher's own `alignment` may raise it.
        max_tokens: No plan has more tokens on any rank. Static budgets and libraries are sized by it.
        top_k: Routes per token.
        num_layers: MoE layers that share the dispatcher; rows of `needed()`.
        dtype: Dtype of the rows.
        device: Where the rows are.
    """

    num_experts: int
    hidden_size: int
    alignment: int = 1
    max_tokens: int = 0
    top_k: int = 1
    num_layers: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU


@dataclass(frozen=True)
class Received:
    """Rows for the local experts, expert-major.

    Attributes:
        rows: `[S, H]`. Rows at and past `offsets[-1]` are undefined and must not be read. Padding rows inside a
            segment are zero.
        row_weights: `[S]` fp32, the routing weight of each row; zero on padding rows.
        offsets: `[L]` int32, inclusive ends of the experts' segments, on the device.
        host_offsets: The same on the host when the dispatcher knows them anyway (eager), else None.
        exact: `rows` ends at the last offset: there is no tail.
    """

    rows: Tensor
    row_weights: Tensor
    offsets: Tensor
    host_offsets: list[int] | None = None
    exact: bool = False


class Pending(Protocol, Generic[T_co]):
    """A transfer under way."""

    def wait(self) -> T_co:
        """Block until the result may be read, and return it. Call exactly once."""
        ...


class Plan(Protocol):
    """The metadata of one routing. It lives until the backward of its dispatch and combine is done."""

    def rows(self) -> int:
        """Slots of the local experts. Eager dispatchers make their one host read here, on the first call."""
        ...


class Dispatcher(Protocol):
    """Moves rows. Has no parameters and is no `nn.Module`. Several plans may be in flight.

    Attributes:
        name: The option's name, such as `alltoall`.
        transport: What moves the bytes, once wired: "torch", or the name of a library; None before, and for `local`.
        budget: Rows of the static receive buffer per rank, once wired; None when sizes are exact (eager).
    """

    name: str
    transport: str | None
    budget: int | None

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        """Collective, once per instance and before anything else, in the same order on every rank."""
        ...

    def plan(self, routing: Routing, *, layer: int = 0) -> Plan:
        """Start the exchange of metadata. `layer` counts MoE layers and is where `needed` is written."""
        ...

    def dispatch(self, x: Tensor, plan: Plan) -> Pending[Received]:
        """Start sending `x` `[T, H]` to its experts. Differentiable in `x` and in the routing weights."""
        ...

    def combine(self, rows: Tensor, plan: Plan) -> Pending[Tensor]:
        """Start the way back of `rows` `[S, H]`; the result is `[T, H]`, a plain sum over K in fp32.

        Rows at and past the last offset are not read, and neither is their gradient by anyone.
        """
        ...

    def needed(self) -> Tensor | None:
        """`[num_layers]` int64 on the device: most rows this rank needed in a plan of the layer, before any drop.

        Since `reset_needed`. Reading it is the caller's business. None when nothing can overflow.
        """
        ...

    def dropped(self) -> Tensor | None:
        """`[num_layers]` int64 on the device: routes of each layer that found no room on any plan of this rank.

        Since `reset_needed`. A library that does not say counts rows past the budget, padding included.
        """
        ...

    def reset_needed(self) -> None:
        """Start counting anew: an attempt begins."""
        ...

    def resize(self, budget: int) -> None:
        """Grow the static receive budget; collective, no plan in flight. Raises ValueError if there is none."""
        ...

    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks so far; 0 where a library moves them and does not say."""
        ...

    def metadata_bytes_sent(self) -> int:
        """How many of `bytes_sent` are no rows: counts, expert ids, routing weights."""
        ...

    def close(self) -> None:
        """Release buffers and groups; collective."""
        ...


def receive_budget(capacity_factor: float, spec: DispatchSpec, *, alignment: int) -> int:
    """Rows of a static receive buffer: `ceil(factor x max_tokens x top_k)`, rounded up to the alignment and to 64.

    64 because CPU kernels round differently in the tail of a buffer, and a budget must not change bits.
    """
    unit = math.lcm(alignment, 64)
    rows = math.ceil(Fraction(str(capacity_factor)) * spec.max_tokens * spec.top_k)
    return -(-rows // unit) * unit
