"""Exchanges for the measurement of compute alone and of communication alone.

RecordExchanges     takes note of every transfer of a run: what was sent, and the buffer it arrived in
Deliver             gives these buffers out again, in the same order, without a transfer and without waiting
Replay              makes the same transfers again, each after the one before it, without anything else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.exchange.call import CallChannel
from sidestream.exchange.ops import Channel, new_ticket, start_, wait_
from sidestream.model.transformer import MoETransformer


@dataclass(frozen=True)
class Exchange:
    """One transfer: the arguments of its `start_`."""

    out: Tensor
    x: Tensor
    send_counts: Tensor
    recv_counts: Tensor
    tag: str


class RecordExchanges(TorchDispatchMode):
    """While entered, keeps the transfers in the order of their starts, and their buffers alive.

    Attributes:
        exchanges: So far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is start_:
            out, x, send_counts, recv_counts, _, _, tag = args
            self.exchanges.append(Exchange(out, x, send_counts, recv_counts, tag))
        return func(*args, **(kwargs or {}))


class Deliver:
    """What `Channel.deliver` calls: the buffers of a recorded run, from the first one on."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges
        self._next = 0

    def __call__(self, tag: str, out: Tensor) -> None:
        recorded = self._exchanges[self._next]
        assert tag == recorded.tag, f"transfer {self._next} is {tag}, but {recorded.tag} was recorded"
        self._next += 1
        out.set_(recorded.out)  # type: ignore[call-overload]

    @property
    def finished(self) -> bool:
        return self._next == len(self._exchanges)


class Replay:
    """Makes recorded transfers again, into buffers of its own."""

    def __init__(self, channel: Channel, exchanges: Sequence[Exchange]) -> None:
        self._channel, self._exchanges = channel, exchanges
        self._outs = [torch.empty_like(exchange.out) for exchange in exchanges]

    def run(self, first: int, last: int) -> None:
        """Transfers `first` to `last - 1`, one after another. Collective."""
        for exchange, out in zip(self._exchanges[first:last], self._outs[first:last]):
            ticket = new_ticket()
            counts = (exchange.send_counts, exchange.recv_counts)
            start_(out, exchange.x, *counts, self._channel.id, ticket, exchange.tag)
            wait_(out, self._channel.id, ticket)


def channel_of(model: MoETransformer) -> Channel:
    """Where the rows of the model travel.

    Raises:
        ValueError: Nothing travels, or a library moves the rows, whose calls cannot be repeated by themselves.
    """
    dispatcher: Any = model.parts.dispatcher
    channel = getattr(getattr(dispatcher, "chosen", dispatcher), "channel", None)
    if channel is None or channel.size == 1:
        raise ValueError(
            "measuring overlap: nothing travels between ranks; set trainer.devices=2 and a dispatcher that moves rows"
        )
    if isinstance(channel, CallChannel):
        raise ValueError(
            f"measuring overlap: dispatcher={dispatcher.name} calls a library, whose transfers cannot be made alone; "
            f"set dispatcher.transport=torch"
        )
    return channel
