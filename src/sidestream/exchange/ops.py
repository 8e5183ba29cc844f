"""`sidestream::start_` and `sidestream::wait_`: the only way rows travel between ranks.

`sidestream::sum_`, with the same wait, adds up over ranks: gradients, and counts that a loss needs.

All work on buffers that the caller owns, so a graph, a tape or a compiler sees where a transfer begins and where
its result may be read. Sizes are tensors on the host and are read inside the operator.

`start_` captures nothing from the current autograd state; the differentiable pair is in `transfer.py`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.exchange.link import Link, NativeLink
from sidestream.launch import phase
from sidestream.launch.waiting import LostExchange


@dataclass(frozen=True)
class Span:
    """One transfer as it was measured. Times in `time.monotonic()` seconds.

    Attributes:
        completed: When the wait returned; later than `arrived` if the wait came late.
        arrived: When the rows were here and the link had finished; None where that is not known.
    """

    tag: str
    issued: float
    wait_began: float
    completed: float
    sent_bytes: int
    received_bytes: int
    arrived: float | None = None


@dataclass
class _InFlight:
    work: dist.Work | None
    out: Tensor
    x: Tensor
    due: float | None
    tag: str
    issued: float
    sent_bytes: int
    received_bytes: int
    done: list[float] = field(default_factory=list)  # when the transport was, while spans are recorded


@dataclass(eq=False)
class Channel:
    """One process group with its link and its counters. Create on every rank in the same order.

    Attributes:
        group: Process group of the exchange; None for a single rank without torch.distributed.
        bytes_sent: Bytes this rank has sent to *other* ranks since creation.
        metadata_bytes_sent: How many of these are no rows: transfers tagged `<name>.<what>`, such as "dispatch.counts".
        on_start: Called with the tag before a transfer is issued (fault injection, order logs).
        spans: Filled while it is a list; None switches recording off.
        deliver: While set, nothing travels and no wait waits: it is called with the tag and `out`, and gives `out` the
            memory of what arrived in an earlier run (measurements of compute alone).
    """

    group: dist.ProcessGroup | None
    link: Link = field(default_factory=NativeLink)
    bytes_sent: int = 0
    metadata_bytes_sent: int = 0
    spans: list[Span] | None = None
    on_start: Callable[[str], None] | None = None
    on_wait: Callable[[str], None] | None = None
    deliver: Callable[[str, Tensor], None] | None = None
    id: int = -1
    size: int = 1
    rank: int = 0
    members: str = ""
    ranks: list[int] = field(default_factory=list)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.group is not None:
            self.size = dist.get_world_size(self.group)
            self.rank = dist.get_rank(self.group)
            self.ranks = dist.get_process_group_ranks(self.group)
            kind = self.group.group_desc.removeprefix("undefined")
            self.members = f"{kind} group, ranks {', '.join(map(str, self.ranks))}".lstrip()
        self.id = next(_channel_ids)
        _channels[self.id] = self

    @property
    def pending(self) -> int:
        """Transfers that were started and not waited for."""
        return len(self._in_flight)

    def close(self) -> None:
        """Forget the channel. Raises if a transfer was never waited for."""
        assert not self._in_flight, f"{len(self._in_flight)} transfers were started and never waited for"
        _channels.pop(self.id, None)


_channel_ids = itertools.count()
_channels: dict[int, Channel] = {}
_tickets = itertools.count()


def new_ticket(layer: int | None = None) -> int:
    """Return a number that pairs one `start_` with one `wait_`, and knows the MoE layer, if told.

    In the number, so that a recording that repeats the pair knows it too.
    """
    return next(_tickets) * _LAYERS + (0 if layer is None else 1 + layer % (_LAYERS - 1))


_LAYERS = 1 << 16


# A plain library definition: `torch.library.custom_op` costs about 60 us more per call.
_library = torch.library.Library("sidestream", "DEF")
_library.define(
    "start_(Tensor(a!) out, Tensor x, Tensor send_counts, Tensor recv_counts, int channel, int ticket, str tag)"
    " -> ()"
)
_library.define("wait_(Tensor(a!) out, int channel, int ticket) -> ()")
_library.define("sum_(Tensor(a!) x, int channel, int ticket, str tag) -> ()")


@torch.library.impl(_library, "start_", "CompositeExplicitAutograd")
def _start(
    out: Tensor, x: Tensor, send_counts: Tensor, recv_counts: Tensor, channel: int, ticket: int, tag: str
) -> None:
    """Start an all-to-all of rows. `out` may be read after `wait_` with the same ticket.

    Args:
        out: `[at least sum(recv_counts), ...]`, contiguous, caller-owned; any dtype that `x` has. Rows past the sum
            are not written.
        x: `[at least sum(send_counts), ...]`, contiguous, rows ordered by destination rank; rows past the sum do
            not travel. Must stay alive until the wait.
        send_counts: `[ranks]` int64 on the host, rows for each rank.
        recv_counts: `[ranks]` int64 on the host, rows from each rank.
        channel: `Channel.id`.
        ticket: From `new_ticket()`.
        tag: Name for spans and logs, such as "dispatch" or "combine.backward".
    """
    ch = _channels[channel]
    if ch.on_start is not None:
        ch.on_start(tag)
    phase.beat(tag)
    send, recv = send_counts.tolist(), recv_counts.tolist()
    if sum(send) > x.shape[0] or sum(recv) > out.shape[0]:
        raise ValueError(
            f"{tag}: counts do not fit the buffers: send {send} from {x.shape[0]} rows, "
            f"receive {recv} into {out.shape[0]} rows"
        )
    row_bytes = x.element_size() * math.prod(x.shape[1:])
    sent = row_bytes * (sum(send) - send[ch.rank])
    received = row_bytes * (sum(recv) - recv[ch.rank])
    issued = time.monotonic()
    if ch.deliver is not None:
        ch.deliver(tag, out)
        ch._in_flight[ticket] = _InFlight(None, out, x, None, tag, issued, 0, 0)
        return
    work = None
    x, out = x[: sum(send)], out[: sum(recv)]
    if ch.size == 1:
        out.copy_(x)
    else:
        work = dist.all_to_all_single(
            out, x, output_split_sizes=recv, input_split_sizes=send, group=ch.group, async_op=True
        )
    due = ch.link.completion(sent_bytes=sent, received_bytes=received) if ch.size > 1 else None
    ch.bytes_sent += sent
    if "." in tag.removesuffix(".backward"):
        ch.metadata_bytes_sent += sent
    flight = ch._in_flight[ticket] = _InFlight(work, out, x, due, tag, issued, sent, received)
    if ch.spans is not None and work is not None and x.device.type == "cpu":
        work.get_future().then(lambda _: flight.done.append(time.monotonic()))


@torch.library.impl(_library, "sum_", "CompositeExplicitAutograd")
def _sum(x: Tensor, channel: int, ticket: int, tag: str) -> None:
    """Start to add up `x` over the ranks, in place; it may be read after `wait_` with the same ticket.

    Not throttled and not counted: a reduction is no exchange of rows.
    """
    ch = _channels[channel]
    if ch.on_start is not None:
        ch.on_start(tag)
    phase.beat(tag)
    issued = time.monotonic()
    work = dist.all_reduce(x, group=ch.group, async_op=True) if ch.size > 1 else None
    ch._in_flight[ticket] = _InFlight(work, x, x, None, tag, issued, 0, 0)


@torch.library.impl(_library, "wait_", "CompositeExplicitAutograd")
def _wait(out: Tensor, channel: int, ticket: int) -> None:
    """Wait for the transfer with this ticket; afterwards `out` holds the received rows.

    On a throttled link this sleeps until the link would have finished. It does not spin.
    """
    ch = _channels[channel]
    flight = ch._in_flight.pop(ticket)
    wait_began = time.monotonic()
    if ch.on_wait is not None:
        ch.on_wait(flight.tag)
    if flight.work is not None:
        try:
            flight.work.wait()
        except RuntimeError as error:
            layer = ticket % _LAYERS - 1
            where = flight.tag if layer < 0 else f"{flight.tag} of MoE layer {layer}"
            raise LostExchange(where, ch.members, ch.ranks, str(error)) from error
    if flight.due is not None and (rest := flight.due - time.monotonic()) > 0:
        time.sleep(rest)
    if ch.spans is not None:
        completed = max(time.monotonic(), wait_began)
        arrived = min(max(*flight.done, flight.due or 0.0), completed) if flight.done else None
        sizes = (flight.sent_bytes, flight.received_bytes)
        ch.spans.append(Span(flight.tag, flight.issued, wait_began, completed, *sizes, arrived))


@torch.library.register_fake("sidestream::start_", lib=_library)
def _start_fake(out, x, send_counts, recv_counts, channel, ticket, tag):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sidestream::sum_", lib=_library)
def _sum_fake(x, channel, ticket, tag):  # type: ignore[no-untyped-def]
    return None


@torch.library.register_fake("sidestream::wait_", lib=_library)
def _wait_fake(out, channel, ticket):  # type: ignore[no-untyped-def]
    return None


start_ = torch.ops.sidestream.start_.default
wait_ = torch.ops.sidestream.wait_.default
sum_ = torch.ops.sidestream.sum_.default


def sum_over(x: Tensor, channel: Channel, tag: str) -> None:
    """Add up `x` over the ranks of a channel, in place."""
    ticket = new_ticket()
    sum_(x, channel.id, ticket, tag)
    wait_(x, channel.id, ticket)


def byte_counters() -> dict[int, tuple[int, int]]:
    """Bytes and metadata bytes sent so far, of every channel of this process."""
    return {id: (channel.bytes_sent, channel.metadata_bytes_sent) for id, channel in _channels.items()}


def add_bytes(counted: dict[int, tuple[int, int]], times: int = 1) -> None:
    """Add to the counters of the channels, as if that had been sent so many times."""
    for id, (sent, metadata) in counted.items():
        if (channel := _channels.get(id)) is not None:
            channel.bytes_sent += times * sent
            channel.metadata_bytes_sent += times * metadata
