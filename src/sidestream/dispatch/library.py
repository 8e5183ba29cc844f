"""What the adapters of `nccl_ep`, `deep_ep` and `hybrid_ep` share: limits, budget, counters, and waiting for results.

Legend: T tokens, K routes per token, H features, E experts, R ranks, L = E / R local experts, S expert-major slots.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.config.availability import LIBRARIES
from sidestream.config.dispatch_check import LIMITS
from sidestream.dispatch.base import DispatchSpec, Received, Routing, receive_budget
from sidestream.dispatch.counter import Counting, RowCounter
from sidestream.exchange.call import Call, CallChannel, Lane, lane_for
from sidestream.exchange.link import Link

log = logging.getLogger(__name__)


def agree(group: dist.ProcessGroup, problem: str | None) -> None:
    """Collective: raise on every rank if one has a problem, instead of leaving the others waiting."""
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    for rank, text in enumerate(problems):
        if text is not None:
            raise RuntimeError(f"rank {rank} of the expert-parallel group: {text}")


def load(name: str, *modules: str) -> tuple[Any, str | None]:
    """Import a library.

    Args:
        name: Row of `LIBRARIES`.
        modules: What to import beside it, so that it can be reached through it.

    Returns:
        The module, and what is wrong with it; one of the two is None.
    """
    row = LIBRARIES[name]
    try:
        library = importlib.import_module(row.module)
        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        return (
            None,
            f"dispatcher={name}: {row.module} does not import ({error}); set dispatcher.transport=torch",
        )
    if row.symbol is None or hasattr(library, row.symbol):
        return library, None
    others = [other for other in LIBRARIES.values() if other.symbol and hasattr(library, other.symbol)]
    what = f"that of {others[0].name}" if others else "another package"
    return None, (
        f"dispatcher={name}: the installed {row.module} is {what}, it has no {row.symbol}; the two packages cannot "
        f"be installed side by side; set dispatcher.transport=torch or install {row.name}"
    )


def version_of(library: Any, distribution: str) -> str:
    """`" 1.2"`, or nothing where it is not known."""
    version = getattr(library, "__version__", None)
    if version is None:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""
    return f" {version}"


def ranks_per_host(group: dist.ProcessGroup) -> int:
    """Ranks of the group on the host with the fewest. Collective."""
    hosts = [""] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return min(hosts.count(host) for host in hosts)


def check_limits(name: str, spec: DispatchSpec, *, ranks: int, on_host: int, align: int) -> None:
    """What `config.dispatch_check` says of a config, for the values that are used in the end.

    Args:
        name: The option's name, such as `nccl_ep`.
        spec: What `wire` was given.
        ranks: R.
        on_host: Ranks that share a host.
        align: Rows per expert are padded to a multiple.

    Raises:
        ValueError: `dispatcher=<name>: ...; set ...`.
    """
    for is_wrong, what, fix in _limits(name, spec, ranks, on_host, align):
        if is_wrong:
            raise ValueError(f"dispatcher={name}: {what}; {fix}")


def _limits(
    name: str, spec: DispatchSpec, ranks: int, on_host: int, align: int
) -> Iterator[tuple[bool, str, str]]:
    """Yields (is it passed, what, what helps)."""
    limits, local, size = LIMITS[name], spec.num_experts // ranks, spec.dtype.itemsize
    torch_instead = "set dispatcher.transport=torch"
    yield (
        spec.num_experts % ranks != 0,
        f"{spec.num_experts} experts on {ranks} ranks",
        "set model.num_experts",
    )
    yield ranks < LIBRARIES[name].min_ranks, f"{ranks} rank, and it needs two", torch_instead
    tokens = f"max_tokens={spec.max_tokens}, and buffers are sized by it"
    yield spec.max_tokens <= 0, tokens, "set DispatchSpec.max_tokens"
    yield size not in limits.value_bytes, f"rows of {spec.dtype}", "set trainer.precision=bf16-mixed"
    powers = "set dispatcher.alignment and fusion.alignment to powers of two"
    yield align & (align - 1) != 0, f"alignment {align} is no power of two", powers
    row, unit = spec.hidden_size * size, limits.row_bytes
    yield row % unit != 0, f"rows of {row} bytes, which must be a multiple of {unit}", torch_instead
    # Ranks of one host share NVLink. Of more than that nothing is known here, and the library checks itself.
    near, unit = local * on_host, limits.experts_of_machine
    domain = f"{near} experts in an NVLink domain, which must be a multiple of {unit}"
    yield on_host == ranks and near % unit != 0, domain, torch_instead
    most_tokens = limits.tokens or (limits.tokens_across if on_host < ranks else None)
    for value, most, what in (
        (spec.max_tokens, most_tokens, "tokens per rank"),
        (spec.hidden_size, limits.hidden, "values in a row"),
        (spec.num_experts, limits.experts, "experts"),
        (local, limits.local_experts, "experts per rank"),
        (ranks, limits.ranks, "ranks"),
        (spec.top_k, limits.top_k, "experts per token"),
    ):
        too_many = most is not None and value > most
        yield too_many, f"{value} {what}, and at most {most} are supported", torch_instead


class LibraryDispatcher(Counting):
    """Base of the adapters. Subclasses set `name` and `distribution`, and open, close and call the library.

    Args:
        capacity_factor: None: eager. A number: static.
        alignment: Rows per expert are padded to a multiple of this and of what the experts ask for.
        wire_dtype: Only `model`.
        library: Module, or what stands in for it; None imports it in `wire`.
        lane: Where its calls run; None makes one for the device.
    """

    name = "?"
    distribution = "?"

    def __init__(
        self,
        *,
        capacity_factor: float | None = None,
        alignment: int = 1,
        wire_dtype: str = "model",
        library: Any = None,
        lane: Lane | None = None,
    ) -> None:
        if wire_dtype != "model":
            raise ValueError(
                f"dispatcher.wire_dtype={wire_dtype}: dispatcher={self.name} with transport=library sends rows as they "
                f"are; the 8-bit formats of the libraries differ from this one and from each other; "
                f"set dispatcher.transport=torch or dispatcher.wire_dtype=model"
            )
        self.capacity_factor, self.own_alignment = capacity_factor, alignment
        self.library, self._lane = library, lane
        self.align, self.budget = alignment, None  # type: tuple[int, int | None]
        self._channel: CallChannel | None = None
        self._spec: DispatchSpec | None = None

    # What subclasses do.

    def import_library(self) -> tuple[Any, str | None]:
        """See `load`."""
        return load(self.name)

    def check(self, spec: DispatchSpec) -> None:
        """Limits that are in no table; the budget is known. Raises ValueError."""

    def open(self) -> None:
        """Make buffers for the current budget. Collective, on every rank."""
        raise NotImplementedError

    def reopen(self) -> None:
        """The budget has grown. Collective, nothing is in flight."""

    def release(self) -> None:
        """Give up what `open` made. Collective; the lane is idle."""
        raise NotImplementedError

    # What they share.

    @property
    def wired(self) -> tuple[CallChannel, DispatchSpec]:
        assert self._channel is not None and self._spec is not None, "wire() first"
        return self._channel, self._spec

    @property
    def channel(self) -> CallChannel | None:
        """Its hooks see every call; None before `wire`."""
        return self._channel

    @property
    def num_local(self) -> int:
        channel, spec = self.wired
        return spec.num_experts // channel.size

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        assert group is not None, "a library needs a process group"
        if link.name != "native":
            raise ValueError(
                f"link={link.name}: dispatcher={self.name} with transport=library moves rows itself, where a link "
                f"cannot slow it; set dispatcher.transport=torch or link=native"
            )
        self.align = max(self.own_alignment, spec.alignment)
        ranks = dist.get_world_size(group)
        check_limits(self.name, spec, ranks=ranks, on_host=ranks_per_host(group), align=self.align)
        if self.capacity_factor is not None:
            self.budget = receive_budget(self.capacity_factor, spec, alignment=self.align)
            self.counter = RowCounter(spec.num_layers, spec.device)
        self.check(spec)
        problem = None
        if self.library is None:
            self.library, problem = self.import_library()
        agree(group, problem)
        self._spec = spec
        self._channel = CallChannel(group, link, lane=self._lane or lane_for(spec.device))
        self.transport = self.name + version_of(self.library, self.distribution)
        self.open()

    def check_tokens(self, routing: Routing) -> None:
        """Raises ValueError for more tokens than buffers are sized for."""
        _, spec = self.wired
        if (tokens := routing.expert_ids.shape[0]) > spec.max_tokens:
            raise ValueError(
                f"dispatcher={self.name}: {tokens} tokens, but buffers are sized for {spec.max_tokens}; "
                f"set dispatcher=alltoall"
            )

    def note(self, layer: int, needed: Tensor, dropped: Tensor | None = None) -> None:
        """Take in one plan's need, int64; where the library does not say what was dropped, rows past the budget."""
        assert self.counter is not None and self.budget is not None
        if dropped is None:
            dropped = (needed - self.budget).clamp(min=0)
        self.counter.note(layer, needed=needed, dropped=dropped)

    def resize(self, budget: int) -> None:
        before = self.budget
        super().resize(budget)
        if self.budget != before:
            channel, _ = self.wired
            assert channel.pending == 0, "resize with calls in flight"
            channel.lane.synchronize()
            self.reopen()

    def bytes_sent(self) -> int:
        """0: the libraries do not say."""
        return 0

    def metadata_bytes_sent(self) -> int:
        return 0

    def close(self) -> None:
        if self._channel is None:
            return
        self._channel.lane.synchronize()
        self.release()
        super().close()
        self.transport = None


def buffers(device: torch.device, *kinds: tuple[tuple[int, ...], torch.dtype]) -> Callable[[], list[Tensor]]:
    """What makes uninitialised tensors of these shapes and types, and keeps nothing alive meanwhile."""
    return lambda: [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]


def known_weights(routing: Routing) -> Tensor:
    """`[T, K]` fp32 weights, zero without a route, with a gradient of zero there whatever the library returns."""
    weights = routing.weights.float()
    return weights if routing.complete else torch.where(routing.expert_ids < 0, 0.0, weights)


@dataclass
class PendingCall:
    """A dispatch or combine under way: `then` makes its result of the call's differentiable outputs."""

    call: Call
    tokens: tuple[Tensor, ...]
    then: Callable[..., Any] = field(repr=False)

    def wait(self) -> Any:
        return self.then(*self.call.finish(self.tokens))


def received(
    rows: Tensor, row_weights: Tensor, ends_L: Tensor, *, exact: bool, host_offsets: list[int] | None = None
) -> Received:
    """Rows with offsets as the contract wants them: int32, not past the buffer."""
    offsets = ends_L.clamp(max=rows.shape[0]).to(torch.int32)
    return Received(rows, row_weights, offsets, host_offsets, exact=exact)
