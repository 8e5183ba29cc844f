"""Timing: all arms once per round, in an order that changes from round to round, a barrier around every call."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def order_of_round(num_arms: int, round_index: int, *, seed: int) -> list[int]:
    """The order of the arms in a round, the same on every rank.

    A shuffled order, moved on by one place every second round and reversed in the others: over `2 * num_arms` rounds
    every arm has been in every place twice, and before and after each of its neighbours equally often.
    """
    order = list(range(num_arms))
    random.Random(seed).shuffle(order)
    shift = round_index // 2 % max(num_arms, 1)
    order = order[shift:] + order[:shift]
    return order[::-1] if round_index % 2 else order


def median(seconds: Tensor) -> Tensor:
    """The median over the first axis, the rounds.

    Of an even number it is the mean of the middle two, where `Tensor.median` takes the lower.

    Args:
        seconds: `[rounds, ...]`, floating point; the rest of the shape comes back.
    """
    return seconds.quantile(0.5, dim=0)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def finish_device(device: torch.device) -> None:
    """Wait until the device has done all that was issued; on a CPU nothing is outstanding."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(part: Callable[[], object], device: torch.device) -> float:
    """Seconds of this rank from a barrier until `part` and all it has issued to the device is done.

    Timed by the host's clock with the device idle at both ends: nothing that a library puts on a stream of its own is
    missed, at the price of one launch and one synchronisation, the same for every arm.
    """
    barrier()
    finish_device(device)
    begin = time.perf_counter()
    part()
    finish_device(device)
    return time.perf_counter() - begin


def time_rounds(
    num_arms: int,
    measure: Callable[[int, int], Sequence[float]],
    *,
    parts: int,
    rounds: int,
    warmup: int,
    seed: int,
) -> Tensor:
    """Every arm once per round, in the order of `order_of_round`; garbage is collected between rounds only. Collective.

    Args:
        measure: Number of the arm, number of the round with those of the warm-up -> seconds of this rank, per part.
        parts: How many figures that are.

    Returns:
        `[rounds, arms, parts]` float64 seconds of the slowest rank.
    """
    seconds = torch.zeros(rounds, num_arms, parts, dtype=torch.float64)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, rounds):
            for number in order_of_round(num_arms, index % (2 * num_arms), seed=seed):
                times = measure(number, index + warmup)
                if index >= 0:
                    seconds[index, number] = torch.tensor(times, dtype=torch.float64)
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    if dist.is_initialized():
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds
