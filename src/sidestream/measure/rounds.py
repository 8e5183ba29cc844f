"""Timing: all arms once per round, in an order that changes from round to round, a barrier around every call."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.measure.arms import Arm


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


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def call(arm: Arm, x: Tensor, output_gradient: Tensor) -> tuple[float, float]:
    """One forward and one backward of an arm, from cleared gradients.

    Returns:
        Seconds of this rank, forward and backward.
    """
    arm.clear_gradients()
    leaf = x.detach().requires_grad_()
    barrier()
    begin = time.perf_counter()
    output = arm.forward(leaf)
    forward = time.perf_counter() - begin
    barrier()
    begin = time.perf_counter()
    output.backward(output_gradient)
    backward = time.perf_counter() - begin
    barrier()
    return forward, backward


def run_rounds(
    arms: Sequence[Arm],
    *,
    tokens: Callable[[int], Tensor],
    output_gradient: Tensor,
    rounds: int,
    warmup: int,
    seed: int,
) -> Tensor:
    """Time all arms. Collective.

    Args:
        tokens: Number of a draw -> `[T, D]`; every call has a draw of its own. The GEMM library keeps its kernels by
            row count for the whole process: with common tokens the first arm of a round would build those of the
            others.
        output_gradient: `[T, D]`.
        rounds: Rounds that count.
        warmup: Rounds before them that do not.

    Returns:
        `[rounds, arms, 2]` float64 seconds of the slowest rank, forward and backward.
    """
    seconds = torch.zeros(rounds, len(arms), 2, dtype=torch.float64)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, rounds):
            for number in order_of_round(len(arms), index % (2 * len(arms)), seed=seed):
                x = tokens((index + warmup) * len(arms) + number)
                times = call(arms[number], x, output_gradient)
                arms[number].clear_gradients()
                if index >= 0:
                    seconds[index, number] = torch.tensor(times, dtype=torch.float64)
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    if dist.is_initialized():
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds
