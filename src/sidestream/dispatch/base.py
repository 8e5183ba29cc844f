"""What a dispatcher is: the protocol, and the values that pass through it.

Legend of shape suffixes: T local tokens, K routes per token, H features, E experts in total, L local experts,
S expert-major slots (rows plus padding), R rows that travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from sidestream.exchange.link import Link

T_co = TypeVar("T_co", covariant=True)


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
    """What a dispatcher may rely on, given once by `wire`.

    Attributes:
        num_experts: Experts in total over the expert-parallel group.
        hidden_size: Width of a row.
        alignment: Every expert's segment of rows is padded to a multiple of this many rows.
    """

    num_experts: int
    hidden_size: int
    alignment: int = 1


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
        certain: A number of rows known without looking to be before the last offset.
    """

    rows: Tensor
    row_weights: Tensor
    offsets: Tensor
    host_offsets: list[int] | None = None
    exact: bool = False
    certain: int = 0


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
    """Moves rows. Has no parameters and is no `nn.Module`. Several plans may be in flight."""

    name: str

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        """Collective, once per instance and before anything else, in the same order on every rank."""
        ...

    def plan(self, routing: Routing) -> Plan:
        """Start the exchange of metadata."""
        ...

    def dispatch(self, x: Tensor, plan: Plan) -> Pending[Received]:
        """Start sending `x` `[T, H]` to its experts. Differentiable in `x` and in the routing weights."""
        ...

    def combine(self, rows: Tensor, plan: Plan) -> Pending[Tensor]:
        """Start the way back of `rows` `[S, H]`; the result is `[T, H]`, a plain sum over K in fp32."""
        ...

    def needed(self) -> Tensor | None:
        """Rows that were really needed, before any drop, on the device; None when nothing can overflow."""
        ...

    def resize(self, budget: int) -> None:
        """Grow the static receive budget. Raises ValueError for a dispatcher that has none."""
        ...

    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks so far."""
        ...

    def metadata_bytes_sent(self) -> int:
        """Of these, the ones that are no rows: counts, routing weights."""
        ...

    def close(self) -> None:
        """Release buffers and groups; collective."""
        ...
